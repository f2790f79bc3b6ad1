// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `--check-build`, in the form that Horovod's scripts read.

use std::collections::BTreeMap;

use farandole::config::Config;
use farandole::cuda::{Places, built};

use crate::surroundings::{Distribution, Python};

/// Returns the abilities of this installation; `modules` has the package of each module.
pub(crate) fn check_build(
    python: &Python,
    modules: &BTreeMap<String, Vec<Distribution>>,
) -> String {
    let installed = |module: &str| modules.contains_key(module);
    let mut page = format!("Farandole v{}:\n", env!("CARGO_PKG_VERSION"));
    section(
        &mut page,
        "Frameworks",
        &[
            ("TensorFlow", installed("tensorflow")),
            ("Keras", installed("keras")),
            ("PyTorch", installed("torch")),
            ("JAX", installed("jax")),
            ("MXNet", installed("mxnet")),
        ],
    );
    section(&mut page, "Controllers", &[("Farandole", true), ("MPI", false), ("Gloo", false)]);
    section(
        &mut page,
        "Tensor Operations",
        &[
            ("shared memory", true),
            ("TCP", true),
            ("NCCL", has_nccl(python)),
            ("DDL", false),
            ("CCL", false),
            ("MPI", false),
            ("Gloo", false),
        ],
    );
    page
}

fn has_nccl(python: &Python) -> bool {
    let named = Config::from_env().map(|config| config.cuda_libraries).unwrap_or_default();
    let mut places = Places::of(&named);
    places.packages.extend(python.folders.iter().cloned());
    built(&places).1 > 0
}

fn section(page: &mut String, title: &str, rows: &[(&str, bool)]) {
    page.push_str(&format!("\nAvailable {title}:\n"));
    for (name, is_there) in rows {
        page.push_str(&format!("    [{}] {name}\n", if *is_there { "X" } else { " " }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_frameworks_have_a_cross() {
        let modules = [("tensorflow".to_owned(), vec![Distribution::default()])].into();
        let page = check_build(&Python::default(), &modules);
        for row in [
            "Available Frameworks:\n    [X] TensorFlow\n",
            "    [ ] PyTorch\n",
            "    [X] TCP\n",
            "    [ ] MPI\n",
        ] {
            assert!(page.contains(row), "{row:?} is missing in\n{page}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `--check-build`, in the format that Horovod's scripts parse.

use std::collections::BTreeMap;

use farandole::config::Config;
use farandole::cuda::{LibrarySearchPath, detect_driver_and_nccl_version};

use crate::embedding_interpreter::{PythonDistribution, PythonInstallation};

/// Returns the features of this installation; `modules` has the distributions of each module.
pub(crate) fn check_build(
    python: &PythonInstallation,
    modules: &BTreeMap<String, Vec<PythonDistribution>>,
) -> String {
    let installed = |module: &str| modules.contains_key(module);
    let mut page = format!("Farandole v{}:\n", env!("CARGO_PKG_VERSION"));
    append_section(
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
    append_section(
        &mut page,
        "Controllers",
        // Scripts look for these lines, so features that never exist are listed, too.
        &[("Farandole", true), ("MPI", false), ("Gloo", false)],
    );
    append_section(
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

fn has_nccl(python: &PythonInstallation) -> bool {
    let named = Config::from_env().map(|config| config.cuda_libraries).unwrap_or_default();
    let mut places = LibrarySearchPath::from_knob(&named);
    // NCCL may come from a wheel and not from the system.
    places.packages.extend(python.folders.iter().cloned());
    detect_driver_and_nccl_version(&places).1 > 0
}

fn append_section(page: &mut String, title: &str, rows: &[(&str, bool)]) {
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
        let modules = [("tensorflow".to_owned(), vec![PythonDistribution::default()])].into();
        let page = check_build(&PythonInstallation::default(), &modules);
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native`: registers one submodule for each crate, without logic.
//!
//! ```text
//! farandole (Python) ── farandole._native.engine ──> engine.rs ── facade ──> engine
//!                    ── farandole._native.reader ──> reader.rs ── facade ──> reader
//!                       ...                          one file and one .pyi for each submodule
//! ```

mod arrow;
mod cli;
mod compress;
mod cuda;
mod device;
mod door;
mod elastic;
mod engine;
mod error;
mod hosts;
mod images;
mod interruptible_wait;
mod launcher;
mod logging;
mod metrics;
mod prepare;
mod reader;
mod registrar;
mod settings;
mod store;
mod tensor;
mod timeline;
mod ui;
mod values;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Fills one submodule.
type RegisterSubmoduleFn = fn(&Bound<'_, PyModule>) -> PyResult<()>;

/// Every submodule: its name below `farandole._native`, and the function that fills it. Append
/// yours.
const NATIVE_SUBMODULES: &[(&str, RegisterSubmoduleFn)] = &[
    ("cli", cli::register_submodule),
    ("compress", compress::register_submodule),
    ("cuda", cuda::register_submodule),
    ("door", door::register_submodule),
    ("elastic", elastic::register_submodule),
    ("engine", engine::register_submodule),
    ("hosts", hosts::register_submodule),
    ("images", images::register_submodule),
    ("launcher", launcher::register_submodule),
    ("logging", logging::register_submodule),
    ("metrics", metrics::register_submodule),
    ("prepare", prepare::register_submodule),
    ("reader", reader::register_submodule),
    ("registrar", registrar::register_submodule),
    ("settings", settings::register_submodule),
    ("store", store::register_submodule),
    ("timeline", timeline::register_submodule),
    ("ui", ui::register_submodule),
    ("values", values::register_submodule),
];

/// Fills the extension module.
// The module keeps its state in locks, so interpreters without a GIL need not switch one on for it.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    let py = module.py();
    // Submodules of an extension are not importable by their dotted name unless they are listed
    // here.
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
    for (name, register) in NATIVE_SUBMODULES {
        let full = format!("farandole._native.{name}");
        let submodule = PyModule::new(py, &full)?;
        register(&submodule)?;
        module.add(*name, &submodule)?;
        modules.set_item(full, &submodule)?;
    }
    Ok(())
}

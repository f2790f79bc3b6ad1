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
mod launcher;
mod logging;
mod prepare;
mod reader;
mod registrar;
mod runtime;
mod store;
mod tensor;
mod timeline;
mod ui;
mod values;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Fills one submodule.
type Register = fn(&Bound<'_, PyModule>) -> PyResult<()>;

/// Every submodule: its name below `farandole._native`, and the function that fills it. Append
/// yours.
const SUBMODULES: &[(&str, Register)] = &[
    ("cli", cli::register),
    ("compress", compress::register),
    ("cuda", cuda::register),
    ("door", door::register),
    ("elastic", elastic::register),
    ("engine", engine::register),
    ("hosts", hosts::register),
    ("images", images::register),
    ("launcher", launcher::register),
    ("logging", logging::register),
    ("prepare", prepare::register),
    ("reader", reader::register),
    ("registrar", registrar::register),
    ("store", store::register),
    ("timeline", timeline::register),
    ("ui", ui::register),
    ("values", values::register),
];

/// The extension module.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    let py = module.py();
    // Submodules of an extension are not importable by their dotted name unless they are listed
    // here.
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
    for (name, register) in SUBMODULES {
        let full = format!("farandole._native.{name}");
        let submodule = PyModule::new(py, &full)?;
        register(&submodule)?;
        module.add(*name, &submodule)?;
        modules.set_item(full, &submodule)?;
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.ui`: the run viewer, and the timeline of all ranks.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use farandole::ui::timeline::{Pieces, Summary, merge};
use farandole::ui::{self, Error, Fault, Settings};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::chain;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(merge_timelines, module)?)?;
    module.add_class::<Timelines>()?;
    module.add_class::<Viewer>()
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn refuse(error: Error) -> PyErr {
    let message = chain(&error);
    match error.fault() {
        Fault::Usage => PyValueError::new_err(message),
        Fault::Environment => PyOSError::new_err(message),
    }
}

#[pyclass(frozen, module = "farandole._native.ui")]
struct Viewer {
    url: String,
    path: String,
    port: u16,
    server: Mutex<Option<ui::Viewer>>,
}

#[pymethods]
impl Viewer {
    #[new]
    fn new(py: Python<'_>, stores: Vec<String>, page: PathBuf, port: u16) -> PyResult<Self> {
        let settings = Settings { stores, page, port };
        let server = py.detach(|| ui::Viewer::start(&settings)).map_err(refuse)?;
        Ok(Self {
            url: server.url(),
            path: server.path(),
            port: server.port(),
            server: Mutex::new(Some(server)),
        })
    }

    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    #[getter]
    fn path(&self) -> &str {
        &self.path
    }

    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.server.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

/// Returns a summary as Python has it: JSON for its fields, and lines for people.
fn told(summary: &Summary) -> (String, Vec<String>) {
    (summary.json(), summary.lines())
}

/// Merges files or folders into one trace.
#[pyfunction]
#[pyo3(signature = (inputs, output, /))]
fn merge_timelines(
    py: Python<'_>,
    inputs: Vec<PathBuf>,
    output: PathBuf,
) -> PyResult<(String, Vec<String>)> {
    Ok(told(&py.detach(|| merge(&inputs, &output)).map_err(refuse)?))
}

/// Timelines that come in pieces.
#[pyclass(frozen, module = "farandole._native.ui")]
struct Timelines {
    pieces: Mutex<Pieces>,
}

#[pymethods]
impl Timelines {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { pieces: Mutex::new(Pieces::new().map_err(refuse)?) })
    }

    fn take(&self, task: u32, piece: &[u8]) -> PyResult<()> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner).take(task, piece).map_err(refuse)
    }

    #[pyo3(signature = (output, /))]
    fn merge(&self, py: Python<'_>, output: PathBuf) -> PyResult<(String, Vec<String>)> {
        let merged =
            py.detach(|| self.pieces.lock().unwrap_or_else(PoisonError::into_inner).merge(&output));
        Ok(told(&merged.map_err(refuse)?))
    }
}

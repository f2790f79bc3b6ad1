// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.ui`: the run viewer, and the timeline of all ranks.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use farandole::ui::timeline::{TimelinePieces, TimelineSummary, merge_timeline_files};
use farandole::ui::{self, Error, Fault, ViewerSettings, explain_location};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::error_chain_message;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(explain_verdict, module)?)?;
    module.add_function(wrap_pyfunction!(merge_timelines, module)?)?;
    module.add_class::<TimelineMerger>()?;
    module.add_class::<ViewerServer>()
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn ui_exception(error: Error) -> PyErr {
    let message = error_chain_message(&error);
    match error.fault() {
        Fault::Usage => PyValueError::new_err(message),
        Fault::Environment => PyOSError::new_err(message),
    }
}

#[pyclass(frozen, module = "farandole._native.ui")]
struct ViewerServer {
    url: String,
    path: String,
    port: u16,
    server: Mutex<Option<ui::RunViewer>>,
}

#[pymethods]
impl ViewerServer {
    #[new]
    fn new(py: Python<'_>, stores: Vec<String>, page: PathBuf, port: u16) -> PyResult<Self> {
        let settings = ViewerSettings { stores, page, port };
        let server = py.detach(|| ui::RunViewer::start_server(&settings)).map_err(ui_exception)?;
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
        // Without the GIL, because the drop waits for the threads of the server.
        py.detach(|| drop(self.server.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

/// Returns a summary as Python has it: JSON for its fields, and lines for people.
fn summary_to_python(summary: &TimelineSummary) -> (String, Vec<String>) {
    (summary.to_json(), summary.summary_lines())
}

/// Returns the verdict about a run, or the newest run of a store.
#[pyfunction]
#[pyo3(signature = (location, /))]
fn explain_verdict(py: Python<'_>, location: &str) -> PyResult<String> {
    let found = py.detach(|| explain_location(location)).map_err(ui_exception)?;
    Ok(found.explanation.verdict)
}

/// Merges files or folders into one trace.
#[pyfunction]
#[pyo3(signature = (inputs, output, /))]
fn merge_timelines(
    py: Python<'_>,
    inputs: Vec<PathBuf>,
    output: PathBuf,
) -> PyResult<(String, Vec<String>)> {
    Ok(summary_to_python(
        &py.detach(|| merge_timeline_files(&inputs, &output)).map_err(ui_exception)?,
    ))
}

/// Timelines that come in pieces.
#[pyclass(frozen, module = "farandole._native.ui")]
struct TimelineMerger {
    pieces: Mutex<TimelinePieces>,
}

#[pymethods]
impl TimelineMerger {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { pieces: Mutex::new(TimelinePieces::new().map_err(ui_exception)?) })
    }

    fn add_piece(&self, task: u32, piece: &[u8]) -> PyResult<()> {
        self.pieces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add_piece(task, piece)
            .map_err(ui_exception)
    }

    #[pyo3(signature = (output, /))]
    fn merge_pieces(&self, py: Python<'_>, output: PathBuf) -> PyResult<(String, Vec<String>)> {
        let merged = py.detach(|| {
            self.pieces.lock().unwrap_or_else(PoisonError::into_inner).merge_pieces(&output)
        });
        Ok(summary_to_python(&merged.map_err(ui_exception)?))
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.timeline`: the timeline of this process.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use farandole::session::{self, Session};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::error::to_exception;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(stop_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(has_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(enter_step_phase, module)?)?;
    module.add_function(wrap_pyfunction!(leave_step_phase, module)?)?;
    module.add_function(wrap_pyfunction!(stack_request_descriptor, module)?)?;
    module.add_function(wrap_pyfunction!(answer_stack_request, module)?)
}

/// Writes a timeline from now on.
#[pyfunction]
#[pyo3(signature = (path, mark_cycles, /))]
fn start_timeline(py: Python<'_>, path: &str, mark_cycles: bool) -> PyResult<()> {
    let session = current_session()?;
    py.detach(|| session.engine().start_timeline(path, mark_cycles))
        .map_err(|error| to_exception(error.fault(), &error))
}

/// Ends the timeline.
#[pyfunction]
fn stop_timeline(py: Python<'_>) -> PyResult<()> {
    let session = current_session()?;
    py.detach(|| session.engine().stop_timeline())
        .map_err(|error| to_exception(error.fault(), &error))
}

/// Returns whether a timeline is written here.
#[pyfunction]
fn has_timeline() -> bool {
    session::current_session().is_ok_and(|session| session.engine().has_timeline())
}

/// Begins a phase of a step, if a timeline is written.
#[pyfunction]
#[pyo3(signature = (name, /))]
fn enter_step_phase(name: &str) {
    if let Ok(session) = session::current_session() {
        session.engine().enter_step_phase(name);
    }
}

/// Ends the phase that began last.
#[pyfunction]
fn leave_step_phase() {
    if let Ok(session) = session::current_session() {
        session.engine().leave_step_phase();
    }
}

/// Returns a descriptor, the caller's to close, with a byte for every question; see `Stacks` of the
/// session.
#[pyfunction]
fn stack_request_descriptor() -> PyResult<i32> {
    let reader =
        current_session()?.stack_requests().open_request_pipe().map_err(PyOSError::new_err)?;
    // Python closes it: the thread that reads it may outlive this session.
    Ok(OwnedFd::from(reader).into_raw_fd())
}

/// Answers the question.
#[pyfunction]
#[pyo3(signature = (text, /))]
fn answer_stack_request(text: &str) {
    if let Ok(session) = session::current_session() {
        session.stack_requests().answer_pending_questions(text);
    }
}

fn current_session() -> PyResult<Arc<Session>> {
    session::current_session().map_err(|error| to_exception(error.fault(), &error))
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.timeline`: the timeline of this process.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use farandole::session::{self, Session};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::error::raise;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(stop_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(has_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(enter_phase, module)?)?;
    module.add_function(wrap_pyfunction!(leave_phase, module)?)?;
    module.add_function(wrap_pyfunction!(listen_for_stacks, module)?)?;
    module.add_function(wrap_pyfunction!(give_stacks, module)?)
}

/// Writes a timeline from now on.
#[pyfunction]
#[pyo3(signature = (path, mark_cycles, /))]
fn start_timeline(py: Python<'_>, path: &str, mark_cycles: bool) -> PyResult<()> {
    let session = current()?;
    py.detach(|| session.engine().start_timeline(path, mark_cycles))
        .map_err(|error| raise(error.fault(), &error))
}

/// Ends the timeline.
#[pyfunction]
fn stop_timeline(py: Python<'_>) -> PyResult<()> {
    let session = current()?;
    py.detach(|| session.engine().stop_timeline()).map_err(|error| raise(error.fault(), &error))
}

/// Returns whether a timeline is written here.
#[pyfunction]
fn has_timeline() -> bool {
    session::current().is_ok_and(|session| session.engine().has_timeline())
}

/// A phase of a step begins; nothing where no timeline is written.
#[pyfunction]
#[pyo3(signature = (name, /))]
fn enter_phase(name: &str) {
    if let Ok(session) = session::current() {
        session.engine().enter_phase(name);
    }
}

/// The phase that began last ends.
#[pyfunction]
fn leave_phase() {
    if let Ok(session) = session::current() {
        session.engine().leave_phase();
    }
}

/// Returns a descriptor, the caller's to close, with a byte for every question; see `Stacks` of the
/// session.
#[pyfunction]
fn listen_for_stacks() -> PyResult<i32> {
    let reader = current()?.stacks().listen().map_err(PyOSError::new_err)?;
    Ok(OwnedFd::from(reader).into_raw_fd())
}

/// Answers the question.
#[pyfunction]
#[pyo3(signature = (text, /))]
fn give_stacks(text: &str) {
    if let Ok(session) = session::current() {
        session.stacks().answer(text);
    }
}

fn current() -> PyResult<Arc<Session>> {
    session::current().map_err(|error| raise(error.fault(), &error))
}

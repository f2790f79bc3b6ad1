// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.values`: values that the ranks of this session's world publish for each other
//! at the registrar.

use std::time::{Duration, Instant};

use farandole::registrar;
use farandole::session;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_exception;
use crate::interruptible_wait;
use crate::registrar::registrar_exception;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(put_if_absent, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for_value, module)?)
}

/// Publishes a value under a key if the key has none; returns the value that the key then holds.
#[pyfunction]
#[pyo3(signature = (key, value, /))]
fn put_if_absent<'py>(py: Python<'py>, key: &str, value: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let session =
        session::current_session().map_err(|failure| to_exception(failure.fault(), &failure))?;
    let held = py.detach(|| {
        let client = session.client().ok_or_else(no_registrar_exception)?;
        client.put_if_absent(key, value).map_err(|failure| registrar_exception(&failure))
    })?;
    Ok(PyBytes::new(py, &held))
}

/// Waits for the value of a key; nothing where none comes within `timeout` seconds.
#[pyfunction]
#[pyo3(signature = (key, timeout, /))]
fn wait_for_value<'py>(
    py: Python<'py>,
    key: &str,
    timeout: f64,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let session =
        session::current_session().map_err(|failure| to_exception(failure.fault(), &failure))?;
    let limit = Duration::try_from_secs_f64(timeout.max(0.0))
        .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
    let found =
        interruptible_wait::wait_interruptibly(py, Some(Instant::now() + limit), |slice| {
            let client = session.client().ok_or_else(no_registrar_exception)?;
            match client.await_value(key, Instant::now() + slice) {
                Ok(value) => Ok(Some(value)),
                // A slice is over, not the whole wait.
                Err(registrar::Error::Timeout { .. }) => Ok(None),
                Err(failure) => Err(registrar_exception(&failure)),
            }
        })?;
    Ok(found.map(|value| PyBytes::new(py, &value)))
}

fn no_registrar_exception() -> PyErr {
    PyRuntimeError::new_err("a world of one process has no registrar to publish at")
}

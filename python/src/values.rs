// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.values`: what the ranks of this session's world publish for each other at the
//! registrar.

use std::time::{Duration, Instant};

use farandole::registrar;
use farandole::session;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::registrar::error;
use crate::runtime;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(claim, module)?)?;
    module.add_function(wrap_pyfunction!(find, module)?)
}

/// Publishes a value under a key that has none; what the key holds then.
#[pyfunction]
#[pyo3(signature = (key, value, /))]
fn claim<'py>(py: Python<'py>, key: &str, value: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let session = session::current().map_err(|failure| raise(failure.fault(), &failure))?;
    let held = py.detach(|| {
        let client = session.client().ok_or_else(alone)?;
        client.put_if_absent(key, value).map_err(|failure| error(&failure))
    })?;
    Ok(PyBytes::new(py, &held))
}

/// Waits for the value of a key; nothing where none comes within `timeout` seconds.
#[pyfunction]
#[pyo3(signature = (key, timeout, /))]
fn find<'py>(py: Python<'py>, key: &str, timeout: f64) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let session = session::current().map_err(|failure| raise(failure.fault(), &failure))?;
    let limit = Duration::try_from_secs_f64(timeout.max(0.0))
        .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
    let found = runtime::wait(py, Some(Instant::now() + limit), |slice| {
        let client = session.client().ok_or_else(alone)?;
        match client.get(key, Instant::now() + slice) {
            Ok(value) => Ok(Some(value)),
            Err(registrar::Error::Timeout { .. }) => Ok(None),
            Err(failure) => Err(error(&failure)),
        }
    })?;
    Ok(found.map(|value| PyBytes::new(py, &value)))
}

fn alone() -> PyErr {
    PyRuntimeError::new_err("a world of one process has no registrar to publish at")
}

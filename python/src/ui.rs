// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.ui`: the run viewer.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use farandole::ui::{self, Error, Fault, Settings};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::chain;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
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

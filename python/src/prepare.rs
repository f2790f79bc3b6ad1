// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.prepare`: Arrow batches in, Parquet and a manifest out.

use std::sync::{Mutex, PoisonError};

use farandole::prepare::{self, Error, Fault, Summary};
use farandole::store::Store;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrow::record_batch;
use crate::error::chain;
use crate::store;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PartitionWriter>()?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(is_whole, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(read_manifest, module)?)
}

fn refuse(error: Error) -> PyErr {
    match (error.fault(), error) {
        (_, Error::Store(error)) => store::refuse(error),
        (Fault::Usage, error) => PyValueError::new_err(chain(&error)),
        (Fault::Environment, error) => PyOSError::new_err(chain(&error)),
    }
}

#[pyclass(frozen, module = "farandole._native.prepare")]
struct PartitionWriter(Mutex<Option<prepare::PartitionWriter>>);

impl PartitionWriter {
    fn take(&self) -> PyResult<prepare::PartitionWriter> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| PyRuntimeError::new_err("this partition's writer already ended"))
    }
}

#[pymethods]
impl PartitionWriter {
    #[new]
    fn new(url: &str, spec: &str, partition: u64, attempt: &str) -> PyResult<Self> {
        let writer =
            prepare::PartitionWriter::new(url, spec, partition, attempt).map_err(refuse)?;
        Ok(Self(Mutex::new(Some(writer))))
    }

    fn write(&self, py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let batch = record_batch(batch)?;
        // Taken out meanwhile: after an error the writer is gone, and its files with it.
        let mut writer = self.take()?;
        let writer = py.detach(move || writer.write(&batch).map(|()| writer)).map_err(refuse)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(writer);
        Ok(())
    }

    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let writer = self.take()?;
        let bytes = py.detach(move || writer.finish()?.encode()).map_err(refuse)?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn abort(&self, py: Python<'_>) {
        let writer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(writer));
    }
}

#[pyfunction]
fn commit(py: Python<'_>, url: &str, spec: &str, parts: Vec<Vec<u8>>) -> PyResult<String> {
    py.detach(|| {
        let summaries = parts.iter().map(|part| Summary::decode(part)).collect::<Result<_, _>>()?;
        prepare::commit(url, spec, summaries)?.to_json()
    })
    .map_err(refuse)
}

#[pyfunction]
fn read_manifest(py: Python<'_>, url: &str) -> PyResult<Option<String>> {
    py.detach(|| {
        prepare::read_manifest(url)?
            .map(|manifest| manifest.to_json().map_err(Error::from))
            .transpose()
    })
    .map_err(refuse)
}

#[pyfunction]
fn is_whole(py: Python<'_>, url: &str, spec: &str, part: Vec<u8>) -> PyResult<bool> {
    py.detach(|| prepare::is_whole(url, spec, &Summary::decode(&part)?)).map_err(refuse)
}

/// Files, bytes, and problems.
#[pyfunction]
fn verify(py: Python<'_>, url: &str) -> PyResult<(usize, u64, Vec<String>)> {
    let verified = py.detach(|| {
        let store = Store::open(url)?;
        prepare::read_manifest(url)?.map(|manifest| prepare::verify(&store, &manifest)).transpose()
    });
    match verified.map_err(refuse)? {
        Some(found) => Ok((found.files, found.bytes, found.problems)),
        None => Err(PyValueError::new_err(format!(
            "this data was not prepared, so it has no checksums: {url}"
        ))),
    }
}

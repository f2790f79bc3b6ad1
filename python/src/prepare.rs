// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.prepare`: Arrow batches in, Parquet and a manifest out.

use std::sync::{Mutex, PoisonError};

use farandole::prepare::{self, Error, PartitionSummary, PrepareFault};
use farandole::store::Store;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrow::import_record_batch;
use crate::error::error_chain_message;
use crate::store;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PartitionWriter>()?;
    module.add_function(wrap_pyfunction!(commit_partitions, module)?)?;
    module.add_function(wrap_pyfunction!(is_partition_whole, module)?)?;
    module.add_function(wrap_pyfunction!(verify_checksums, module)?)?;
    module.add_function(wrap_pyfunction!(read_manifest, module)?)
}

fn prepare_exception(error: Error) -> PyErr {
    match (error.fault(), error) {
        (_, Error::Store(error)) => store::store_exception(error),
        (PrepareFault::Usage, error) => PyValueError::new_err(error_chain_message(&error)),
        (PrepareFault::Environment, error) => PyOSError::new_err(error_chain_message(&error)),
    }
}

#[pyclass(frozen, module = "farandole._native.prepare")]
struct PartitionWriter(Mutex<Option<prepare::PartitionWriter>>);

impl PartitionWriter {
    fn take_writer(&self) -> PyResult<prepare::PartitionWriter> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| PyRuntimeError::new_err("this partition's writer already ended"))
    }
}

#[pymethods]
impl PartitionWriter {
    #[new]
    fn new(url: &str, spec: &str, partition: u64, attempt: &str) -> PyResult<Self> {
        let writer = prepare::PartitionWriter::new(url, spec, partition, attempt)
            .map_err(prepare_exception)?;
        Ok(Self(Mutex::new(Some(writer))))
    }

    fn write(&self, py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let batch = import_record_batch(batch)?;
        // Taken out meanwhile: after an error the writer is gone, and its files with it.
        let mut writer = self.take_writer()?;
        let writer = py
            .detach(move || writer.write_batch(&batch).map(|()| writer))
            .map_err(prepare_exception)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(writer);
        Ok(())
    }

    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let writer = self.take_writer()?;
        let bytes =
            py.detach(move || writer.finish_partition()?.to_bytes()).map_err(prepare_exception)?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn abort(&self, py: Python<'_>) {
        let writer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The drop removes files, which takes long on a remote store.
        py.detach(|| drop(writer));
    }
}

#[pyfunction]
fn commit_partitions(
    py: Python<'_>,
    url: &str,
    spec: &str,
    parts: Vec<Vec<u8>>,
) -> PyResult<String> {
    py.detach(|| {
        let summaries = parts
            .iter()
            .map(|part| PartitionSummary::from_bytes(part))
            .collect::<Result<_, _>>()?;
        prepare::commit_partitions(url, spec, summaries)?.to_json()
    })
    .map_err(prepare_exception)
}

#[pyfunction]
fn read_manifest(py: Python<'_>, url: &str) -> PyResult<Option<String>> {
    py.detach(|| {
        prepare::read_manifest(url)?
            .map(|manifest| manifest.to_json().map_err(Error::from))
            .transpose()
    })
    .map_err(prepare_exception)
}

#[pyfunction]
fn is_partition_whole(py: Python<'_>, url: &str, spec: &str, part: Vec<u8>) -> PyResult<bool> {
    py.detach(|| prepare::is_partition_complete(url, spec, &PartitionSummary::from_bytes(&part)?))
        .map_err(prepare_exception)
}

/// Verifies the checksums; returns the number of files, their bytes, and the problems.
#[pyfunction]
fn verify_checksums(py: Python<'_>, url: &str) -> PyResult<(usize, u64, Vec<String>)> {
    let verified = py.detach(|| {
        let store = Store::open(url)?;
        prepare::read_manifest(url)?
            .map(|manifest| prepare::verify_files(&store, &manifest))
            .transpose()
    });
    match verified.map_err(prepare_exception)? {
        Some(found) => Ok((found.files, found.bytes, found.problems)),
        None => Err(PyValueError::new_err(format!(
            "this data was not prepared, so it has no checksums: {url}"
        ))),
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.reader`: batches as buffers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use farandole::dataset::{ElementType, TailPolicy};
use farandole::reader::{
    self, Error, FileValues, FillValue, NextBatch, ReadFault, ReaderOptions, RowPadding,
    TableColumn, TableFile,
};
use farandole::world::Rank;
use pyo3::exceptions::{PyFileNotFoundError, PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyTuple};

use crate::arrow::{Batch, BatchColumn};
use crate::error::error_chain_message;
use crate::{interruptible_wait, store};

/// The fill, the greatest length, the step of lengths and whether all batches have the greatest
/// length; see [`RowPadding`].
type Pad = (Vec<u8>, usize, usize, bool);

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(partition_values, module)?)?;
    module.add_function(wrap_pyfunction!(partition_dtype, module)?)?;
    module.add_class::<DatasetField>()?;
    module.add_class::<Dataset>()?;
    module.add_class::<Reader>()?;
    module.add_class::<EpochBatches>()?;
    module.add_class::<Batch>()?;
    module.add_class::<BatchColumn>()
}

fn reader_exception(error: Error) -> PyErr {
    match (error.fault(), error) {
        (_, Error::Store(error)) => store::store_exception(error),
        (_, error @ Error::NotADataset { .. }) => {
            PyFileNotFoundError::new_err(error_chain_message(&error))
        }
        (_, error @ Error::Memory { .. }) => PyMemoryError::new_err(error_chain_message(&error)),
        (ReadFault::Usage, error) => PyValueError::new_err(error_chain_message(&error)),
        (ReadFault::Environment, error) => PyOSError::new_err(error_chain_message(&error)),
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct DatasetField(reader::BatchField);

#[pymethods]
impl DatasetField {
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.element.numpy_name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    #[getter]
    fn nullable(&self) -> bool {
        self.0.nullable
    }

    fn __repr__(&self) -> String {
        format!("Field({:?}, {}, {:?})", self.0.name, self.0.element.numpy_name(), self.0.shape)
    }
}

fn parse_element(column: &str, kind: &str) -> PyResult<ElementType> {
    let variable = [ElementType::Utf8, ElementType::Binary];
    ElementType::from_numpy_name(kind)
        .or_else(|| variable.into_iter().find(|element| element.numpy_name() == kind))
        .ok_or_else(|| {
            PyValueError::new_err(format!(
                "the type of column {column} must be utf8, binary or NumPy's name of a number: \
                 {kind}"
            ))
        })
}

fn parse_types(types: Option<BTreeMap<String, String>>) -> PyResult<BTreeMap<String, ElementType>> {
    let parse = |(name, kind): (String, String)| {
        let element = parse_element(&name, &kind)?;
        Ok((name, element))
    };
    types.unwrap_or_default().into_iter().map(parse).collect()
}

/// A column of a table, as Python describes it.
#[derive(FromPyObject)]
struct PyTableColumn {
    name: String,
    field_id: Option<i32>,
    stored_names: Vec<String>,
    dtype: Option<String>,
    is_list: bool,
    unit: Option<String>,
    source: String,
}

impl PyTableColumn {
    fn parse(self) -> PyResult<TableColumn> {
        let Self { name, field_id, stored_names, dtype, is_list, unit, source } = self;
        let element = match dtype {
            Some(kind) => Ok(parse_element(&name, &kind)?),
            None => Err(format!("it is {source}")),
        };
        Ok(TableColumn { name, field_id, stored_names, element, is_list, unit, source })
    }
}

/// Path, values of columns that the file lacks, and little-endian positions of deleted rows.
type PyTableFile = (String, FileValues, Vec<u8>);

fn parse_table_file((path, defaults, deleted): PyTableFile) -> TableFile {
    let (positions, _) = deleted.as_chunks();
    TableFile {
        path,
        defaults,
        deleted: positions.iter().copied().map(u64::from_le_bytes).collect(),
    }
}

/// A number that replaces missing values, as Python has it.
struct PyFillValue(FillValue);

impl<'py> FromPyObject<'_, 'py> for PyFillValue {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if value.is_instance_of::<PyFloat>() {
            return value.extract().map(|float| Self(FillValue::Float(float)));
        }
        if let Ok(whole) = value.extract() {
            return Ok(Self(FillValue::Integer(whole)));
        }
        value.extract().map(|float| Self(FillValue::Float(float)))
    }
}

/// Returns the names and values in the directories of a path; nulls are `None`.
#[pyfunction]
fn partition_values(path: &str) -> FileValues {
    reader::partition_values(path)
}

/// Returns the type of a column of values from names of directories.
#[pyfunction]
fn partition_dtype(values: Vec<String>) -> &'static str {
    reader::infer_partition_type(values.iter().map(String::as_str)).numpy_name()
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct Dataset(Arc<reader::ParquetDataset>);

#[pymethods]
impl Dataset {
    #[staticmethod]
    #[pyo3(signature = (url, types = None))]
    fn open_url(
        py: Python<'_>,
        url: &str,
        types: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let types = parse_types(types)?;
        py.detach(|| reader::ParquetDataset::open_directory_with_types(url, &types))
            .map(|dataset| Self(Arc::new(dataset)))
            .map_err(reader_exception)
    }

    #[staticmethod]
    #[pyo3(signature = (url, files, types = None))]
    fn open_files(
        py: Python<'_>,
        url: &str,
        files: Vec<(String, FileValues)>,
        types: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let types = parse_types(types)?;
        let opened = py.detach(|| reader::ParquetDataset::open_files(url, files, &types));
        opened.map(|dataset| Self(Arc::new(dataset))).map_err(reader_exception)
    }

    #[staticmethod]
    fn open_table(
        py: Python<'_>,
        url: &str,
        files: Vec<PyTableFile>,
        columns: Vec<PyTableColumn>,
    ) -> PyResult<Self> {
        let columns = columns.into_iter().map(PyTableColumn::parse).collect::<PyResult<_>>()?;
        let files: Vec<TableFile> = files.into_iter().map(parse_table_file).collect();
        let opened = py.detach(|| reader::ParquetDataset::open_table(url, &files, columns));
        opened.map(|dataset| Self(Arc::new(dataset))).map_err(reader_exception)
    }

    fn write_link_manifest(&self, py: Python<'_>, at: &str) -> PyResult<()> {
        py.detach(|| self.0.write_linked_manifest(at)).map_err(reader_exception)
    }

    #[getter]
    fn url(&self) -> String {
        self.0.url()
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.manifest().rows
    }

    #[getter]
    fn columns(&self) -> Vec<DatasetField> {
        self.0.fields().into_iter().map(DatasetField).collect()
    }

    #[getter]
    fn row_groups(&self) -> Vec<(usize, usize, u64, u64)> {
        let files = self.0.manifest().files.iter().enumerate();
        let groups = files.flat_map(|(file, data)| {
            let numbered = data.groups.iter().enumerate();
            numbered.map(move |(number, group)| (file, number, group.rows, group.bytes))
        });
        groups.collect()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        &self.0.manifest().fingerprint
    }

    #[getter]
    fn is_prepared(&self) -> bool {
        self.0.is_prepared()
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct Reader(reader::Reader);

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (
        dataset, *, columns = None, batch_size, rank = 0, size = 1, seed = 0, shuffle = true,
        byte_budget = 512 << 20, threads = None, tail = "keep", cast = None, fill = None, allow_nan = true, pad = None,
        cache = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        dataset: &Dataset,
        columns: Option<Vec<String>>,
        batch_size: u64,
        rank: u32,
        size: u32,
        seed: u64,
        shuffle: bool,
        byte_budget: u64,
        threads: Option<usize>,
        tail: &str,
        cast: Option<HashMap<String, String>>,
        fill: Option<HashMap<String, PyFillValue>>,
        allow_nan: bool,
        pad: Option<HashMap<String, Pad>>,
        cache: Option<String>,
    ) -> PyResult<Self> {
        let tail = match tail {
            "keep" => TailPolicy::Keep,
            "pad" => TailPolicy::Pad,
            "drop" => TailPolicy::Drop,
            "join" => TailPolicy::Join,
            other => {
                return Err(PyValueError::new_err(format!(
                    "tail must be keep, pad, drop or join: {other}"
                )));
            }
        };
        let (rank, threads, cast) = (Rank(rank), threads.unwrap_or(2), cast.unwrap_or_default());
        let fill = fill.unwrap_or_default();
        let fill = fill.into_iter().map(|(name, PyFillValue(value))| (name, value)).collect();
        let padding = |(name, (fill, most, step, fixed))| {
            (name, RowPadding { fill, max_values: most, step, fixed })
        };
        let pad = pad.unwrap_or_default().into_iter().map(padding).collect();
        let options = ReaderOptions {
            columns,
            batch_size,
            rank,
            size,
            seed,
            shuffle,
            byte_budget,
            threads,
            tail,
            cast,
            fill,
            allow_nan,
            pad,
            cache,
        };
        reader::Reader::new(Arc::clone(&dataset.0), options).map(Self).map_err(reader_exception)
    }

    #[getter]
    fn columns(&self) -> Vec<DatasetField> {
        self.0.fields().into_iter().map(DatasetField).collect()
    }

    #[pyo3(signature = (start_row = 0))]
    fn step_count(&self, start_row: u64) -> u64 {
        self.0.step_count(start_row)
    }

    #[pyo3(signature = (epoch, start_row = 0, max_steps = None))]
    fn read_epoch(
        &self,
        py: Python<'_>,
        epoch: u64,
        start_row: u64,
        max_steps: Option<u64>,
    ) -> PyResult<EpochBatches> {
        let epoch = py
            .detach(|| self.0.start_epoch(epoch, start_row, max_steps))
            .map_err(reader_exception)?;
        Ok(EpochBatches { steps: epoch.step_count(), inner: Mutex::new(Some(epoch)) })
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct EpochBatches {
    steps: u64,
    inner: Mutex<Option<reader::EpochReader>>,
}

#[pymethods]
impl EpochBatches {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.steps).unwrap_or(usize::MAX)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let next = interruptible_wait::wait_interruptibly(py, None, |timeout| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            match inner
                .as_ref()
                .map_or(Ok(NextBatch::End), |epoch| epoch.next_batch(timeout))
                .map_err(reader_exception)?
            {
                // The caller then looks for signals and waits again.
                NextBatch::Pending => Ok(None),
                NextBatch::Batch(batch) => Ok(Some(Some(batch))),
                NextBatch::End => Ok(Some(None)),
            }
        })?;
        let batch = next.flatten();
        // At the end, the threads and the memory of the epoch are released before the garbage
        // collector runs.
        if batch.is_none() {
            self.close(py);
        }
        Ok(batch.map(Batch::new))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

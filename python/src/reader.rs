// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.reader`: batches as buffers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use farandole::dataset::Tail;
use farandole::reader::{self, Error, Fault, Next, Options, Padding};
use farandole::world::Rank;
use pyo3::exceptions::{PyFileNotFoundError, PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrow::{Batch, Column};
use crate::error::chain;
use crate::{runtime, store};

/// The fill, the greatest length, the step of lengths and whether all batches have the greatest
/// length; see [`Padding`].
type Pad = (Vec<u8>, usize, usize, bool);

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Field>()?;
    module.add_class::<Dataset>()?;
    module.add_class::<Reader>()?;
    module.add_class::<Epoch>()?;
    module.add_class::<Batch>()?;
    module.add_class::<Column>()
}

fn refuse(error: Error) -> PyErr {
    match (error.fault(), error) {
        (_, Error::Store(error)) => store::refuse(error),
        (_, error @ Error::NotADataset { .. }) => PyFileNotFoundError::new_err(chain(&error)),
        (_, error @ Error::Memory { .. }) => PyMemoryError::new_err(chain(&error)),
        (Fault::Usage, error) => PyValueError::new_err(chain(&error)),
        (Fault::Environment, error) => PyOSError::new_err(chain(&error)),
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct Field(reader::Field);

#[pymethods]
impl Field {
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.element.name()
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
        format!("Field({:?}, {}, {:?})", self.0.name, self.0.element.name(), self.0.shape)
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct Dataset(Arc<reader::Dataset>);

#[pymethods]
impl Dataset {
    #[staticmethod]
    fn open(py: Python<'_>, url: &str) -> PyResult<Self> {
        py.detach(|| reader::Dataset::open(url))
            .map(|dataset| Self(Arc::new(dataset)))
            .map_err(refuse)
    }

    #[staticmethod]
    fn open_files(
        py: Python<'_>,
        url: &str,
        files: Vec<(String, BTreeMap<String, String>)>,
    ) -> PyResult<Self> {
        let opened = py.detach(|| reader::Dataset::open_files(url, files));
        opened.map(|dataset| Self(Arc::new(dataset))).map_err(refuse)
    }

    fn link(&self, py: Python<'_>, at: &str) -> PyResult<()> {
        py.detach(|| self.0.link(at)).map_err(refuse)
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
    fn columns(&self) -> Vec<Field> {
        self.0.fields().into_iter().map(Field).collect()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        &self.0.manifest().fingerprint
    }

    #[getter]
    fn prepared(&self) -> bool {
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
        fill: Option<HashMap<String, f64>>,
        allow_nan: bool,
        pad: Option<HashMap<String, Pad>>,
        cache: Option<String>,
    ) -> PyResult<Self> {
        let tail = match tail {
            "keep" => Tail::Keep,
            "pad" => Tail::Pad,
            "drop" => Tail::Drop,
            "join" => Tail::Join,
            other => {
                return Err(PyValueError::new_err(format!(
                    "tail must be keep, pad, drop or join: {other}"
                )));
            }
        };
        let (rank, threads, cast) = (Rank(rank), threads.unwrap_or(2), cast.unwrap_or_default());
        let fill = fill.unwrap_or_default();
        let padding =
            |(name, (fill, most, step, fixed))| (name, Padding { fill, most, step, fixed });
        let pad = pad.unwrap_or_default().into_iter().map(padding).collect();
        let options = Options {
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
        reader::Reader::new(Arc::clone(&dataset.0), options).map(Self).map_err(refuse)
    }

    #[getter]
    fn columns(&self) -> Vec<Field> {
        self.0.fields().into_iter().map(Field).collect()
    }

    #[pyo3(signature = (start_row = 0))]
    fn steps(&self, start_row: u64) -> u64 {
        self.0.steps(start_row)
    }

    #[pyo3(signature = (epoch, start_row = 0))]
    fn epoch(&self, py: Python<'_>, epoch: u64, start_row: u64) -> PyResult<Epoch> {
        let epoch = py.detach(|| self.0.epoch(epoch, start_row)).map_err(refuse)?;
        Ok(Epoch { steps: epoch.steps(), inner: Mutex::new(Some(epoch)) })
    }
}

#[pyclass(frozen, module = "farandole._native.reader")]
struct Epoch {
    steps: u64,
    inner: Mutex<Option<reader::Epoch>>,
}

#[pymethods]
impl Epoch {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.steps).unwrap_or(usize::MAX)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let next = runtime::wait(py, None, |patience| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            match inner
                .as_ref()
                .map_or(Ok(Next::End), |epoch| epoch.next(patience))
                .map_err(refuse)?
            {
                Next::Pending => Ok(None),
                Next::Batch(batch) => Ok(Some(Some(batch))),
                Next::End => Ok(Some(None)),
            }
        })?;
        let batch = next.flatten();
        if batch.is_none() {
            self.close(py);
        }
        Ok(batch.map(Batch::new))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

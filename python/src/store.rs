// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.store`: files under a URL, and the names of runs and data.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use farandole::store::{self, Error, Fault, LayoutOverrides};
use pyo3::exceptions::{
    PyFileNotFoundError, PyOSError, PyPermissionError, PyRuntimeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::error_chain_message;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Store>()?;
    module.add_class::<StoreLayout>()?;
    module.add_function(wrap_pyfunction!(configure_options, module)?)?;
    module.add_function(wrap_pyfunction!(configured_options, module)?)?;
    module.add_function(wrap_pyfunction!(register_credentials, module)?)?;
    // Python changes the variables of the environment while it holds the lock of the interpreter.
    store::set_environment_guard(|read| {
        // At the end of the process there may be no interpreter, and then no thread changes the
        // variables.
        if Python::try_attach(|_| read()).is_none() {
            read();
        }
    });
    module.add_function(wrap_pyfunction!(object_store_options, module)?)?;
    module.add_function(wrap_pyfunction!(full_path, module)?)?;
    module.add_function(wrap_pyfunction!(localized_path, module)?)
}

/// Returns the exception for an error of a store: a builtin one, because callers of file functions
/// expect those.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(crate) fn store_exception(error: Error) -> PyErr {
    let message = error_chain_message(&error);
    match (&error, error.fault()) {
        (Error::Missing { .. }, _) => PyFileNotFoundError::new_err(message),
        (Error::Refused { .. }, _) => PyPermissionError::new_err(message),
        (Error::LostLease { .. }, _) => PyRuntimeError::new_err(message),
        (_, Fault::Usage) => PyValueError::new_err(message),
        (_, Fault::Environment) => PyOSError::new_err(message),
    }
}

/// Deleted directories with their numbers of files and bytes, and what was left with its reason.
type SweptPaths = (Vec<(String, usize, u64)>, Vec<(String, String)>);

/// Name, bytes, seconds since the epoch, whether it is a directory.
type DirectoryItemTuple = (String, u64, Option<f64>, bool);

fn item_to_python(item: store::DirectoryItem) -> DirectoryItemTuple {
    let seconds = item.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    (item.name, item.bytes, seconds.map(|time| time.as_secs_f64()), item.is_directory)
}

#[pyclass(frozen, module = "farandole._native.store")]
struct Store(store::Store);

#[pymethods]
impl Store {
    #[new]
    fn new(url: &str) -> PyResult<Self> {
        store::Store::open(url).map(Self).map_err(store_exception)
    }

    #[getter]
    fn url(&self) -> String {
        self.0.url()
    }

    #[getter]
    fn local_path(&self) -> Option<String> {
        self.0.local_path().map(|path| path.display().to_string())
    }

    fn open_child(&self, path: &str) -> PyResult<Self> {
        self.0.open_child(path).map(Self).map_err(store_exception)
    }

    fn read<'py>(&self, py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyBytes>> {
        // Another process may replace the file between the size and the content.
        let read = store::reread_if_replaced(|| {
            let file = py.detach(|| self.0.open_file(path))?;
            let size = file.size()?;
            let mut failure = None;
            // The content goes into the bytes object itself: large checkpoints fit into memory
            // once.
            let bytes = PyBytes::new_with(py, size, |buffer| {
                py.detach(|| file.read_into(buffer)).map_err(|error| {
                    let refused = PyOSError::new_err(error.to_string());
                    failure = Some(error);
                    refused
                })
            });
            failure.map_or(Ok(bytes), Err)
        });
        read.map_err(store_exception)?
    }

    fn create_if_absent(&self, py: Python<'_>, path: &str, data: PyBackedBytes) -> PyResult<bool> {
        let data = Bytes::from_owner(data);
        py.detach(|| self.0.create_if_absent(path, data)).map_err(store_exception)
    }

    #[pyo3(signature = (lasts = None, job = None))]
    fn acquire_lease(
        &self,
        py: Python<'_>,
        lasts: Option<f64>,
        job: Option<&str>,
    ) -> PyResult<Option<String>> {
        let lasts = lasts.map(duration_from_seconds).transpose()?;
        py.detach(|| store::acquire_lease(&self.0, SystemTime::now(), lasts, job))
            .map_err(store_exception)
    }

    #[pyo3(signature = (lasts = None))]
    fn mark_in_use(&self, py: Python<'_>, lasts: Option<f64>) -> PyResult<Option<String>> {
        let lasts = lasts.map(duration_from_seconds).transpose()?;
        py.detach(|| store::mark_in_use(&self.0, SystemTime::now(), lasts)).map_err(store_exception)
    }

    fn renew_mark(&self, py: Python<'_>, mark: &str) -> PyResult<bool> {
        py.detach(|| store::renew_mark(&self.0, mark, SystemTime::now())).map_err(store_exception)
    }

    fn downgrade_lease(&self, py: Python<'_>, lease: &str) -> PyResult<String> {
        py.detach(|| store::downgrade_lease(&self.0, lease, SystemTime::now()))
            .map_err(store_exception)
    }

    fn check_lease(&self, py: Python<'_>, lease: &str) -> PyResult<()> {
        py.detach(|| store::check_lease(&self.0, lease)).map_err(store_exception)
    }

    fn delete_content_keep_lease(&self, py: Python<'_>, lease: &str) -> PyResult<usize> {
        py.detach(|| store::delete_content_keep_lease(&self.0, lease)).map_err(store_exception)
    }

    fn delete_content_and_lease(&self, py: Python<'_>, lease: &str) -> PyResult<usize> {
        py.detach(|| store::delete_content_and_lease(&self.0, lease)).map_err(store_exception)
    }

    fn is_free(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| store::is_free(&self.0, SystemTime::now())).map_err(store_exception)
    }

    fn remove_partial_uploads(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.remove_partial_uploads()).map_err(store_exception)
    }

    fn write(&self, py: Python<'_>, path: &str, data: PyBackedBytes) -> PyResult<()> {
        // No copy: the bytes object stays alive as long as the write needs it.
        let data = Bytes::from_owner(data);
        py.detach(|| self.0.write(path, data)).map_err(store_exception)
    }

    fn copy(&self, py: Python<'_>, path: &str, name: &str) -> PyResult<()> {
        py.detach(|| self.0.copy(path, name)).map_err(store_exception)
    }

    fn find_foreign_file(&self, py: Python<'_>, val: &Self) -> PyResult<Option<String>> {
        py.detach(|| store::find_foreign_file(&self.0, &val.0)).map_err(store_exception)
    }

    #[pyo3(signature = (path = ""))]
    fn exists(&self, py: Python<'_>, path: &str) -> PyResult<bool> {
        py.detach(|| self.0.exists(path)).map_err(store_exception)
    }

    fn read_range<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        start: u64,
        end: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let range = std::slice::from_ref(&(start..end)).to_vec();
        let bytes = py.detach(|| self.0.read_ranges(path, &range)).map_err(store_exception)?;
        Ok(PyBytes::new(py, bytes.first().map_or(&[][..], |bytes| bytes)))
    }

    fn stat(&self, py: Python<'_>, path: &str) -> PyResult<DirectoryItemTuple> {
        py.detach(|| self.0.stat(path)).map(item_to_python).map_err(store_exception)
    }

    #[pyo3(signature = (path = ""))]
    fn list_directory(&self, py: Python<'_>, path: &str) -> PyResult<Vec<DirectoryItemTuple>> {
        let items = py.detach(|| self.0.list_directory(path)).map_err(store_exception)?;
        Ok(items.into_iter().map(item_to_python).collect())
    }

    #[pyo3(signature = (older_than = None, max_size = None))]
    fn sweep_stale_data(
        &self,
        py: Python<'_>,
        older_than: Option<f64>,
        max_size: Option<u64>,
    ) -> PyResult<SweptPaths> {
        let age = |seconds| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|_| PyValueError::new_err(format!("not an age in seconds: {seconds}")))
        };
        let limits = store::SweepLimits { older_than: older_than.map(age).transpose()?, max_size };
        let swept = py
            .detach(|| store::sweep_stale_data(&self.0, limits, SystemTime::now()))
            .map_err(store_exception)?;
        let gone = swept.stale.into_iter().map(|one| (one.path, one.files, one.bytes));
        let skipped = swept.skipped.into_iter().map(|one| (one.path, one.reason));
        Ok((gone.collect(), skipped.collect()))
    }

    fn size(&self, py: Python<'_>, path: &str) -> PyResult<u64> {
        py.detach(|| self.0.size(path)).map_err(store_exception)
    }

    #[pyo3(signature = (path = ""))]
    fn list(&self, py: Python<'_>, path: &str) -> PyResult<Vec<(String, u64)>> {
        let entries = py.detach(|| self.0.list(path)).map_err(store_exception)?;
        Ok(entries.into_iter().map(|entry| (entry.path, entry.bytes)).collect())
    }

    #[pyo3(signature = (path, timeout = None))]
    fn delete(&self, py: Python<'_>, path: &str, timeout: Option<f64>) -> PyResult<()> {
        let Some(seconds) = timeout else {
            return py.detach(|| self.0.delete(path)).map_err(store_exception);
        };
        let timeout = duration_from_seconds(seconds)?;
        py.detach(|| self.0.delete_within(path, timeout)).map_err(store_exception)
    }

    #[pyo3(signature = (path = ""))]
    fn delete_all(&self, py: Python<'_>, path: &str) -> PyResult<usize> {
        py.detach(|| self.0.delete_all(path)).map_err(store_exception)
    }

    fn check_writable(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.check_writable()).map_err(store_exception)
    }

    fn __repr__(&self) -> String {
        format!("Store({:?})", self.0.url())
    }
}

fn duration_from_seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("not a number of seconds: {seconds}")))
}

#[pyclass(frozen, module = "farandole._native.store")]
struct StoreLayout(store::StoreLayout);

#[pymethods]
impl StoreLayout {
    #[new]
    #[pyo3(signature = (prefix, *, train_path = None, val_path = None, test_path = None, runs_path = None, checkpoint_filename = None))]
    fn new(
        prefix: &str,
        train_path: Option<String>,
        val_path: Option<String>,
        test_path: Option<String>,
        runs_path: Option<String>,
        checkpoint_filename: Option<String>,
    ) -> Self {
        let places = LayoutOverrides {
            train: train_path,
            val: val_path,
            test: test_path,
            runs: runs_path,
            checkpoint: checkpoint_filename,
        };
        Self(store::StoreLayout::new(prefix, places))
    }

    #[getter]
    fn prefix(&self) -> &str {
        self.0.prefix()
    }

    #[getter]
    fn checkpoint_filename(&self) -> &str {
        self.0.checkpoint_filename()
    }

    #[getter]
    fn logs_subdir(&self) -> &'static str {
        store::StoreLayout::LOGS_SUBDIRECTORY
    }

    #[getter]
    fn runs_path(&self) -> &str {
        self.0.runs_path()
    }

    #[pyo3(signature = (idx = None))]
    fn train_data(&self, idx: Option<u64>) -> String {
        self.0.train_data(idx)
    }

    #[pyo3(signature = (idx = None))]
    fn val_data(&self, idx: Option<u64>) -> String {
        self.0.val_data(idx)
    }

    #[pyo3(signature = (idx = None))]
    fn test_data(&self, idx: Option<u64>) -> String {
        self.0.test_data(idx)
    }

    fn run_path(&self, run_id: &str) -> String {
        self.0.run_path(run_id)
    }

    fn checkpoint_path(&self, run_id: &str) -> String {
        self.0.checkpoint_path(run_id)
    }

    fn logs_path(&self, run_id: &str) -> String {
        self.0.logs_path(run_id)
    }
}

/// Opens stores at or below a URL with these options from now on, in this process.
#[pyfunction]
fn configure_options(prefix: &str, options: BTreeMap<String, String>) {
    store::configure_options(prefix, store::BackendOptions(options));
}

/// Returns the options of a URL as they were set.
#[pyfunction]
fn configured_options(url: &str) -> BTreeMap<String, String> {
    store::configured_options(url).0
}

/// Gives a function that returns credentials a name, which is the value of the storage option
/// `credentials`.
#[pyfunction]
fn register_credentials(name: &str, function: Py<PyAny>) {
    store::register_credential_function(name, move || {
        // A thread of the store may ask for credentials while the interpreter ends.
        let called = Python::try_attach(|py| {
            function.call0(py).and_then(|values| values.extract(py)).map_err(|error| {
                // The value of an exception may be a secret.
                format!("it raised {}", error.get_type(py))
            })
        });
        called.unwrap_or_else(|| Err("the interpreter has ended".to_owned()))
    });
}

/// Returns the options of a URL, by the names that other readers over `object_store` know.
#[pyfunction]
fn object_store_options(url: &str) -> PyResult<BTreeMap<String, String>> {
    store::object_store_options(url).map_err(store_exception)
}

#[pyfunction]
fn full_path(path: &str) -> PyResult<String> {
    store::full_path(path).map_err(store_exception)
}

#[pyfunction]
fn localized_path(url: &str) -> PyResult<String> {
    store::localized_path(url).map_err(store_exception)
}

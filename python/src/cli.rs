// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.cli`: the command, with this interpreter around it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use farandole::launcher::{StopLevel, SuspensionRequest};
use farandole::telemetry::WorkerMetric;
use farandole_cli::{
    EmbeddingInterpreter, JobViewer, JobViewerOptions, PythonDistribution,
    PythonInstallation as Interpreter,
};
use pyo3::exceptions::{PyException, PySystemExit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCFunction};

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(main, module)?)
}

/// This interpreter. The command asks from the thread that called it.
struct EmbeddingPythonInterpreter {
    /// The exception of a signal handler. The command then ends, and `main` raises it.
    raised: RefCell<Option<PyErr>>,
    stop_level: Cell<StopLevel>,
    /// Exceptions of signal handlers during a report to the run viewer.
    raised_during_reports: Arc<Mutex<Vec<PyErr>>>,
}

/// Returns the stop level that follows from the exit status of a signal handler: Ctrl-C leaves
/// time, SIGTERM less, and a second one of either none.
fn next_stop_level(py: Python<'_>, error: &PyErr, before: StopLevel) -> StopLevel {
    const SIGINT_STATUS: i32 = 128 + 2;
    let status = error
        .is_instance_of::<PySystemExit>(py)
        .then(|| error.value(py).getattr("code").and_then(|code| code.extract::<i32>()).ok())
        .flatten();
    match (before, status) {
        (StopLevel::Continue, None | Some(SIGINT_STATUS)) => StopLevel::Interrupt,
        (StopLevel::Continue, Some(_)) => StopLevel::Terminate,
        // A user who interrupts twice does not want to wait for a checkpoint.
        _ => StopLevel::Kill,
    }
}

impl EmbeddingPythonInterpreter {
    /// Returns the found value; a value that cannot be found is shown as missing. A signal
    /// meanwhile is not lost.
    fn value_or_default_on_error<T: Default>(&self, py: Python<'_>, found: PyResult<T>) -> T {
        found.unwrap_or_else(|error| {
            if !error.is_instance_of::<PyException>(py) {
                self.note_exception(py, error);
            }
            T::default()
        })
    }

    /// Records an exception that a signal handler raised.
    fn note_exception(&self, py: Python<'_>, error: PyErr) {
        self.stop_level.set(next_stop_level(py, &error, self.stop_level.get()));
        self.raised.borrow_mut().get_or_insert(error);
    }
}

impl EmbeddingInterpreter for EmbeddingPythonInterpreter {
    fn requested_stop_level(&self) -> StopLevel {
        Python::attach(|py| {
            let mut raised = std::mem::take(
                &mut *self.raised_during_reports.lock().unwrap_or_else(PoisonError::into_inner),
            );
            raised.extend(py.check_signals().err());
            raised.into_iter().for_each(|error| self.note_exception(py, error));
            self.stop_level.get()
        })
    }

    fn watch_suspension_signal(&self, request: SuspensionRequest) -> Result<(), String> {
        Python::attach(|py| {
            let handler = PyCFunction::new_closure(py, None, None, move |_, _| {
                request.request_suspension();
            })?;
            let signal = py.import("signal")?;
            signal.call_method1("signal", (signal.getattr("SIGUSR1")?, handler)).map(drop)
        })
        .map_err(|error: PyErr| error.to_string())
    }

    fn call_python_main(&self, module: &str, words: &[String]) -> Result<i32, String> {
        Python::attach(|py| {
            let called = py
                .import(module)
                .and_then(|module| module.call_method1("main", (words.to_vec(),))?.extract());
            called.map_err(|error| {
                let message = error.to_string();
                // Interrupts and exits are passed on.
                if !error.is_instance_of::<PyException>(py) {
                    self.raised.borrow_mut().get_or_insert(error);
                }
                message
            })
        })
    }

    fn open_volume(
        &self,
        path: &str,
        options: &BTreeMap<String, String>,
    ) -> Result<Option<String>, String> {
        Python::attach(|py| {
            let opened = py
                .import("farandole.stores.unity_volumes")
                .and_then(|module| module.call_method1("open_volume_url", (path, options)))
                .and_then(|url| url.extract());
            opened.map_err(|error| {
                let message = error.value(py).to_string();
                if !error.is_instance_of::<PyException>(py) {
                    self.note_exception(py, error);
                }
                message
            })
        })
    }

    fn open_viewer(&self, options: &JobViewerOptions<'_>) -> Result<Arc<dyn JobViewer>, String> {
        let JobViewerOptions { shows_run, store, metrics_address, name, ranks } = *options;
        Python::attach(|py| {
            let arguments = (store, name, ranks, shows_run, metrics_address);
            let made = py
                .import("farandole.runner.show.function_runs")
                .and_then(|module| module.call_method1("JobRunReporter", arguments));
            let made = made.map_err(|error| error.to_string())?;
            Ok(Arc::new(PythonRunWatch {
                object: made.unbind(),
                raised: Arc::clone(&self.raised_during_reports),
            }) as Arc<dyn JobViewer>)
        })
    }

    fn package_folder(&self) -> PathBuf {
        Python::attach(|py| {
            let folder = py
                .import("farandole")
                .and_then(|package| package.getattr("__path__")?.get_item(0)?.extract());
            self.value_or_default_on_error(py, folder)
        })
    }

    fn installation(&self) -> Interpreter {
        Python::attach(|py| self.value_or_default_on_error(py, describe_interpreter(py)))
    }

    fn module_distributions(&self) -> BTreeMap<String, Vec<PythonDistribution>> {
        Python::attach(|py| self.value_or_default_on_error(py, module_distributions(py)))
    }
}

/// The Python object that writes the data for the run viewer.
struct PythonRunWatch {
    object: Py<PyAny>,
    raised: Arc<Mutex<Vec<PyErr>>>,
}

impl PythonRunWatch {
    /// Calls the Python object. An exception is dropped, except an interrupt, which is kept for
    /// later.
    fn notify_run_watch(&self, notify: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<()>) {
        Python::attach(|py| {
            if let Err(error) = notify(py, self.object.bind(py))
                && !error.is_instance_of::<PyException>(py)
            {
                self.raised.lock().unwrap_or_else(PoisonError::into_inner).push(error);
            }
        });
    }
}

impl JobViewer for PythonRunWatch {
    fn output_folder(&self) -> Option<PathBuf> {
        Python::attach(|py| self.object.getattr(py, "folder").ok()?.extract(py).ok()?)
    }

    fn show_world(&self, generation: u64, places: &[(u32, String)]) {
        let places = places.to_vec();
        self.notify_run_watch(|_, object| {
            object.call_method1("world", (generation, places)).map(drop)
        });
    }

    fn show_metric(&self, metric: &WorkerMetric) {
        let WorkerMetric { task, rank, kind, data } = metric;
        self.notify_run_watch(|py, object| {
            object.call_method1("metric", (*task, *rank, kind, PyBytes::new(py, data))).map(drop)
        });
    }

    fn show_loss(&self, what: &str) {
        self.notify_run_watch(|_, object| object.call_method1("loss", (what,)).map(drop));
    }

    fn show_end(&self, reason: Option<&str>, interrupted: bool) {
        self.notify_run_watch(|_, object| {
            object.call_method1("ended", (reason, interrupted)).map(drop)
        });
    }
}

/// Returns the distributions that have files of each module: a framework comes under several names,
/// `tensorflow-cpu` among them.
fn module_distributions(py: Python<'_>) -> PyResult<BTreeMap<String, Vec<PythonDistribution>>> {
    let metadata = py.import("importlib.metadata")?;
    // A distribution with broken metadata provides nothing, and is no error here.
    let provider = |name: String| -> Option<PythonDistribution> {
        let version = metadata.call_method1("version", (&name,)).ok()?.extract().ok()?;
        // The names of a distribution on PyPI and in its metadata differ in case and in these
        // characters.
        Some(PythonDistribution { name: name.to_lowercase().replace('_', "-"), version })
    };
    let mut found = BTreeMap::new();
    for item in
        metadata.call_method0("packages_distributions")?.call_method0("items")?.try_iter()?
    {
        let (module, names): (String, Vec<Option<String>>) = item?.extract()?;
        let names: BTreeSet<String> = names.into_iter().flatten().collect();
        let providers: Vec<PythonDistribution> = names.into_iter().filter_map(&provider).collect();
        if !providers.is_empty() {
            found.insert(module, providers);
        }
    }
    Ok(found)
}

fn describe_interpreter(py: Python<'_>) -> PyResult<Interpreter> {
    let sys = py.import("sys")?;
    let version = py.import("platform")?.call_method0("python_version")?.extract()?;
    let mut packages = BTreeMap::new();
    for distribution in
        py.import("importlib.metadata")?.call_method0("distributions")?.try_iter()?
    {
        let distribution = distribution?;
        let name: Option<String> = distribution.getattr("name")?.extract()?;
        if let Some(name) = name {
            packages.insert(name.to_lowercase(), distribution.getattr("version")?.extract()?);
        }
    }
    let folders: Vec<PathBuf> = sys.getattr("path")?.extract()?;
    // The wheels of NVIDIA have their libraries below `nvidia`.
    let folders = folders.into_iter().filter(|folder| folder.join("nvidia").is_dir()).collect();
    Ok(Interpreter {
        version,
        executable: sys.getattr("executable")?.extract()?,
        packages,
        folders,
    })
}

#[pyfunction]
fn main(py: Python<'_>, argv: Vec<String>) -> PyResult<i32> {
    // Without the GIL: the command runs for as long as the job, and other threads must run, too.
    let (status, raised) = py.detach(move || {
        let surroundings = EmbeddingPythonInterpreter {
            raised: RefCell::new(None),
            stop_level: Cell::new(StopLevel::Continue),
            raised_during_reports: Arc::default(),
        };
        let status = farandole_cli::main(&argv, &surroundings);
        (status, surroundings.raised.into_inner())
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(status),
    }
}

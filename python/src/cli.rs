// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.cli`: the command, with this interpreter around it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use farandole::launcher::Wish;
use farandole::telemetry::Metric;
use farandole_cli::{Distribution, Python as Interpreter, Surroundings, Watch};
use pyo3::exceptions::{PyException, PySystemExit};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(main, module)?)
}

/// This interpreter. The command asks from the thread that called it.
struct Here {
    /// The exception of a signal handler. The command then ends, and `main` raises it.
    raised: RefCell<Option<PyErr>>,
    wish: Cell<Wish>,
    /// Exceptions of signal handlers during a report to the run viewer.
    meanwhile: Arc<Mutex<Vec<PyErr>>>,
}

/// Returns the wish that follows from the exit status of a signal handler: Ctrl-C leaves time,
/// SIGTERM less, and a second one of either none.
fn asked(py: Python<'_>, error: &PyErr, before: Wish) -> Wish {
    const SIGINT: i32 = 128 + 2;
    let status = error
        .is_instance_of::<PySystemExit>(py)
        .then(|| error.value(py).getattr("code").and_then(|code| code.extract::<i32>()).ok())
        .flatten();
    match (before, status) {
        (Wish::GoOn, None | Some(SIGINT)) => Wish::Interrupt,
        (Wish::GoOn, Some(_)) => Wish::Terminate,
        _ => Wish::Kill,
    }
}

impl Here {
    /// Returns the found value; a value that cannot be found is shown as missing. A signal
    /// meanwhile is not lost.
    fn found<T: Default>(&self, py: Python<'_>, found: PyResult<T>) -> T {
        found.unwrap_or_else(|error| {
            if !error.is_instance_of::<PyException>(py) {
                self.hear(py, error);
            }
            T::default()
        })
    }

    /// Notes what a signal handler has raised.
    fn hear(&self, py: Python<'_>, error: PyErr) {
        self.wish.set(asked(py, &error, self.wish.get()));
        self.raised.borrow_mut().get_or_insert(error);
    }
}

impl Surroundings for Here {
    fn wish(&self) -> Wish {
        Python::attach(|py| {
            let mut raised =
                std::mem::take(&mut *self.meanwhile.lock().unwrap_or_else(PoisonError::into_inner));
            raised.extend(py.check_signals().err());
            raised.into_iter().for_each(|error| self.hear(py, error));
            self.wish.get()
        })
    }

    fn call(&self, module: &str, words: &[String]) -> Result<i32, String> {
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

    fn watch(&self, store: Option<&str>, name: &str, ranks: u32) -> Result<Arc<dyn Watch>, String> {
        Python::attach(|py| {
            let made = py
                .import("farandole.runner.show.watched")
                .and_then(|module| module.call_method1("Watch", (store, name, ranks)));
            let made = made.map_err(|error| error.to_string())?;
            Ok(Arc::new(Watched { object: made.unbind(), raised: Arc::clone(&self.meanwhile) })
                as Arc<dyn Watch>)
        })
    }

    fn package(&self) -> PathBuf {
        Python::attach(|py| {
            let folder = py
                .import("farandole")
                .and_then(|package| package.getattr("__path__")?.get_item(0)?.extract());
            self.found(py, folder)
        })
    }

    fn python(&self) -> Interpreter {
        Python::attach(|py| self.found(py, interpreter(py)))
    }

    fn modules(&self) -> BTreeMap<String, Vec<Distribution>> {
        Python::attach(|py| self.found(py, modules(py)))
    }
}

/// The object that writes what the run viewer shows.
struct Watched {
    object: Py<PyAny>,
    raised: Arc<Mutex<Vec<PyErr>>>,
}

impl Watched {
    /// Tells it something. An error stays here; an interrupt is not lost.
    fn tell(&self, told: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<()>) {
        Python::attach(|py| {
            if let Err(error) = told(py, self.object.bind(py))
                && !error.is_instance_of::<PyException>(py)
            {
                self.raised.lock().unwrap_or_else(PoisonError::into_inner).push(error);
            }
        });
    }
}

impl Watch for Watched {
    fn folder(&self) -> Option<PathBuf> {
        Python::attach(|py| self.object.getattr(py, "folder").ok()?.extract(py).ok()?)
    }

    fn world(&self, generation: u64, places: &[(u32, String)]) {
        let places = places.to_vec();
        self.tell(|_, object| object.call_method1("world", (generation, places)).map(drop));
    }

    fn metric(&self, metric: &Metric) {
        let Metric { task, rank, kind, data } = metric;
        self.tell(|py, object| {
            object.call_method1("metric", (*task, *rank, kind, PyBytes::new(py, data))).map(drop)
        });
    }

    fn loss(&self, what: &str) {
        self.tell(|_, object| object.call_method1("loss", (what,)).map(drop));
    }

    fn ended(&self, reason: Option<&str>, interrupted: bool) {
        self.tell(|_, object| object.call_method1("ended", (reason, interrupted)).map(drop));
    }
}

/// Returns the distributions that have files of each module: a framework comes under several names,
/// `tensorflow-cpu` among them.
fn modules(py: Python<'_>) -> PyResult<BTreeMap<String, Vec<Distribution>>> {
    let metadata = py.import("importlib.metadata")?;
    // A distribution with broken metadata provides nothing, and is no error here.
    let provider = |name: String| -> Option<Distribution> {
        let version = metadata.call_method1("version", (&name,)).ok()?.extract().ok()?;
        Some(Distribution { name: name.to_lowercase().replace('_', "-"), version })
    };
    let mut found = BTreeMap::new();
    for item in
        metadata.call_method0("packages_distributions")?.call_method0("items")?.try_iter()?
    {
        let (module, names): (String, Vec<Option<String>>) = item?.extract()?;
        let names: BTreeSet<String> = names.into_iter().flatten().collect();
        let providers: Vec<Distribution> = names.into_iter().filter_map(&provider).collect();
        if !providers.is_empty() {
            found.insert(module, providers);
        }
    }
    Ok(found)
}

fn interpreter(py: Python<'_>) -> PyResult<Interpreter> {
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
    let (status, raised) = py.detach(move || {
        let here = Here {
            raised: RefCell::new(None),
            wish: Cell::new(Wish::GoOn),
            meanwhile: Arc::default(),
        };
        let status = farandole_cli::main(&argv, &here);
        (status, here.raised.into_inner())
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(status),
    }
}

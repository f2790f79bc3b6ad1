// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The interface of the command to the process that contains it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use farandole::launcher::{StopLevel, SuspensionRequest};
use farandole::telemetry::WorkerMetric;

/// The interpreter of the process that contains this command.
pub trait EmbeddingInterpreter {
    /// Returns the stop level that signals have requested so far.
    fn requested_stop_level(&self) -> StopLevel;

    /// Makes the request at each SIGUSR1 from now on.
    ///
    /// # Errors
    /// A text about the exception.
    fn watch_suspension_signal(&self, request: SuspensionRequest) -> Result<(), String> {
        drop(request);
        Err("there are no signal handlers here".to_owned())
    }

    /// Returns the interpreter and its installed packages, without importing them.
    fn installation(&self) -> PythonInstallation;

    /// Returns the folder of the Python package.
    fn package_folder(&self) -> PathBuf;

    /// Returns the distributions of this interpreter's modules, by the name of the top-level
    /// module, without importing them.
    fn module_distributions(&self) -> BTreeMap<String, Vec<PythonDistribution>>;

    /// Calls `main(words)` of a module of the package; returns the exit status.
    ///
    /// # Errors
    /// A text about the exception, or that there is no such module.
    fn call_python_main(&self, module: &str, words: &[String]) -> Result<i32, String>;

    /// Finds a volume of Unity Catalog that is not mounted, sets the credentials of its files for
    /// all stores that are opened later, and returns the URL of a path in it; `None` for other
    /// paths. `options` are further options, such as a region.
    ///
    /// # Errors
    /// The reason why the volume cannot be used.
    fn open_volume(
        &self,
        path: &str,
        options: &BTreeMap<String, String>,
    ) -> Result<Option<String>, String> {
        let _ = (path, options);
        Ok(None)
    }

    /// Shows a job in the run viewer, and as metrics.
    ///
    /// # Errors
    /// The reason why the job cannot be shown.
    fn open_viewer(&self, options: &JobViewerOptions<'_>) -> Result<Arc<dyn JobViewer>, String> {
        let _ = options;
        Err("there is no run viewer here".to_owned())
    }
}

/// The ways in which a job is shown.
#[derive(Clone, Copy, Debug)]
pub struct JobViewerOptions<'a> {
    /// Whether the run viewer shows it.
    pub shows_run: bool,
    /// The store of the run viewer; `None` for the store of the current directory.
    pub store: Option<&'a str>,
    /// The address that serves its metrics; empty for none.
    pub metrics_address: &'a str,
    /// Name of the job.
    pub name: &'a str,
    /// Number of processes.
    pub ranks: u32,
}

/// Receives reports about a job for the run viewer and the metrics. A failed report never fails the
/// job.
pub trait JobViewer: Send + Sync {
    /// Returns the folder for the output of ranks, if the store is on this host.
    fn output_folder(&self) -> Option<PathBuf>;

    /// Shows the task and the host of each rank, and the generation of the world.
    fn show_world(&self, generation: u64, places: &[(u32, String)]);

    /// Shows a record of a worker.
    fn show_metric(&self, metric: &WorkerMetric);

    /// Shows that a worker or a host was lost.
    fn show_loss(&self, what: &str);

    /// Shows the end of the job, with the reason if it failed.
    fn show_end(&self, reason: Option<&str>, interrupted: bool);
}

/// A Python interpreter and its distributions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PythonInstallation {
    /// Version, such as `3.11.2`.
    pub version: String,
    /// Path of its program.
    pub executable: String,
    /// Installed distributions and their versions, by lower-case name.
    pub packages: BTreeMap<String, String>,
    /// Folders that contain distributions.
    pub folders: Vec<PathBuf>,
}

/// An installed distribution.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PythonDistribution {
    /// Its name, such as `tensorflow-cpu`.
    pub name: String,
    /// Its version.
    pub version: String,
}

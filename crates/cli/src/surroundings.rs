// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The interface of the command to the process that contains it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use farandole::launcher::Wish;
use farandole::telemetry::Metric;

/// The interpreter's side.
pub trait Surroundings {
    /// Returns the request of the signals so far.
    fn wish(&self) -> Wish;

    /// Returns the interpreter and its installed packages. Nothing is imported to find out.
    fn python(&self) -> Python;

    /// Folder of the Python package.
    fn package(&self) -> PathBuf;

    /// Returns the packages of this interpreter's modules, by the name of the top module. Nothing
    /// is imported for it.
    fn modules(&self) -> BTreeMap<String, Vec<Distribution>>;

    /// Calls `main(words)` of a module of the package; the exit status, or a text about the
    /// exception.
    ///
    /// # Errors
    /// What the function raised, or that there is no such module.
    fn call(&self, module: &str, words: &[String]) -> Result<i32, String>;

    /// Opens the run viewer on a store, or on that of the current directory, and shows a job of
    /// `ranks` processes in it.
    ///
    /// # Errors
    /// Why not, in words.
    fn watch(&self, store: Option<&str>, name: &str, ranks: u32) -> Result<Arc<dyn Watch>, String> {
        let _ = (store, name, ranks);
        Err("there is no run viewer here".to_owned())
    }
}

/// Reports of a job to the run viewer. They never fail the job.
pub trait Watch: Send + Sync {
    /// Folder for what ranks print, if the store is of this host.
    fn folder(&self) -> Option<PathBuf>;

    /// Task and host of each rank, and which world of an elastic job it is.
    fn world(&self, generation: u64, places: &[(u32, String)]);

    /// A record of a worker.
    fn metric(&self, metric: &Metric);

    /// A worker or a host is out.
    fn loss(&self, what: &str);

    /// The job is over; why it failed, if it did.
    fn ended(&self, reason: Option<&str>, interrupted: bool);
}

/// An interpreter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Python {
    /// Such as `3.11.2`.
    pub version: String,
    /// Its program.
    pub executable: String,
    /// Installed distributions and their versions, by lower-case name.
    pub packages: BTreeMap<String, String>,
    /// Folders that distributions are in.
    pub folders: Vec<PathBuf>,
}

/// An installed distribution.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Its name, such as `tensorflow-cpu`.
    pub name: String,
    /// Its version.
    pub version: String,
}

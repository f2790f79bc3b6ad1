// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The interface of the command to the process that contains it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use farandole::launcher::Wish;

/// The interpreter's side.
pub trait Surroundings {
    /// What the signals that came so far ask of the command.
    fn wish(&self) -> Wish;

    /// The interpreter, and what is installed in it. Nothing is imported to find out.
    fn python(&self) -> Python;

    /// Folder of the Python package.
    fn package(&self) -> PathBuf;

    /// Who provides the modules of this interpreter, by the module's name at the top. Nothing is imported to find out.
    fn modules(&self) -> BTreeMap<String, Vec<Distribution>>;

    /// Calls `main(words)` of a module of the package; the exit status, or in words what was raised.
    ///
    /// # Errors
    /// What the function raised, or that there is no such module.
    fn call(&self, module: &str, words: &[String]) -> Result<i32, String>;
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

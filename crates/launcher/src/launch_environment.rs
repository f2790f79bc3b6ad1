// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The environment variables, files and programs in which batch systems describe a job.

/// The source of environment variables and files, which a test replaces.
pub trait LaunchEnvironment {
    /// Returns the variable's value, if it is set and not empty.
    fn environment_variable(&self, name: &str) -> Option<String>;

    /// Returns the file's text.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read_file(&self, path: &str) -> std::io::Result<String>;

    /// Returns the names of the files in a directory, sorted; none if there is no directory.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn file_names(&self, directory: &str) -> std::io::Result<Vec<String>>;

    /// Returns whether a program can be started by this name or path.
    fn has_program(&self, name: &str) -> bool;
}

/// This process's own environment and files.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalEnvironment;

impl LaunchEnvironment for LocalEnvironment {
    fn environment_variable(&self, name: &str) -> Option<String> {
        farandole_config::environment_variable(name)
    }

    fn read_file(&self, path: &str) -> std::io::Result<String> {
        std::fs::read_to_string(path)
    }

    fn file_names(&self, directory: &str) -> std::io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<std::io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    fn has_program(&self, name: &str) -> bool {
        let path = farandole_config::environment_variable("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
    }
}

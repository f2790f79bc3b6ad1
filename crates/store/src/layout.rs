// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Names of data and runs below a prefix.

/// Locations of runs and prepared data, as URLs or paths in the form of the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLayout {
    prefix: String,
    train: String,
    val: String,
    test: String,
    runs: String,
    checkpoint: String,
}

/// Locations that differ from the default; each replaces the whole path.
#[derive(Clone, Debug, Default)]
pub struct LayoutOverrides {
    /// Training data.
    pub train: Option<String>,
    /// Validation data.
    pub val: Option<String>,
    /// Test data.
    pub test: Option<String>,
    /// Runs.
    pub runs: Option<String>,
    /// File name of checkpoints.
    pub checkpoint: Option<String>,
}

impl StoreLayout {
    /// Subdirectory of a run with its logs.
    pub const LOGS_SUBDIRECTORY: &'static str = "logs";

    /// Returns the layout below `prefix`; `places` replaces defaults.
    pub fn new(prefix: &str, places: LayoutOverrides) -> Self {
        let prefix = match prefix.trim_end_matches('/') {
            // The root directory `/` must not become an empty path.
            "" => prefix.to_owned(),
            trimmed => trimmed.to_owned(),
        };
        let below =
            |chosen: Option<String>, name: &str| chosen.unwrap_or_else(|| join_path(&prefix, name));
        Self {
            // These are Horovod's names: programs that build the paths themselves find the same
            // files.
            train: below(places.train, "intermediate_train_data"),
            val: below(places.val, "intermediate_val_data"),
            test: below(places.test, "intermediate_test_data"),
            runs: below(places.runs, "runs"),
            checkpoint: places.checkpoint.unwrap_or_else(|| "checkpoint".to_owned()),
            prefix,
        }
    }

    /// Returns the prefix.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the file name of checkpoints.
    pub fn checkpoint_filename(&self) -> &str {
        &self.checkpoint
    }

    /// Returns the directory of training data number `idx`.
    pub fn train_data(&self, idx: Option<u64>) -> String {
        numbered_path(&self.train, idx)
    }

    /// Returns the directory of validation data number `idx`.
    pub fn val_data(&self, idx: Option<u64>) -> String {
        numbered_path(&self.val, idx)
    }

    /// Returns the directory of test data number `idx`.
    pub fn test_data(&self, idx: Option<u64>) -> String {
        numbered_path(&self.test, idx)
    }

    /// Returns the directory of all runs.
    pub fn runs_path(&self) -> &str {
        &self.runs
    }

    /// Returns the directory of one run.
    pub fn run_path(&self, run_id: &str) -> String {
        join_path(&self.runs, run_id)
    }

    /// Returns the checkpoint file of one run.
    pub fn checkpoint_path(&self, run_id: &str) -> String {
        join_path(&self.run_path(run_id), &self.checkpoint)
    }

    /// Returns the logs directory of one run.
    pub fn logs_path(&self, run_id: &str) -> String {
        join_path(&self.run_path(run_id), Self::LOGS_SUBDIRECTORY)
    }
}

fn join_path(prefix: &str, name: &str) -> String {
    if prefix.ends_with('/') { format!("{prefix}{name}") } else { format!("{prefix}/{name}") }
}

fn numbered_path(path: &str, idx: Option<u64>) -> String {
    idx.map_or_else(|| path.to_owned(), |idx| format!("{path}.{idx}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_the_ones_horovods_users_know() {
        let layout = StoreLayout::new("file:///data/", LayoutOverrides::default());
        assert_eq!(layout.train_data(None), "file:///data/intermediate_train_data");
        assert_eq!(layout.val_data(Some(3)), "file:///data/intermediate_val_data.3");
        assert_eq!(layout.checkpoint_path("run_1"), "file:///data/runs/run_1/checkpoint");
        assert_eq!(layout.logs_path("run_1"), "file:///data/runs/run_1/logs");
    }

    #[test]
    fn a_chosen_path_replaces_the_default_and_still_gets_its_number() {
        let places =
            LayoutOverrides { train: Some("/data/t".into()), ..LayoutOverrides::default() };
        assert_eq!(StoreLayout::new("/", places).train_data(Some(0)), "/data/t.0");
        assert_eq!(StoreLayout::new("/", LayoutOverrides::default()).runs_path(), "/runs");
    }
}

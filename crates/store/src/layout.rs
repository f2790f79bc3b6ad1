// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Names of data and runs below a prefix.

/// Places of runs and prepared data, as URLs or paths in the form of the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    prefix: String,
    train: String,
    val: String,
    test: String,
    runs: String,
    checkpoint: String,
}

/// Names that differ from the default, each replacing the whole path.
#[derive(Clone, Debug, Default)]
pub struct Places {
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

impl Layout {
    /// Subdirectory of a run with its logs.
    pub const LOGS: &'static str = "logs";

    /// Returns the layout below `prefix`; `places` replace the defaults.
    pub fn new(prefix: &str, places: Places) -> Self {
        let prefix = match prefix.trim_end_matches('/') {
            "" => prefix.to_owned(),
            trimmed => trimmed.to_owned(),
        };
        let below =
            |chosen: Option<String>, name: &str| chosen.unwrap_or_else(|| join(&prefix, name));
        Self {
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

    /// File name of checkpoints.
    pub fn checkpoint_filename(&self) -> &str {
        &self.checkpoint
    }

    /// Directory of training data number `idx`.
    pub fn train_data(&self, idx: Option<u64>) -> String {
        numbered(&self.train, idx)
    }

    /// Directory of validation data number `idx`.
    pub fn val_data(&self, idx: Option<u64>) -> String {
        numbered(&self.val, idx)
    }

    /// Directory of test data number `idx`.
    pub fn test_data(&self, idx: Option<u64>) -> String {
        numbered(&self.test, idx)
    }

    /// Directory of all runs.
    pub fn runs(&self) -> &str {
        &self.runs
    }

    /// Directory of one run.
    pub fn run(&self, run_id: &str) -> String {
        join(&self.runs, run_id)
    }

    /// Checkpoint file of one run.
    pub fn checkpoint(&self, run_id: &str) -> String {
        join(&self.run(run_id), &self.checkpoint)
    }

    /// Logs of one run.
    pub fn logs(&self, run_id: &str) -> String {
        join(&self.run(run_id), Self::LOGS)
    }
}

fn join(prefix: &str, name: &str) -> String {
    if prefix.ends_with('/') { format!("{prefix}{name}") } else { format!("{prefix}/{name}") }
}

fn numbered(path: &str, idx: Option<u64>) -> String {
    idx.map_or_else(|| path.to_owned(), |idx| format!("{path}.{idx}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_the_ones_horovods_users_know() {
        let layout = Layout::new("file:///data/", Places::default());
        assert_eq!(layout.train_data(None), "file:///data/intermediate_train_data");
        assert_eq!(layout.val_data(Some(3)), "file:///data/intermediate_val_data.3");
        assert_eq!(layout.checkpoint("run_1"), "file:///data/runs/run_1/checkpoint");
        assert_eq!(layout.logs("run_1"), "file:///data/runs/run_1/logs");
    }

    #[test]
    fn a_chosen_path_replaces_the_default_and_still_gets_its_number() {
        let places = Places { train: Some("/data/t".into()), ..Places::default() };
        assert_eq!(Layout::new("/", places).train_data(Some(0)), "/data/t.0");
        assert_eq!(Layout::new("/", Places::default()).runs(), "/runs");
    }
}

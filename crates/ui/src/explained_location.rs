// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Explains a run by its directory, or the newest run of a store.

use std::sync::Arc;
use std::time::SystemTime;

use farandole_store::Store;
use serde::Serialize;

use crate::catalog::{FoundRun, RunCatalog};
use crate::error::{Error, Result};
use crate::explain::{RunExplanation, explain_record};
use crate::record;
use crate::source::{RECORD_FILE, RunSource};

/// The explanation of a run, and the other runs of the store in which it was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LocationExplanation {
    /// The run that is explained.
    pub run: RunIdentity,
    /// The explanation: its limits and their causes.
    #[serde(flatten)]
    pub explanation: RunExplanation,
    /// The other runs of the store, the newest first; `None` if the location is a run itself.
    pub others: Option<Vec<RunIdentity>>,
}

/// A run: where it is, and when it was started.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunIdentity {
    /// Its directory, as a path or a URL.
    pub directory: String,
    /// `running`, `silent`, `ended`, `failed` or `interrupted`; empty if unknown.
    pub state: String,
    /// Milliseconds since 1970; `None` if unknown.
    pub started: Option<f64>,
}

impl RunIdentity {
    fn from_found(found: &FoundRun) -> Self {
        let FoundRun { summary, directory, .. } = found;
        Self {
            directory: directory.display_path(""),
            state: summary.state.clone(),
            started: summary.started,
        }
    }
}

/// Explains the run in the directory `url`, such as `/data/store/runs/mine`, or else the newest run
/// of the store at `url`, such as `/data/store`.
///
/// # Errors
/// [`Error::Missing`] if there is no record of a run; [`Error::Damaged`] if the record is not one;
/// a store that cannot be read.
pub fn explain_location(url: &str) -> Result<LocationExplanation> {
    let location = Store::open(url)?;
    let (found, others) = match find_run_at(&location)? {
        Some(run) => (run, None),
        None => {
            let mut runs = recorded_runs_newest_first(url)?;
            if runs.is_empty() {
                let what = format!(
                    "a run in {}: neither it nor a directory below it has a {RECORD_FILE}",
                    location.display_path("")
                );
                return Err(Error::Missing { what });
            }
            let newest = runs.remove(0);
            (newest, Some(runs.iter().map(RunIdentity::from_found).collect()))
        }
    };
    let record = record::read_record(&found.directory, &found.files)?;
    Ok(LocationExplanation {
        run: RunIdentity::from_found(&found),
        explanation: explain_record(&record, &found.files),
        others,
    })
}

/// Returns the run whose directory this is, if it has a record.
fn find_run_at(location: &Store) -> Result<Option<FoundRun>> {
    if !location.exists(RECORD_FILE)? {
        return Ok(None);
    }
    // The directory itself is the run, so its name below is empty.
    Ok(RunSource::list_runs(location)?.remove("").map(|files| {
        let mut summary = record::summarize_run(String::new(), "", location, &files);
        summary.state = record::run_state_at(&summary, SystemTime::now()).to_owned();
        FoundRun { summary, directory: location.clone(), files: Arc::new(files) }
    }))
}

/// Returns the runs of a store that have a record: only records have times of ranks.
fn recorded_runs_newest_first(url: &str) -> Result<Vec<FoundRun>> {
    let mut runs = RunCatalog::open(&[url.to_owned()])?.find_all_runs()?;
    runs.retain(|run| run.files.contains_key(RECORD_FILE));
    let age = |run: &FoundRun| run.summary.started.or(run.summary.updated).unwrap_or_default();
    runs.sort_by(|a, b| age(b).total_cmp(&age(a)));
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_record(folder: &std::path::Path, run: &str, record: &str) {
        let directory = folder.join(run);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(RECORD_FILE), record).unwrap();
    }

    fn names(runs: &[RunIdentity]) -> Vec<&str> {
        runs.iter().filter_map(|run| run.directory.rsplit('/').next()).collect()
    }

    /// The newest run is last by name, first by name, or below a folder of a team.
    #[test]
    fn a_store_is_explained_by_its_newest_run_wherever_that_is() {
        for newest in ["a", "m", "z", "team/b"] {
            let folder = tempfile::tempdir().unwrap();
            for run in ["a", "m", "z", "team/b"] {
                let started = if run == newest { 9000 } else { 1000 + run.len() };
                let record = format!(
                    "{{\"state\": \"failed\", \"reason\": \"{run}\", \"started\": {started}}}"
                );
                write_record(&folder.path().join("runs"), run, &record);
            }
            // Data and a run without a record are no run that can be explained.
            std::fs::create_dir_all(folder.path().join("runs/old/checkpoint")).unwrap();
            std::fs::write(folder.path().join("runs/old/checkpoint/x"), "").unwrap();
            for location in [folder.path().to_owned(), folder.path().join("runs")] {
                let found = explain_location(&location.to_string_lossy()).unwrap();
                assert_eq!(found.explanation.verdict, format!("failed: {newest}"));
                assert!(found.run.directory.ends_with(&format!("/runs/{newest}")), "{found:?}");
                assert_eq!(found.others.map(|others| others.len()), Some(3));
            }
        }
    }

    #[test]
    fn other_runs_are_listed_newest_first_with_their_states() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        write_record(&runs, "first", r#"{"state": "ended", "started": 1000}"#);
        write_record(&runs, "second", r#"{"state": "failed", "started": 2000}"#);
        write_record(
            &runs,
            "killed",
            r#"{"state": "running", "started": 3, "updated": 4, "heartbeat": 5}"#,
        );
        write_record(&runs, "newest", r#"{"state": "ended", "started": 3000}"#);
        let found = explain_location(&folder.path().to_string_lossy()).unwrap();
        let others = found.others.unwrap();
        assert_eq!(names(&others), ["second", "first", "killed"]);
        let states: Vec<&str> = others.iter().map(|run| run.state.as_str()).collect();
        assert_eq!(states, ["failed", "ended", "silent"]);
    }

    #[test]
    fn the_directory_of_a_run_is_that_run_alone() {
        let folder = tempfile::tempdir().unwrap();
        write_record(folder.path(), "runs/a", r#"{"state": "failed", "reason": "why"}"#);
        // A run of the same directory's own name, below.
        write_record(folder.path(), "runs/a/runs/inner", r#"{"state": "ended", "started": 9000}"#);
        let url = folder.path().join("runs/a").to_string_lossy().into_owned();
        let found = explain_location(&url).unwrap();
        assert_eq!((found.explanation.verdict.as_str(), &found.others), ("failed: why", &None));
        assert_eq!(found.run.directory, url);
    }

    #[test]
    fn a_place_without_a_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for place in [folder.path().to_owned(), folder.path().join("none")] {
            let url = place.to_string_lossy().into_owned();
            let text = explain_location(&url).unwrap_err().to_string();
            assert!(text.contains(&url) && text.contains(RECORD_FILE), "{text}");
        }
        write_record(folder.path(), ".", r#"{"state": "ended"}"#);
        let found = explain_location(&folder.path().to_string_lossy()).unwrap();
        assert!(found.explanation.verdict.starts_with("unknown"), "{found:?}");
    }
}

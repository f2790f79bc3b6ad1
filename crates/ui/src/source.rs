// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A store with runs, and which files each of them has.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use farandole_store::Store;

use crate::error::Result;

/// The driver's report of a run.
pub(crate) const RECORD_FILE: &str = "_record.json";
/// Losses and metrics, a line an epoch.
pub(crate) const HISTORY_FILE: &str = "logs/history.jsonl";
/// Losses within epochs.
pub(crate) const STEPS_FILE: &str = "logs/steps.jsonl";
/// The arguments of a run.
pub(crate) const FINGERPRINT_FILE: &str = "_fingerprint.json";
/// Files that make a directory the one of a run.
const RUN_MARKER_FILES: [&str; 4] = [RECORD_FILE, HISTORY_FILE, FINGERPRINT_FILE, "checkpoint"];

/// Size and time of a file: another content has another one.
pub(crate) type FileStamp = (u64, Option<SystemTime>);

/// The files of a run by their path below its directory.
pub(crate) type RunFiles = BTreeMap<String, FileStamp>;

/// A store that was given to the viewer.
#[derive(Debug)]
pub(crate) struct RunSource {
    store: Store,
}

impl RunSource {
    /// Opens it; touches nothing.
    ///
    /// # Errors
    /// Like [`Store::open`].
    pub(crate) fn open(url: &str) -> Result<Self> {
        Ok(Self { store: Store::open(url)? })
    }

    /// Returns its URL.
    pub(crate) fn url(&self) -> String {
        self.store.url()
    }

    /// Returns the greatest age of a listing.
    pub(crate) fn max_listing_age(&self) -> Duration {
        // A listing of an object store takes many requests, which cost time and money.
        if self.store.is_remote() { Duration::from_secs(5) } else { Duration::from_millis(500) }
    }

    /// Returns the number of files that are read at once.
    pub(crate) fn reader_thread_count(&self) -> usize {
        if self.store.is_remote() { 16 } else { 4 }
    }

    /// Returns the directory of the runs: `runs` below a store's prefix, or the given one.
    ///
    /// # Errors
    /// A store that cannot be asked.
    pub(crate) fn runs_root(&self) -> Result<Store> {
        Ok(if self.store.exists("runs")? {
            self.store.open_child("runs")?
        } else {
            self.store.clone()
        })
    }

    /// Returns every run below `runs_root`, and its files.
    ///
    /// # Errors
    /// A store that cannot be asked.
    pub(crate) fn list_runs(root: &Store) -> Result<BTreeMap<String, RunFiles>> {
        // `list` would fail for a symbolic link to a directory, and hide all runs.
        let (entries, _) = root.list_with_links("")?;
        let runs: BTreeSet<&str> =
            entries.iter().filter_map(|entry| run_directory_of(&entry.path)).collect();
        let mut found: BTreeMap<String, RunFiles> =
            runs.iter().map(|run| ((*run).to_owned(), RunFiles::new())).collect();
        for entry in &entries {
            let Some((run, file)) = split_run_path(&entry.path, &runs) else { continue };
            if let Some(files) = found.get_mut(run) {
                files.insert(file.to_owned(), (entry.bytes, entry.modified));
            }
        }
        Ok(found)
    }
}

/// Returns the directory of the run that a file of this path makes one.
fn run_directory_of(path: &str) -> Option<&str> {
    RUN_MARKER_FILES.iter().find_map(|name| match path.strip_suffix(name)? {
        "" => Some(""),
        directory => directory.strip_suffix('/'),
    })
}

/// Returns the innermost run that a file belongs to, and its path there.
fn split_run_path<'a>(path: &'a str, runs: &BTreeSet<&str>) -> Option<(&'a str, &'a str)> {
    let inner = path.rmatch_indices('/').map(|(at, _)| (&path[..at], &path[at + 1..]));
    inner.chain([("", path)]).find(|(run, _)| runs.contains(run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_a_directory_with_one_of_its_files() {
        assert_eq!(run_directory_of("a/b/_record.json"), Some("a/b"));
        assert_eq!(run_directory_of("a/logs/history.jsonl"), Some("a"));
        assert_eq!(run_directory_of("_record.json"), Some(""));
        assert_eq!(run_directory_of("a/my-_record.json"), None);
        assert_eq!(run_directory_of("a/logs/steps.jsonl"), None);
    }

    #[test]
    fn files_belong_to_the_innermost_run() {
        let runs = BTreeSet::from(["a", "a/b"]);
        assert_eq!(split_run_path("a/b/logs/x", &runs), Some(("a/b", "logs/x")));
        assert_eq!(split_run_path("a/logs/x", &runs), Some(("a", "logs/x")));
        assert_eq!(split_run_path("c/x", &runs), None);
        assert_eq!(split_run_path("x", &BTreeSet::from([""])), Some(("", "x")));
    }

    #[test]
    fn runs_are_found_below_a_prefix_and_without_one() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        };
        write("runs/a/_record.json");
        write("runs/a/logs/other");
        write("runs/team/b/checkpoint");
        write("intermediate_train_data/part-0");
        let source = RunSource::open(&folder.path().to_string_lossy()).unwrap();
        let found = RunSource::list_runs(&source.runs_root().unwrap()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "team/b"]);
        assert_eq!(found["a"].keys().collect::<Vec<_>>(), ["_record.json", "logs/other"]);
        let inner = RunSource::open(&folder.path().join("runs/a").to_string_lossy()).unwrap();
        assert_eq!(
            RunSource::list_runs(&inner.runs_root().unwrap()).unwrap().keys().collect::<Vec<_>>(),
            [""]
        );
    }
}

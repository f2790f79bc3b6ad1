// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All runs of all sources. A run is read again only if the size or time of one of its files has
//! changed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use farandole_store::Store;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::record::{self, RunSummary};
use crate::source::{FINGERPRINT_FILE, FileStamp, HISTORY_FILE, RECORD_FILE, RunFiles, RunSource};

/// Files that a summary is read from.
const SUMMARY_FILES: [&str; 3] = [RECORD_FILE, HISTORY_FILE, FINGERPRINT_FILE];

/// The list of runs.
#[derive(Debug, Serialize)]
pub(crate) struct RunListing {
    /// The stores, in the order of their numbers.
    pub(crate) stores: Vec<String>,
    pub(crate) runs: Vec<RunSummary>,
    /// Stores that could not be read, and why.
    pub(crate) problems: Vec<String>,
}

/// A run that was found.
#[derive(Clone, Debug)]
pub(crate) struct FoundRun {
    pub(crate) summary: RunSummary,
    pub(crate) directory: Store,
    pub(crate) files: Arc<RunFiles>,
}

/// Every source, with its known facts.
#[derive(Debug)]
pub(crate) struct RunCatalog(Vec<(RunSource, Mutex<CachedRunsOfSource>)>);

#[derive(Debug, Default)]
struct CachedRunsOfSource {
    refreshed_at: Option<Instant>,
    runs: BTreeMap<String, CatalogRun>,
}

#[derive(Debug)]
struct CatalogRun {
    found: FoundRun,
    stamps: [Option<FileStamp>; 3],
}

impl RunCatalog {
    /// Returns a catalog of these stores.
    ///
    /// # Errors
    /// Text that is no store.
    pub(crate) fn open(urls: &[String]) -> Result<Self> {
        // A lock for each store, so that a slow one does not hold up requests to others.
        let sources = urls.iter().map(|url| Ok((RunSource::open(url)?, Mutex::default())));
        Ok(Self(sources.collect::<Result<_>>()?))
    }

    /// Returns every run.
    pub(crate) fn list_runs(&self) -> RunListing {
        let stores = self.0.iter().map(|(source, _)| source.url()).collect();
        let mut listing = RunListing { stores, runs: Vec::new(), problems: Vec::new() };
        let now = SystemTime::now();
        for (index, (source, known)) in self.0.iter().enumerate() {
            // Held during the listing, so that two pages do not list the same store twice.
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            // Known runs stay in the list while their store does not answer.
            if let Err(error) = known.refresh_runs(index, source) {
                listing.problems.push(error.to_string());
            }
            listing.runs.extend(known.runs.values().map(|run| {
                let summary = &run.found.summary;
                RunSummary {
                    state: record::run_state_at(summary, now).to_owned(),
                    ..summary.clone()
                }
            }));
        }
        listing
    }

    /// Returns every run, with its files.
    ///
    /// # Errors
    /// A store that cannot be asked.
    pub(crate) fn find_all_runs(&self) -> Result<Vec<FoundRun>> {
        let now = SystemTime::now();
        let mut runs = Vec::new();
        for (index, (source, known)) in self.0.iter().enumerate() {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            known.refresh_runs(index, source)?;
            runs.extend(known.runs.values().map(|run| {
                let mut found = run.found.clone();
                found.summary.state = record::run_state_at(&found.summary, now).to_owned();
                found
            }));
        }
        Ok(runs)
    }

    /// Returns the run of a name such as `0/a`.
    ///
    /// # Errors
    /// [`Error::Missing`]; a store that cannot be asked.
    pub(crate) fn find_run(&self, run: &str) -> Result<FoundRun> {
        let missing = || Error::Missing { what: run.to_owned() };
        let (number, id) = run.split_once('/').ok_or_else(missing)?;
        let index: usize = number.parse().map_err(|_| missing())?;
        let (source, known) = self.0.get(index).ok_or_else(missing)?;
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.refresh_runs(index, source)?;
        let mut found = known.runs.get(id).ok_or_else(missing)?.found.clone();
        // A heartbeat gets older although no file changes, so the state is not cached.
        found.summary.state = record::run_state_at(&found.summary, SystemTime::now()).to_owned();
        Ok(found)
    }
}

impl CachedRunsOfSource {
    fn refresh_runs(&mut self, index: usize, source: &RunSource) -> Result<()> {
        if self.refreshed_at.is_some_and(|at| at.elapsed() < source.max_listing_age()) {
            return Ok(());
        }
        let root = source.runs_root()?;
        let mut fresh = BTreeMap::new();
        let mut changed = Vec::new();
        for (id, files) in RunSource::list_runs(&root)? {
            let stamps = SUMMARY_FILES.map(|name| files.get(name).copied());
            match self.runs.remove(&id) {
                Some(mut run) if run.stamps == stamps => {
                    // The summary is still right, but other files, such as the steps of curves, may
                    // have changed.
                    run.found.files = Arc::new(files);
                    fresh.insert(id, run);
                }
                _ => changed.push((id, files, stamps)),
            }
        }
        let read =
            |(id, files, stamps): &(String, RunFiles, [Option<FileStamp>; 3])| -> Result<(String, CatalogRun)> {
                let directory = root.open_child(id)?;
                let summary = record::summarize_run(format!("{index}/{id}"), id, &directory, files);
                let found = FoundRun { summary, directory, files: Arc::new(files.clone()) };
                Ok((id.clone(), CatalogRun { found, stamps: *stamps }))
            };
        fresh.extend(
            map_in_threads(&changed, source.reader_thread_count(), read).into_iter().flatten(),
        );
        self.runs = fresh;
        // Not after an error: the next request then asks the store again.
        self.refreshed_at = Some(Instant::now());
        Ok(())
    }
}

/// Calls `work` with every item, on several threads.
fn map_in_threads<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let one = || {
        let mut made = Vec::new();
        // Relaxed: each index is given out once, and the end of the scope orders the results.
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            made.push(work(item));
        }
        made
    };
    std::thread::scope(|scope| {
        // The calling thread does a share of the work.
        let count = threads.min(items.len()).saturating_sub(1);
        let others: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
        let mut made = one();
        // A panic of a thread has already been printed; the results of the others are used.
        made.extend(others.into_iter().filter_map(|thread| thread.join().ok()).flatten());
        made
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        let items: Vec<u32> = (0..100).collect();
        let mut made = map_in_threads(&items, 4, |item| item * 2);
        made.sort_unstable();
        assert_eq!(made, (0..100).map(|item| item * 2).collect::<Vec<_>>());
        assert!(map_in_threads(&Vec::<u32>::new(), 4, |item| *item).is_empty());
    }

    #[test]
    fn a_run_is_found_by_its_name_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("runs/a")).unwrap();
        std::fs::write(
            folder.path().join("runs/a/_record.json"),
            r#"{"name": "first", "state": "ended"}"#,
        )
        .unwrap();
        std::fs::write(folder.path().join("secret"), "x").unwrap();
        let catalog = RunCatalog::open(&[folder.path().to_string_lossy().into_owned()]).unwrap();
        let listing = catalog.list_runs();
        assert_eq!(listing.runs.iter().map(|run| run.run.as_str()).collect::<Vec<_>>(), ["0/a"]);
        assert_eq!(catalog.find_run("0/a").unwrap().summary.name, "first");
        for wrong in ["a", "1/a", "0/", "0/..", "0/../a", "0/a/", "x/a"] {
            assert!(matches!(catalog.find_run(wrong), Err(Error::Missing { .. })), "{wrong}");
        }
    }

    #[test]
    fn a_store_that_is_not_there_has_no_runs() {
        let folder = tempfile::tempdir().unwrap();
        let catalog =
            RunCatalog::open(&[folder.path().join("none").to_string_lossy().into_owned()]).unwrap();
        assert!(catalog.list_runs().runs.is_empty());
    }
}

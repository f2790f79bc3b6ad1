// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Deletes unused prepared data.
//!
//! Only directories with the names that a preparation uses are considered: training and validation
//! data, `intermediate_*_data[.N]` below a store's prefix. A directory is deleted if a preparation
//! has named every file of it ([`crate::find_foreign_file`]), its lease is free and its newest file
//! is old enough. If a store has too many bytes of prepared data, its oldest directories are
//! deleted, too. The training and validation data of one number are kept or deleted together. Test
//! data, runs, checkpoints and other files are never deleted.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::lease;
use crate::prepared_files::{self, MANIFEST_FILE};
use crate::store::Store;

/// Name of the training data of a set; its number follows.
const TRAIN_DATA_PREFIX: &str = "intermediate_train_data";

/// Name of the validation data of a set; its number follows.
const VAL_DATA_PREFIX: &str = "intermediate_val_data";

/// Name of test data, which only users write.
const TEST_DATA_PREFIX: &str = "intermediate_test_data";

/// Reason to leave a symbolic link.
const LINK_REASON: &str = "is a symbolic link, which is not followed";

/// Directory of manifests for data that stays in place. They are small, and are written again on
/// demand.
const PLANS_DIRECTORY: &str = "plans";

/// Limits for prepared data; data outside of them is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepLimits {
    /// Smallest age of the newest file of data that is deleted for its age.
    pub older_than: Option<Duration>,
    /// Most bytes of prepared data; the oldest is deleted until the rest fits. Data in use counts,
    /// but is never deleted.
    pub max_size: Option<u64>,
}

/// A directory of prepared data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweptDirectory {
    /// Path below the store.
    pub path: String,
    /// Number of files.
    pub files: usize,
    /// Bytes of the files.
    pub bytes: u64,
}

/// A directory with the name of prepared data that is not deleted, because it contains files of
/// others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedDirectory {
    /// Path below the store.
    pub path: String,
    /// Reason, with the name of a file.
    pub reason: String,
}

/// Prepared data that is outside of the limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaleData {
    /// Directories to be deleted.
    pub stale: Vec<SweptDirectory>,
    /// Directories that the sweep does not delete, whatever their age, because it may not or
    /// cannot.
    pub skipped: Vec<SkippedDirectory>,
}

/// Returns the number suffix of a name like `intermediate_train_data.3`, here `.3`; empty without a
/// number; `None` for other names.
fn prepared_data_number(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("intermediate_")?;
    let (role, number) = rest.split_once("_data")?;
    let known = matches!(role, "train" | "val");
    let numbered = number.is_empty()
        || number.strip_prefix('.').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (known && numbered).then_some(number)
}

/// Training and validation data with the same number.
struct PreparedDataSet {
    parts: Vec<SweptDirectory>,
    free: bool,
    newest: SystemTime,
}

impl PreparedDataSet {
    fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// Returns unused prepared data below `store` that is outside of `limits`, and directories of the
/// same names with files of others.
///
/// # Errors
/// A backend that does not answer.
pub fn find_stale_data(store: &Store, limits: SweepLimits, now: SystemTime) -> Result<StaleData> {
    let old = |newest: SystemTime| {
        // A file that is newer than our clock has no age, and is never too old.
        let age = now.duration_since(newest).ok();
        age.zip(limits.older_than).is_some_and(|(age, least)| age >= least)
    };
    let (sets, mut skipped) = list_prepared_sets(store, now)?;
    let mut total: u64 = sets.iter().map(PreparedDataSet::total_bytes).sum();
    let mut stale = Vec::new();
    // The oldest sets come first, so data that is too old is deleted before data that is too large.
    for set in sets.into_iter().filter(|set| set.free) {
        if old(set.newest) || limits.max_size.is_some_and(|most| total > most) {
            total = total.saturating_sub(set.total_bytes());
            stale.extend(set.parts);
        }
    }
    // Manifests have no lease and almost no size, so only their age counts.
    for item in store
        .list_directory(PLANS_DIRECTORY)?
        .into_iter()
        .filter(|item| item.is_directory && limits.older_than.is_some())
    {
        let path = format!("{PLANS_DIRECTORY}/{}", item.name);
        if let Some(reason) = reason_to_keep_linked_manifest(store, &path)? {
            skipped.push(SkippedDirectory { path, reason });
            continue;
        }
        let (plan, newest) = measure_directory(store, path, now)?;
        // A directory without files is older than any limit.
        if old(newest.unwrap_or(SystemTime::UNIX_EPOCH)) {
            stale.push(plan);
        }
    }
    Ok(StaleData { stale, skipped })
}

/// Returns why the manifest of data that stays in place must not be deleted.
fn reason_to_keep_linked_manifest(store: &Store, path: &str) -> Result<Option<String>> {
    if store.is_link(path)? {
        return Ok(Some(LINK_REASON.to_owned()));
    }
    let plan = store.open_child(path)?;
    let (files, links) = plan.list_with_links("")?;
    let other = files.iter().map(|file| &file.path).find(|path| *path != MANIFEST_FILE);
    Ok(match links.first().or(other) {
        Some(other) => Some(foreign_file_message(&plan.display_path(other))),
        None => {
            prepared_files::foreign_file_of(&plan, false)?.map(|path| foreign_file_message(&path))
        }
    })
}

fn foreign_file_message(path: &str) -> String {
    format!("no manifest of a preparation names {path}")
}

/// Returns why a set of directories must not be deleted.
fn reason_to_keep_prepared_set(store: &Store, number: &str) -> Result<Option<String>> {
    let paths = [TRAIN_DATA_PREFIX, VAL_DATA_PREFIX].map(|name| format!("{name}{number}"));
    for path in &paths {
        if store.is_link(path)? {
            return Ok(Some(format!("{} {LINK_REASON}", store.display_path(path))));
        }
    }
    let [train, val] = paths.map(|path| store.open_child(&path));
    Ok(prepared_files::find_foreign_file(&train?, &val?)?.map(|path| foreign_file_message(&path)))
}

/// Returns all prepared data below `store`, the oldest first, and the directories of others.
fn list_prepared_sets(
    store: &Store,
    now: SystemTime,
) -> Result<(Vec<PreparedDataSet>, Vec<SkippedDirectory>)> {
    // One preparation writes both directories of a number, and a job reads both: both stay, or both
    // go.
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut skipped = Vec::new();
    for item in store.list_directory("")?.into_iter().filter(|item| item.is_directory) {
        if let Some(number) = prepared_data_number(&item.name) {
            names.entry(number.to_owned()).or_default().push(item.name.clone());
        } else if item.name.starts_with(TEST_DATA_PREFIX) {
            let reason = "no preparation writes test data".to_owned();
            skipped.push(SkippedDirectory { path: item.name, reason });
        }
    }
    let mut sets = Vec::new();
    for (number, names) in names {
        if let Some(reason) = reason_to_keep_prepared_set(store, &number)? {
            skipped.extend(
                names.into_iter().map(|path| SkippedDirectory { path, reason: reason.clone() }),
            );
            continue;
        }
        let mut set =
            PreparedDataSet { parts: Vec::new(), free: true, newest: SystemTime::UNIX_EPOCH };
        for path in names {
            set.free &= lease::is_free(&store.open_child(&path)?, now)?;
            let (part, newest) = measure_directory(store, path, now)?;
            set.newest = set.newest.max(newest.unwrap_or(SystemTime::UNIX_EPOCH));
            set.parts.push(part);
        }
        sets.push(set);
    }
    sets.sort_by_key(|set| set.newest);
    Ok((sets, skipped))
}

/// Returns a directory, and the time of the last write to any of its files; `None` without files.
fn measure_directory(
    store: &Store,
    path: String,
    now: SystemTime,
) -> Result<(SweptDirectory, Option<SystemTime>)> {
    let (mut files, mut bytes, mut newest) = (0, 0, None);
    for entry in store.list_with_links(&path)?.0 {
        // Without a time, a file counts as new and is kept.
        newest = newest.max(Some(entry.modified.unwrap_or(now)));
        files += 1;
        bytes += entry.bytes;
    }
    Ok((SweptDirectory { path, files, bytes }, newest))
}

/// Deletes the directories of [`find_stale_data`], and returns the deleted and the kept
/// directories.
///
/// # Errors
/// A backend that does not answer or does not delete. Directories that were deleted before the
/// error stay deleted.
pub fn sweep_stale_data(store: &Store, limits: SweepLimits, now: SystemTime) -> Result<StaleData> {
    let StaleData { stale, skipped } = find_stale_data(store, limits, now)?;
    Ok(StaleData { stale: delete_unused_directories(store, stale, now)?, skipped })
}

fn delete_unused_directories(
    store: &Store,
    found: Vec<SweptDirectory>,
    now: SystemTime,
) -> Result<Vec<SweptDirectory>> {
    // The plans of data that stays in place have no number: they are one group, without a lease.
    let mut sets: BTreeMap<Option<String>, Vec<SweptDirectory>> = BTreeMap::new();
    for one in found {
        sets.entry(prepared_data_number(&one.path).map(str::to_owned)).or_default().push(one);
    }
    let mut gone = Vec::new();
    for (number, set) in sets {
        // Another process may have begun to use the set since it was found, so the deletion first
        // acquires the lease, like a writer. The lease is in the directory of training data, which
        // is deleted last. It protects the whole set even if there was no training data.
        let number_text = number.clone();
        let train = number
            .map(|number| store.open_child(&format!("{TRAIN_DATA_PREFIX}{number}")))
            .transpose()?;
        let lease = match &train {
            Some(train) => match lease::acquire_for_deletion(train, now)? {
                Some(lease) => Some((train, lease)),
                // Another process uses the set now.
                None => continue,
            },
            None => None,
        };
        // A user may have added files since the set was found.
        let foreign = match (&number_text, &lease) {
            (Some(number), Some(_)) => reason_to_keep_prepared_set(store, number)?,
            _ => None,
        };
        if let (Some(_), Some((train, lease))) = (&foreign, &lease) {
            train.delete(lease)?;
            continue;
        }
        if let Some((train, lease)) = &lease {
            // If this process is killed, the next sweep continues.
            prepared_files::mark_deletion_in_progress(train)
                .and_then(|()| lease::make_room_and_complete_lease(train, lease))
                .inspect_err(|_| {
                    // The first error is reported. A lease that stays is valid until this process
                    // ends.
                    drop(train.delete(lease));
                })?;
        }
        for one in &set {
            if lease.is_none() || !one.path.starts_with(TRAIN_DATA_PREFIX) {
                store.delete_all(&one.path)?;
            }
        }
        if let Some((train, lease)) = lease {
            lease::delete_content_and_lease(train, &lease)?;
        }
        gone.extend(set);
    }
    gone.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use bytes::Bytes;

    use super::*;

    /// Limits of age.
    fn older(seconds: u64) -> SweepLimits {
        SweepLimits { older_than: Some(Duration::from_secs(seconds)), max_size: None }
    }

    /// Writes prepared data whose manifest names these files.
    fn prepare(store: &Store, directory: &str, files: &[&str]) {
        let store = store.open_child(directory).unwrap();
        for file in files {
            store.write(file, Bytes::from_static(&[0; 100])).unwrap();
        }
        let named: Vec<String> =
            files.iter().map(|file| format!(r#"{{"path": "{file}"}}"#)).collect();
        let text = format!(r#"{{"fingerprint": "data x", "files": [{}]}}"#, named.join(","));
        store.write(MANIFEST_FILE, Bytes::from(text)).unwrap();
    }

    /// Sets the times of all files below a directory.
    fn set_age(directory: &std::path::Path, age: Duration) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let file = std::fs::File::options().write(true).open(entry.unwrap().path()).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        }
    }

    fn names(swept: &[SweptDirectory]) -> Vec<&str> {
        swept.iter().map(|one| one.path.as_str()).collect()
    }

    #[test]
    fn the_oldest_unused_data_goes_until_the_rest_is_small_enough() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let now = SystemTime::now();
        for (path, days) in [
            ("intermediate_train_data.0", 1),
            ("intermediate_train_data.1", 4),
            ("intermediate_train_data.2", 3),
            ("intermediate_val_data.2", 3),
            ("intermediate_train_data.3", 2),
            ("plans/p", 9),
            ("runs/r", 9),
        ] {
            let files: &[&str] = if path == "plans/p" { &[] } else { &["file"] };
            prepare(&store, path, files);
            set_age(&directory.path().join(path), Duration::from_secs(days * 86_400));
        }
        let used = store.open_child("intermediate_train_data.1").unwrap();
        let mark = lease::mark_in_use(&used, now, None).unwrap().unwrap();
        let sets = list_prepared_sets(&store, now).unwrap().0;
        let total: u64 = sets.iter().map(PreparedDataSet::total_bytes).sum();
        let find = |limits| find_stale_data(&store, limits, now).unwrap().stale;
        // As if each of the five directories had 100 bytes, besides the mark of use.
        let unit = sets.iter().flat_map(|set| &set.parts).map(|part| part.bytes).min().unwrap();
        let most = |bytes: u64| SweepLimits {
            older_than: None,
            max_size: Some(bytes * unit / 100 + total - 5 * unit),
        };
        assert_eq!(find(most(500)), [], "as large as it may be");
        let second = ["intermediate_train_data.2", "intermediate_val_data.2"];
        for bytes in [499, 300] {
            assert_eq!(names(&find(most(bytes))), second, "the oldest is in use");
        }
        let both =
            SweepLimits { older_than: Some(Duration::from_secs(5 * 86_400 / 2)), ..most(299) };
        let expected = [second[0], second[1], "intermediate_train_data.3", "plans/p"];
        assert_eq!(names(&find(both)), expected, "old data counts as gone");
        let all = SweepLimits { older_than: None, max_size: Some(0) };
        assert_eq!(
            names(&sweep_stale_data(&store, all, now).unwrap().stale).len(),
            4,
            "data in use stays"
        );
        let skipped: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(skipped, ["intermediate_train_data.1", "plans", "runs"]);
        used.delete(&mark).unwrap();
        assert_eq!(find(SweepLimits::default()), [], "no limit");
    }

    #[test]
    fn data_that_is_prepared_while_others_are_deleted_stays_whole() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let (train, val) = ("intermediate_train_data.0", "intermediate_val_data.0");
        let all = SweepLimits { older_than: Some(Duration::ZERO), max_size: Some(0) };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        sweep_stale_data(&store, all, SystemTime::now()).unwrap();
                    }
                });
            }
            let writer = scope.spawn(|| {
                let child = store.open_child(train).unwrap();
                let mut round = 0;
                while round < 1000 {
                    let now = SystemTime::now();
                    let Some(lease) = lease::acquire_lease(&child, now, None, None).unwrap() else {
                        continue;
                    };
                    round += 1;
                    prepared_files::mark_deletion_in_progress(&child).unwrap();
                    let part = format!("part-{round}.parquet");
                    let files = [format!("{train}/{part}"), format!("{val}/{part}")];
                    for file in &files {
                        assert!(store.create_if_absent(file, Bytes::from_static(b"1")).unwrap());
                    }
                    for file in files.iter().cycle().take(20) {
                        assert!(store.exists(file).unwrap(), "{file} is gone");
                    }
                    child.delete(&lease).unwrap();
                }
            });
            let done = writer.join();
            ended.store(true, Ordering::Relaxed);
            done.unwrap();
        });
    }

    #[test]
    fn a_set_that_is_used_after_the_look_stays() {
        let store = Store::open("memory://sweep-race/d").unwrap();
        let set = ["intermediate_train_data.0", "intermediate_val_data.0"];
        for path in set {
            prepare(&store, path, &["part.parquet"]);
        }
        let later = SystemTime::now() + Duration::from_secs(3600);
        let looked = find_stale_data(&store, older(60), later).unwrap().stale;
        assert_eq!(looked.len(), 2);
        let train = store.open_child(set[0]).unwrap();
        let used = lease::mark_in_use(&train, later, None).unwrap().unwrap();
        assert_eq!(delete_unused_directories(&store, looked.clone(), later).unwrap(), []);
        assert!(set.iter().all(|path| store.exists(&format!("{path}/part.parquet")).unwrap()));
        train.delete(&used).unwrap();
        assert_eq!(delete_unused_directories(&store, looked, later).unwrap().len(), 2);
        assert!(!set.iter().any(|path| store.exists(path).unwrap()));
    }

    #[test]
    fn only_old_and_unused_prepared_data_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let put = |path: &str, text: &str| store.write(path, Bytes::from(text.to_owned())).unwrap();
        for path in ["train_data.0", "val_data.0", "train_data.1"] {
            prepare(&store, &format!("intermediate_{path}"), &["part.parquet"]);
        }
        let now = SystemTime::now();
        assert!(
            lease::mark_in_use(&store.open_child("intermediate_train_data.1").unwrap(), now, None)
                .unwrap()
                .is_some()
        );
        put("intermediate_train_dataset/mine.parquet", "x");
        put("runs/r/checkpoint", "x");
        prepare(&store, "plans/p", &[]);
        let young = sweep_stale_data(&store, older(60), now).unwrap();
        assert_eq!(young, StaleData::default(), "too young");
        let later = now + Duration::from_secs(3600);
        assert_eq!(find_stale_data(&store, older(60), later).unwrap().stale.len(), 3);
        let swept = sweep_stale_data(&store, older(60), later).unwrap().stale;
        let all: Vec<_> = swept.iter().map(|one| (one.path.as_str(), one.files)).collect();
        let expected =
            [("intermediate_train_data.0", 2), ("intermediate_val_data.0", 2), ("plans/p", 1)];
        assert_eq!(all, expected);
        let skipped: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(
            skipped,
            ["intermediate_train_data.1", "intermediate_train_dataset", "plans", "runs"]
        );
    }

    /// A sweep without limits of age, as an operator would run it.
    fn sweep_all(store: &Store) -> StaleData {
        let all = SweepLimits { older_than: Some(Duration::ZERO), max_size: Some(0) };
        let later = SystemTime::now() + Duration::from_secs(3600);
        sweep_stale_data(store, all, later).unwrap()
    }

    #[test]
    fn st_9_files_that_no_preparation_named_stay_and_are_reported() {
        let (train, val) = ("intermediate_train_data.0", "intermediate_val_data.0");
        // Each case adds one file of a user to data that is otherwise deleted.
        let cases = [
            (train, "mine.parquet"),
            (train, "part-00000-x.parquet"),
            (train, "year=1/a.parquet"),
            (val, "mine.parquet"),
            (val, "notes/readme"),
            ("intermediate_test_data.0", "part.parquet"),
            ("plans/p", "mine"),
        ];
        for (number, (place, name)) in cases.into_iter().enumerate() {
            for is_marked in [true, false] {
                let store = Store::open(&format!("memory://foreign-{number}-{is_marked}")).unwrap();
                if is_marked {
                    prepare(&store, train, &["part.parquet"]);
                    prepare(&store, val, &["part.parquet"]);
                    prepare(&store, "plans/p", &[]);
                }
                let mine = format!("{place}/{name}");
                store.write(&mine, Bytes::from_static(b"mine")).unwrap();
                let swept = sweep_all(&store);
                assert!(store.exists(&mine).unwrap(), "{mine}");
                let named = swept.skipped.iter().any(|skipped| skipped.path == place);
                assert!(named, "{mine} is reported: {swept:?}");
                assert!(!swept.stale.iter().any(|gone| gone.path == place), "{swept:?}");
                store.delete(&mine).unwrap();
                let skipped = sweep_all(&store).skipped;
                assert_eq!(skipped, [], "without it, nothing is left");
                assert_eq!(store.list("").unwrap(), []);
            }
        }
    }

    #[test]
    fn st_9_files_that_listings_hide_stay_and_are_reported() {
        let data = ["intermediate_train_data.0", "intermediate_val_data.0"];
        for (at, name, is_ours) in [
            (0, "draft#2", false),
            (1, "link", false),
            (1, "mine.parquet#7", false),
            (0, "pipe", false),
            (0, "part.parquet#31", true),
            (1, "_manifest.json#5", true),
            (0, "_statistics.json#6", true),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path().to_str().unwrap()).unwrap();
            data.iter().for_each(|path| prepare(&store, path, &["part.parquet"]));
            let path = folder.path().join(data[at]).join(name);
            match name {
                "link" => std::os::unix::fs::symlink("/not/mounted/data", &path).unwrap(),
                "pipe" => {
                    rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o644.into()).unwrap();
                }
                _ => std::fs::write(&path, "text").unwrap(),
            }
            let swept = sweep_all(&store);
            assert_eq!(std::fs::symlink_metadata(&path).is_err(), is_ours, "{name}: {swept:?}");
            assert_eq!(swept.skipped.is_empty(), is_ours, "{name}: {swept:?}");
        }
    }

    #[test]
    fn the_remains_of_a_killed_preparation_and_of_a_killed_sweep_are_deleted() {
        let (train, val) = ("intermediate_train_data.0", "intermediate_val_data.0");
        let store = Store::open("memory://killed").unwrap();
        let put = |path: String| store.write(&path, Bytes::from_static(b"{}")).unwrap();
        for name in ["_preparation.json", "_done-0.json", "part-00000-a.parquet"] {
            put(format!("{train}/{name}"));
        }
        put(format!("{val}/part-00000-a.parquet"));
        assert_eq!(sweep_all(&store).stale.len(), 2);
        assert_eq!(store.list("").unwrap(), []);
        // A sweep that is killed after any number of deletions, in any order of the names.
        let all = [
            format!("{val}/{MANIFEST_FILE}"),
            format!("{val}/part-00001-a.parquet"),
            format!("{train}/{MANIFEST_FILE}"),
            format!("{train}/part-00001-a.parquet"),
        ];
        for deleted in 0..=all.len() {
            for start in 0..all.len() {
                prepare(&store, train, &["part-00001-a.parquet"]);
                prepare(&store, val, &["part-00001-a.parquet"]);
                prepared_files::mark_deletion_in_progress(&store.open_child(train).unwrap())
                    .unwrap();
                for path in all.iter().cycle().skip(start).take(deleted) {
                    store.delete(path).unwrap();
                }
                assert_eq!(sweep_all(&store).skipped, []);
                assert_eq!(store.list("").unwrap(), []);
            }
        }
    }

    #[test]
    fn st_7_a_sweep_does_not_follow_links() {
        let (train, val) = ("intermediate_train_data.0", "intermediate_val_data.0");
        let outside = tempfile::tempdir().unwrap();
        let other = Store::open(outside.path().to_str().unwrap()).unwrap();
        for (linked, is_inside) in [(train, false), (val, false), (train, true), (val, true)] {
            let directory = tempfile::tempdir().unwrap();
            let store = Store::open(directory.path().to_str().unwrap()).unwrap();
            prepare(&store, train, &["part.parquet"]);
            prepare(&other, "", &["part.parquet"]);
            let link = directory.path().join(linked);
            if is_inside {
                prepare(&store, val, &["part.parquet"]);
                std::os::unix::fs::symlink(outside.path(), link.join("inner")).unwrap();
            } else {
                drop(std::fs::remove_dir_all(&link));
                std::os::unix::fs::symlink(outside.path(), &link).unwrap();
            }
            let swept = sweep_all(&store);
            assert!(swept.skipped.iter().any(|skipped| skipped.path == linked), "{swept:?}");
            assert_eq!(other.list("").unwrap().len(), 2, "nothing outside is deleted");
        }
    }
}

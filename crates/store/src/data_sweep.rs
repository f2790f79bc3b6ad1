// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Deletes unused prepared data.
//!
//! Only directories with the names that a preparation uses are considered,
//! `intermediate_*_data[.N]` below a store's prefix. A directory is deleted if its lease is free
//! and its newest file is old enough. If a store has too many bytes of prepared data, its oldest
//! directories are deleted, too. The training, validation and test data of one number are kept or
//! deleted together. Runs, checkpoints and other files are never deleted.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::lease;
use crate::store::Store;

/// Name of the training data of a set; its number follows.
const TRAIN_DATA_PREFIX: &str = "intermediate_train_data";

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

/// Returns the number suffix of a name like `intermediate_train_data.3`, here `.3`; empty without a
/// number; `None` for other names.
fn prepared_data_number(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("intermediate_")?;
    let (role, number) = rest.split_once("_data")?;
    let known = matches!(role, "train" | "val" | "test");
    let numbered = number.is_empty()
        || number.strip_prefix('.').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (known && numbered).then_some(number)
}

/// Training, validation and test data with the same number.
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

/// Returns unused prepared data below `store` that is outside of `limits`.
///
/// # Errors
/// A backend that does not answer.
pub fn find_stale_data(
    store: &Store,
    limits: SweepLimits,
    now: SystemTime,
) -> Result<Vec<SweptDirectory>> {
    let old = |newest: SystemTime| {
        let age = now.duration_since(newest).ok();
        age.zip(limits.older_than).is_some_and(|(age, least)| age >= least)
    };
    let sets = list_prepared_sets(store, now)?;
    let mut left: u64 = sets.iter().map(PreparedDataSet::total_bytes).sum();
    let mut found = Vec::new();
    // The oldest sets come first, so data that is too old is deleted before data that is too large.
    for set in sets.into_iter().filter(|set| set.free) {
        if old(set.newest) || limits.max_size.is_some_and(|most| left > most) {
            left = left.saturating_sub(set.total_bytes());
            found.extend(set.parts);
        }
    }
    // Manifests have no lease and almost no size, so only their age counts.
    for item in store
        .list_directory(PLANS_DIRECTORY)?
        .into_iter()
        .filter(|item| item.is_directory && limits.older_than.is_some())
    {
        let (plan, newest) =
            measure_directory(store, format!("{PLANS_DIRECTORY}/{}", item.name), now)?;
        if old(newest.unwrap_or(SystemTime::UNIX_EPOCH)) {
            found.push(plan);
        }
    }
    Ok(found)
}

/// Returns all prepared data below `store`, the oldest first.
fn list_prepared_sets(store: &Store, now: SystemTime) -> Result<Vec<PreparedDataSet>> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in store.list_directory("")?.into_iter().filter(|item| item.is_directory) {
        if let Some(number) = prepared_data_number(&item.name) {
            names.entry(number.to_owned()).or_default().push(item.name.clone());
        }
    }
    let mut sets = Vec::new();
    for names in names.into_values() {
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
    Ok(sets)
}

/// Returns a directory, and the time of the last write to any of its files; `None` without files.
fn measure_directory(
    store: &Store,
    path: String,
    now: SystemTime,
) -> Result<(SweptDirectory, Option<SystemTime>)> {
    let (mut files, mut bytes, mut newest) = (0, 0, None);
    for entry in store.list(&path)? {
        newest = newest.max(Some(entry.modified.unwrap_or(now)));
        files += 1;
        bytes += entry.bytes;
    }
    Ok((SweptDirectory { path, files, bytes }, newest))
}

/// Deletes the directories of [`find_stale_data`] and returns them.
///
/// # Errors
/// A backend that does not answer or does not delete. Directories that were deleted before the
/// error stay deleted.
pub fn sweep_stale_data(
    store: &Store,
    limits: SweepLimits,
    now: SystemTime,
) -> Result<Vec<SweptDirectory>> {
    delete_unused(store, find_stale_data(store, limits, now)?, now)
}

fn delete_unused(
    store: &Store,
    found: Vec<SweptDirectory>,
    now: SystemTime,
) -> Result<Vec<SweptDirectory>> {
    let mut sets: BTreeMap<Option<String>, Vec<SweptDirectory>> = BTreeMap::new();
    for one in found {
        sets.entry(prepared_data_number(&one.path).map(str::to_owned)).or_default().push(one);
    }
    let mut gone = Vec::new();
    for (number, set) in sets {
        // Another process may have begun to use the set since it was found, so the deletion first
        // acquires the lease, like a writer. The lease is in the directory of training data, which
        // is deleted last. It protects the whole set even if there was no training data.
        let train = number
            .map(|number| store.open_child(&format!("{TRAIN_DATA_PREFIX}{number}")))
            .transpose()?;
        let lease = match &train {
            Some(train) => match lease::acquire_lease(train, now, None, None)? {
                Some(lease) => Some((train, lease)),
                None => continue,
            },
            None => None,
        };
        for one in &set {
            if lease.is_none() || !one.path.starts_with(TRAIN_DATA_PREFIX) {
                store.delete_all(&one.path)?;
            }
        }
        if let Some((train, lease)) = lease {
            lease::clear_directory(train, &lease)?;
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
            let file = format!("{path}/file");
            store.write(&file, Bytes::from_static(&[0; 100])).unwrap();
            let written =
                std::fs::File::options().write(true).open(directory.path().join(file)).unwrap();
            written.set_modified(now - Duration::from_secs(days * 86_400)).unwrap();
        }
        let used = store.open_child("intermediate_train_data.1").unwrap();
        let mark = lease::mark_in_use(&used, now, None).unwrap().unwrap();
        let total: u64 =
            list_prepared_sets(&store, now).unwrap().iter().map(PreparedDataSet::total_bytes).sum();
        let lease = total - 500;
        let most = |bytes: u64| SweepLimits { older_than: None, max_size: Some(bytes + lease) };
        assert_eq!(find_stale_data(&store, most(500), now).unwrap(), [], "as large as it may be");
        let second = ["intermediate_train_data.2", "intermediate_val_data.2"];
        for bytes in [499, 300] {
            assert_eq!(
                names(&find_stale_data(&store, most(bytes), now).unwrap()),
                second,
                "the oldest is in use"
            );
        }
        let both =
            SweepLimits { older_than: Some(Duration::from_secs(5 * 86_400 / 2)), ..most(299) };
        let expected = [second[0], second[1], "intermediate_train_data.3", "plans/p"];
        assert_eq!(
            names(&find_stale_data(&store, both, now).unwrap()),
            expected,
            "old data counts as gone"
        );
        assert_eq!(
            names(&sweep_stale_data(&store, most(0), now).unwrap()).len(),
            4,
            "data in use stays"
        );
        let left: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, ["intermediate_train_data.1", "plans", "runs"]);
        used.delete(&mark).unwrap();
        assert_eq!(find_stale_data(&store, SweepLimits::default(), now).unwrap(), [], "no limit");
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
                    let files = [format!("{train}/{round}.parquet"), format!("{val}/{round}")];
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
            store.write(&format!("{path}/part.parquet"), Bytes::from_static(b"1")).unwrap();
        }
        let later = SystemTime::now() + Duration::from_secs(3600);
        let looked = find_stale_data(&store, older(60), later).unwrap();
        assert_eq!(looked.len(), 2);
        let train = store.open_child(set[0]).unwrap();
        let used = lease::mark_in_use(&train, later, None).unwrap().unwrap();
        assert_eq!(delete_unused(&store, looked.clone(), later).unwrap(), []);
        assert!(set.iter().all(|path| store.exists(&format!("{path}/part.parquet")).unwrap()));
        train.delete(&used).unwrap();
        assert_eq!(delete_unused(&store, looked, later).unwrap().len(), 2);
        assert!(!set.iter().any(|path| store.exists(path).unwrap()));
    }

    #[test]
    fn only_old_and_unused_prepared_data_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let put = |path: &str, text: &str| store.write(path, Bytes::from(text.to_owned())).unwrap();
        put("intermediate_train_data.0/part.parquet", "12345");
        put("intermediate_val_data.0/part.parquet", "1");
        put("intermediate_train_data.1/part.parquet", "123");
        let now = SystemTime::now();
        assert!(
            lease::mark_in_use(&store.open_child("intermediate_train_data.1").unwrap(), now, None)
                .unwrap()
                .is_some()
        );
        put("intermediate_train_dataset/mine.parquet", "x");
        put("runs/r/checkpoint", "x");
        put("plans/p/_manifest.json", "{}");
        assert_eq!(sweep_stale_data(&store, older(60), now).unwrap(), [], "too young");
        let later = now + Duration::from_secs(3600);
        assert_eq!(find_stale_data(&store, older(60), later).unwrap().len(), 3);
        let swept = sweep_stale_data(&store, older(60), later).unwrap();
        let all: Vec<_> =
            swept.iter().map(|one| (one.path.as_str(), one.files, one.bytes)).collect();
        let expected = [
            ("intermediate_train_data.0", 1, 5),
            ("intermediate_val_data.0", 1, 1),
            ("plans/p", 1, 2),
        ];
        assert_eq!(all, expected);
        let left: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(
            left,
            ["intermediate_train_data.1", "intermediate_train_dataset", "plans", "runs"]
        );
    }
}

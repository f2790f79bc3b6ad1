// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The deletion of unused prepared data.
//!
//! Only directories that a preparation has named are looked at, `intermediate_*_data[.N]` below a
//! store's prefix. A directory is deleted if its lease is free and its newest file is old enough,
//! or if it is among the oldest of a store that has too many bytes of prepared data; the training
//! data of a set decides for all three of its directories. Runs, checkpoints and files of others
//! are never touched.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::lease;
use crate::store::Store;

/// Training data of a set; its number follows.
const TRAIN: &str = "intermediate_train_data";

/// Manifests of data that stays where others put it: small, and made again when they are asked for.
const PLANS: &str = "plans";

/// The prepared data that goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Data whose newest file is at least as old as this.
    pub older_than: Option<Duration>,
    /// The oldest data, until prepared data takes no more bytes than this. Data in use counts, and
    /// stays.
    pub max_size: Option<u64>,
}

/// A directory of prepared data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swept {
    /// Below the store.
    pub path: String,
    /// Its files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Role and number of `intermediate_train_data.3`; no number is as good as one.
fn parse(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("intermediate_")?;
    let (role, number) = rest.split_once("_data")?;
    let known = matches!(role, "train" | "val" | "test");
    let numbered = number.is_empty()
        || number.strip_prefix('.').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (known && numbered).then_some(number)
}

/// Training, validation and test data of one number.
struct Set {
    parts: Vec<Swept>,
    free: bool,
    newest: SystemTime,
}

impl Set {
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// Unused prepared data below `store` that is past `limits`.
///
/// # Errors
/// A backend that cannot be asked.
pub fn stale(store: &Store, limits: Limits, now: SystemTime) -> Result<Vec<Swept>> {
    let old = |newest: SystemTime| {
        let age = now.duration_since(newest).ok();
        age.zip(limits.older_than).is_some_and(|(age, least)| age >= least)
    };
    let sets = sets(store, now)?;
    let mut left: u64 = sets.iter().map(Set::bytes).sum();
    let mut found = Vec::new();
    // The oldest first: data that is too old goes before data that is too much.
    for set in sets.into_iter().filter(|set| set.free) {
        if old(set.newest) || limits.max_size.is_some_and(|most| left > most) {
            left = left.saturating_sub(set.bytes());
            found.extend(set.parts);
        }
    }
    // Plans have no lease and next to no size: they go by age alone.
    for item in store
        .look(PLANS)?
        .into_iter()
        .filter(|item| item.is_directory && limits.older_than.is_some())
    {
        let (plan, newest) = measure(store, format!("{PLANS}/{}", item.name), now)?;
        if old(newest.unwrap_or(SystemTime::UNIX_EPOCH)) {
            found.push(plan);
        }
    }
    Ok(found)
}

/// All prepared data below `store`, the oldest first.
fn sets(store: &Store, now: SystemTime) -> Result<Vec<Set>> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in store.look("")?.into_iter().filter(|item| item.is_directory) {
        if let Some(number) = parse(&item.name) {
            names.entry(number.to_owned()).or_default().push(item.name.clone());
        }
    }
    let mut sets = Vec::new();
    for names in names.into_values() {
        let mut set = Set { parts: Vec::new(), free: true, newest: SystemTime::UNIX_EPOCH };
        for path in names {
            set.free &= lease::is_free(&store.child(&path)?, now)?;
            let (part, newest) = measure(store, path, now)?;
            set.newest = set.newest.max(newest.unwrap_or(SystemTime::UNIX_EPOCH));
            set.parts.push(part);
        }
        sets.push(set);
    }
    sets.sort_by_key(|set| set.newest);
    Ok(sets)
}

/// A directory, and when the newest of its files was written; `None` without files.
fn measure(store: &Store, path: String, now: SystemTime) -> Result<(Swept, Option<SystemTime>)> {
    let (mut files, mut bytes, mut newest) = (0, 0, None);
    for entry in store.list(&path)? {
        newest = newest.max(Some(entry.modified.unwrap_or(now)));
        files += 1;
        bytes += entry.bytes;
    }
    Ok((Swept { path, files, bytes }, newest))
}

/// Deletes [`stale`] directories, and returns them.
///
/// # Errors
/// A backend that cannot be asked or does not delete; directories deleted by then stay deleted.
pub fn sweep(store: &Store, limits: Limits, now: SystemTime) -> Result<Vec<Swept>> {
    delete(store, stale(store, limits, now)?, now)
}

fn delete(store: &Store, found: Vec<Swept>, now: SystemTime) -> Result<Vec<Swept>> {
    let mut sets: BTreeMap<Option<String>, Vec<Swept>> = BTreeMap::new();
    for one in found {
        sets.entry(parse(&one.path).map(str::to_owned)).or_default().push(one);
    }
    let mut gone = Vec::new();
    for (number, set) in sets {
        // Since the look, another process may have begun to use it: deletion takes the lease first,
        // as a writer does. The lease is in the training data, which goes last; it counts for the
        // set even if there was no training data.
        let train = number.map(|number| store.child(&format!("{TRAIN}{number}"))).transpose()?;
        let lease = match &train {
            Some(train) => match lease::take(train, now, None, None)? {
                Some(lease) => Some((train, lease)),
                None => continue,
            },
            None => None,
        };
        for one in &set {
            if lease.is_none() || !one.path.starts_with(TRAIN) {
                store.delete_all(&one.path)?;
            }
        }
        if let Some((train, lease)) = lease {
            lease::clear(train, &lease)?;
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
    fn older(seconds: u64) -> Limits {
        Limits { older_than: Some(Duration::from_secs(seconds)), max_size: None }
    }

    fn names(swept: &[Swept]) -> Vec<&str> {
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
        let used = store.child("intermediate_train_data.1").unwrap();
        let mark = lease::share(&used, now, None).unwrap().unwrap();
        let total: u64 = sets(&store, now).unwrap().iter().map(Set::bytes).sum();
        let lease = total - 500;
        let most = |bytes: u64| Limits { older_than: None, max_size: Some(bytes + lease) };
        assert_eq!(stale(&store, most(500), now).unwrap(), [], "as large as it may be");
        let second = ["intermediate_train_data.2", "intermediate_val_data.2"];
        for bytes in [499, 300] {
            assert_eq!(
                names(&stale(&store, most(bytes), now).unwrap()),
                second,
                "the oldest is in use"
            );
        }
        let both = Limits { older_than: Some(Duration::from_secs(5 * 86_400 / 2)), ..most(299) };
        let expected = [second[0], second[1], "intermediate_train_data.3", "plans/p"];
        assert_eq!(names(&stale(&store, both, now).unwrap()), expected, "old data counts as gone");
        assert_eq!(names(&sweep(&store, most(0), now).unwrap()).len(), 4, "data in use stays");
        let left: Vec<String> = store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, ["intermediate_train_data.1", "plans", "runs"]);
        used.delete(&mark).unwrap();
        assert_eq!(stale(&store, Limits::default(), now).unwrap(), [], "no limit");
    }

    #[test]
    fn data_that_is_prepared_while_others_are_deleted_stays_whole() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let (train, val) = ("intermediate_train_data.0", "intermediate_val_data.0");
        let all = Limits { older_than: Some(Duration::ZERO), max_size: Some(0) };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        sweep(&store, all, SystemTime::now()).unwrap();
                    }
                });
            }
            let writer = scope.spawn(|| {
                let child = store.child(train).unwrap();
                let mut round = 0;
                while round < 1000 {
                    let now = SystemTime::now();
                    let Some(lease) = lease::take(&child, now, None, None).unwrap() else {
                        continue;
                    };
                    round += 1;
                    let files = [format!("{train}/{round}.parquet"), format!("{val}/{round}")];
                    for file in &files {
                        assert!(store.create(file, Bytes::from_static(b"1")).unwrap());
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
        let looked = stale(&store, older(60), later).unwrap();
        assert_eq!(looked.len(), 2);
        let train = store.child(set[0]).unwrap();
        let used = lease::share(&train, later, None).unwrap().unwrap();
        assert_eq!(delete(&store, looked.clone(), later).unwrap(), []);
        assert!(set.iter().all(|path| store.exists(&format!("{path}/part.parquet")).unwrap()));
        train.delete(&used).unwrap();
        assert_eq!(delete(&store, looked, later).unwrap().len(), 2);
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
            lease::share(&store.child("intermediate_train_data.1").unwrap(), now, None)
                .unwrap()
                .is_some()
        );
        put("intermediate_train_dataset/mine.parquet", "x");
        put("runs/r/checkpoint", "x");
        put("plans/p/_manifest.json", "{}");
        assert_eq!(sweep(&store, older(60), now).unwrap(), [], "too young");
        let later = now + Duration::from_secs(3600);
        assert_eq!(stale(&store, older(60), later).unwrap().len(), 3);
        let swept = sweep(&store, older(60), later).unwrap();
        let all: Vec<_> =
            swept.iter().map(|one| (one.path.as_str(), one.files, one.bytes)).collect();
        let expected = [
            ("intermediate_train_data.0", 1, 5),
            ("intermediate_val_data.0", 1, 1),
            ("plans/p", 1, 2),
        ];
        assert_eq!(all, expected);
        let left: Vec<String> = store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(
            left,
            ["intermediate_train_data.1", "intermediate_train_dataset", "plans", "runs"]
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The deletion of unused prepared data.
//!
//! Only directories that a preparation has named are looked at, `intermediate_*_data[.N]` below a store's prefix. A
//! directory is deleted if its newest file is old enough and its lease is free; the training data of a set decides
//! for all three of its directories. Runs, checkpoints and files of others are never touched.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::lease;
use crate::store::Store;

/// Manifests of data that stays where others put it: small, and made again when they are asked for.
const PLANS: &str = "plans";

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
    let numbered =
        number.is_empty() || number.strip_prefix('.').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (known && numbered).then_some(number)
}

/// Unused prepared data below `store` whose newest file is older than `older_than`.
///
/// # Errors
/// A backend that cannot be asked.
pub fn stale(store: &Store, older_than: Duration, now: SystemTime) -> Result<Vec<Swept>> {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in store.look("")?.into_iter().filter(|item| item.is_directory) {
        if let Some(number) = parse(&item.name) {
            sets.entry(number.to_owned()).or_default().push(item.name.clone());
        }
    }
    let mut found = Vec::new();
    for names in sets.into_values() {
        let mut set = Vec::new();
        let mut free = true;
        for path in names {
            free &= lease::is_free(&store.child(&path)?, now)?;
            let (mut files, mut bytes) = (0, 0);
            for entry in store.list(&path)? {
                let modified = store.stat(&entry.path)?.modified.unwrap_or(now);
                free &= now.duration_since(modified).is_ok_and(|age| age >= older_than);
                files += 1;
                bytes += entry.bytes;
            }
            set.push(Swept { path, files, bytes });
        }
        if free {
            found.append(&mut set);
        }
    }
    for item in store.look(PLANS)?.into_iter().filter(|item| item.is_directory) {
        let path = format!("{PLANS}/{}", item.name);
        let (mut files, mut bytes, mut old) = (0, 0, true);
        for entry in store.list(&path)? {
            let modified = store.stat(&entry.path)?.modified.unwrap_or(now);
            old &= now.duration_since(modified).is_ok_and(|age| age >= older_than);
            files += 1;
            bytes += entry.bytes;
        }
        if old {
            found.push(Swept { path, files, bytes });
        }
    }
    Ok(found)
}

/// Deletes [`stale`] directories, and returns them.
///
/// # Errors
/// A backend that cannot be asked or does not delete; directories deleted by then stay deleted.
pub fn sweep(store: &Store, older_than: Duration, now: SystemTime) -> Result<Vec<Swept>> {
    delete(store, stale(store, older_than, now)?, now)
}

fn delete(store: &Store, found: Vec<Swept>, now: SystemTime) -> Result<Vec<Swept>> {
    let mut sets: BTreeMap<Option<String>, Vec<Swept>> = BTreeMap::new();
    for one in found {
        sets.entry(parse(&one.path).map(str::to_owned)).or_default().push(one);
    }
    let mut gone = Vec::new();
    for mut set in sets.into_values() {
        // Since the look, another process may have begun to use it: deletion takes the lease first, as a writer does.
        // The lease is in the training data, which goes last.
        set.sort_by_key(|one| is_train(&one.path));
        if let Some(train) = set.last().filter(|one| is_train(&one.path))
            && lease::take(&store.child(&train.path)?, now, None, None)?.is_none()
        {
            continue;
        }
        for one in set {
            store.delete_all(&one.path)?;
            gone.push(one);
        }
    }
    gone.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(gone)
}

fn is_train(path: &str) -> bool {
    path.starts_with("intermediate_train_data")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_set_that_is_used_after_the_look_stays() {
        let store = Store::open("memory://sweep-race/d").unwrap();
        let set = ["intermediate_train_data.0", "intermediate_val_data.0"];
        for path in set {
            store.write(&format!("{path}/part.parquet"), Bytes::from_static(b"1")).unwrap();
        }
        let later = SystemTime::now() + Duration::from_secs(3600);
        let looked = stale(&store, Duration::from_secs(60), later).unwrap();
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
            lease::share(&store.child("intermediate_train_data.1").unwrap(), now, None).unwrap().is_some()
        );
        put("intermediate_train_dataset/mine.parquet", "x");
        put("runs/r/checkpoint", "x");
        put("plans/p/_manifest.json", "{}");
        assert_eq!(sweep(&store, Duration::from_secs(60), now).unwrap(), [], "too young");
        let later = now + Duration::from_secs(3600);
        assert_eq!(stale(&store, Duration::from_secs(60), later).unwrap().len(), 3);
        let swept = sweep(&store, Duration::from_secs(60), later).unwrap();
        let all: Vec<_> = swept.iter().map(|one| (one.path.as_str(), one.files, one.bytes)).collect();
        let expected =
            [("intermediate_train_data.0", 1, 5), ("intermediate_val_data.0", 1, 1), ("plans/p", 1, 2)];
        assert_eq!(all, expected);
        let left: Vec<String> = store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, ["intermediate_train_data.1", "intermediate_train_dataset", "plans", "runs"]);
    }
}

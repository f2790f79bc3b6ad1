// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prepared data that nobody needs any more.
//!
//! Only directories that a preparation has named are looked at, `intermediate_*_data[.N]` below a store's prefix. One
//! goes when its newest file is old enough and nobody holds its lease; a set's training data says so for all three of
//! its directories. Runs, checkpoints and files of others are never touched.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::lease;
use crate::store::Store;

/// Manifests of data that stays where others put it: small, and made anew when they are asked for.
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

/// Prepared data below `store` whose newest file is older than `older_than` and which nobody uses.
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

/// Deletes what is [`stale`]; says what went.
///
/// # Errors
/// A backend that cannot be asked or does not delete; what is gone by then stays gone.
pub fn sweep(store: &Store, older_than: Duration, now: SystemTime) -> Result<Vec<Swept>> {
    let found = stale(store, older_than, now)?;
    for one in &found {
        store.delete_all(&one.path)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn only_old_prepared_data_that_nobody_holds_goes() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let put = |path: &str, text: &str| store.write(path, Bytes::from(text.to_owned())).unwrap();
        put("intermediate_train_data.0/part.parquet", "12345");
        put("intermediate_val_data.0/part.parquet", "1");
        put("intermediate_train_data.1/part.parquet", "123");
        let now = SystemTime::now();
        assert!(lease::share(&store.child("intermediate_train_data.1").unwrap(), now).unwrap().is_some());
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

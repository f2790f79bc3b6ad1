// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prepared data that nobody needs any more.
//!
//! Only directories that a preparation has named are looked at, `intermediate_*_data[.N]` below a store's prefix. One
//! goes when its newest file is old enough and nobody holds its lease; a set's training data says so for all three of
//! its directories. Runs, checkpoints and files of others are never touched.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::store::Store;

/// The file by which a process says that it uses a directory.
const LEASE: &str = "_lease.json";
/// A lease of another host counts for a week: whether its process lives cannot be seen.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Deserialize)]
struct Lease {
    host: String,
    pid: u32,
    /// Seconds since the epoch.
    time: f64,
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
    let numbered =
        number.is_empty() || number.strip_prefix('.').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (known && numbered).then_some(number)
}

/// Deletes prepared data below `store` whose newest file is older than `older_than` and which nobody uses; says what
/// went.
///
/// # Errors
/// A backend that cannot be asked or does not delete; what is gone by then stays gone.
pub fn sweep(store: &Store, older_than: Duration, now: SystemTime) -> Result<Vec<Swept>> {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in store.look("")?.into_iter().filter(|item| item.is_directory) {
        if let Some(number) = parse(&item.name) {
            sets.entry(number.to_owned()).or_default().push(item.name.clone());
        }
    }
    let mut swept = Vec::new();
    for names in sets.into_values() {
        let mut all = Vec::new();
        let mut free = true;
        for name in &names {
            free &= is_free(store, name, now)?;
            for entry in store.list(name)? {
                let modified = store.stat(&entry.path)?.modified.unwrap_or(now);
                free &= now.duration_since(modified).is_ok_and(|age| age >= older_than);
                all.push((name.clone(), entry.bytes));
            }
        }
        if !free {
            continue;
        }
        for name in names {
            let bytes = all.iter().filter(|(owner, _)| *owner == name).map(|(_, bytes)| bytes);
            let bytes: u64 = bytes.sum();
            swept.push(Swept { files: store.delete_all(&name)?, path: name, bytes });
        }
    }
    Ok(swept)
}

fn is_free(store: &Store, name: &str, now: SystemTime) -> Result<bool> {
    let text = match store.read(&format!("{name}/{LEASE}")) {
        Ok(text) => text,
        Err(Error::Missing { .. }) => return Ok(true),
        Err(error) => return Err(error),
    };
    let Ok(lease) = serde_json::from_slice::<Lease>(&text) else { return Ok(true) };
    let here = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if lease.host == here.trim() {
        return Ok(!std::path::Path::new(&format!("/proc/{}", lease.pid)).exists());
    }
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    Ok(since - lease.time > LONGEST.as_secs_f64())
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
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let lease = format!(r#"{{"host": "{}", "pid": {}, "time": 0.0}}"#, host.trim(), std::process::id());
        put("intermediate_train_data.1/_lease.json", &lease);
        put("intermediate_train_dataset/mine.parquet", "x");
        put("runs/r/checkpoint", "x");
        let now = SystemTime::now();
        assert_eq!(sweep(&store, Duration::from_secs(60), now).unwrap(), [], "too young");
        let later = now + Duration::from_secs(3600);
        let swept = sweep(&store, Duration::from_secs(60), later).unwrap();
        let all: Vec<_> = swept.iter().map(|one| (one.path.as_str(), one.files, one.bytes)).collect();
        assert_eq!(all, [("intermediate_train_data.0", 1, 5), ("intermediate_val_data.0", 1, 1)]);
        let left: Vec<String> = store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, ["intermediate_train_data.1", "intermediate_train_dataset", "runs"]);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Leases and use marks: they record which processes use a directory of prepared data.
//!
//! A mark is a small file in the directory that names a process: `_lease-<name>.json` for the only
//! writer, `_use-<name>.json` for each of any number of readers. A mark is valid while its process
//! lives. A process on another host or in another container cannot be observed, so its mark is
//! valid for a week, or for the lifetime that the mark states.
//!
//! ```text
//! acquire_lease:   no valid lease -> create a lease -> if a use mark or an earlier lease is valid,
//!                  delete our lease; wait until later leases are deleted
//! mark_in_use:     create a use mark -> if there is a valid lease, delete our use mark
//! downgrade_lease: create a use mark -> delete our lease
//! clear_directory: mark the deletion -> delete the manifest -> other files -> the mark -> our lease
//!                  -> the directory, if empty
//! ```
//!
//! A writer and a reader first create their own mark and then look for other marks. So if both
//! start at the same time, at least one sees the other.
//!
//! Two writers may both find no lease and both create one. Then the writer whose mark has the
//! greater name deletes its lease, and the other waits for that. If the later lease stays for 5 s,
//! its owner checked before our lease existed, and owns the directory although its clock is ahead;
//! we then delete our lease.
//!
//! Names are never reused, so deleting an invalid mark never deletes a new one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::mark_names::{EMPTY_MARK_LIFETIME, LEASE_PREFIX, USE_PREFIX, is_mark};
use crate::prepared_files::{self, MANIFEST_FILE, PREPARATION_FILE};
use crate::store::{DirectoryItem, Store};

/// Time for which the mark of a process is valid if the process cannot be observed.
const UNSEEN_HOLDER_LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// Longest time until a process deletes its lease after it has seen an earlier one.
const LEASE_RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between checks for such a lease.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Counter that makes the names of a process's marks unique.
static MARK_COUNTER: AtomicU64 = AtomicU64::new(0);

/// The process that created a mark.
#[derive(Debug, Serialize, Deserialize)]
struct MarkHolder {
    host: String,
    /// Boot id of the kernel, which distinguishes hosts with equal names.
    #[serde(default)]
    boot: Option<String>,
    pid: u32,
    /// Process namespace to which `pid` belongs.
    #[serde(default)]
    namespace: Option<String>,
    /// Start time of the process in kernel ticks, because process ids are reused.
    #[serde(default)]
    started: Option<u64>,
    /// Time of the last write of the mark, in seconds since the epoch.
    time: f64,
    /// Seconds after `time` for which the mark is valid if the process cannot be observed; a week
    /// if absent.
    #[serde(default)]
    lasts: Option<f64>,
    /// Job of the process, if other processes of the job may replace its lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<String>,
}

impl MarkHolder {
    fn of_this_process(now: SystemTime, lasts: Option<Duration>) -> Self {
        let pid = std::process::id();
        Self {
            host: host_name(),
            boot: boot_id(),
            pid,
            namespace: process_namespace(),
            started: process_start_time(pid),
            time: unix_seconds(now),
            lasts: lasts.map(|lasts| lasts.as_secs_f64()),
            job: None,
        }
    }

    /// Returns whether this is the current process.
    fn is_this_process(&self) -> bool {
        let me = Self::of_this_process(SystemTime::UNIX_EPOCH, None);
        (&self.boot, self.pid, &self.namespace, self.started)
            == (&me.boot, me.pid, &me.namespace, me.started)
    }

    /// Returns whether another process of `job` created the mark, so that a process of the same job
    /// may replace it.
    fn is_replaceable_by(&self, job: Option<&str>) -> bool {
        job.is_some() && self.job.as_deref() == job && !self.is_this_process()
    }

    fn is_alive(&self, now: SystemTime) -> bool {
        // Another boot id means another host, or an earlier boot of this host, whose processes are
        // gone. The two cases cannot be distinguished, because hosts may have equal names.
        let elsewhere = match (&self.boot, boot_id()) {
            (Some(theirs), Some(ours)) => *theirs != ours,
            _ => self.host != host_name(),
        };
        if elsewhere || (self.namespace.is_some() && self.namespace != process_namespace()) {
            return unix_seconds(now) - self.time
                <= self.lasts.unwrap_or(UNSEEN_HOLDER_LIFETIME.as_secs_f64());
        }
        match (process_start_time(self.pid), self.started) {
            (None, _) => false,
            (Some(found), Some(expected)) => found == expected,
            (Some(_), None) => true,
        }
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn process_namespace() -> Option<String> {
    Some(std::fs::read_link("/proc/self/ns/pid").ok()?.display().to_string())
}

/// Returns the start time of a process; `None` if it does not exist or is a zombie.
fn process_start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program name in parentheses may contain any character.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok()).flatten()
}

/// Returns whether the mark `item` is valid for a process of `job`.
fn is_mark_valid(
    store: &Store,
    item: &DirectoryItem,
    now: SystemTime,
    job: Option<&str>,
) -> Result<bool> {
    let text = match store.read(&item.name) {
        Ok(text) => text,
        Err(Error::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(match serde_json::from_slice::<MarkHolder>(&text) {
        Ok(holder) => holder.is_alive(now) && !holder.is_replaceable_by(job),
        // If the file is newer than our clock, the other clock is ahead; the mark is valid then.
        Err(_) => item.modified.is_some_and(|time| {
            now.duration_since(time).map_or(true, |age| age < EMPTY_MARK_LIFETIME)
        }),
    })
}

/// Returns marks of these kinds, and whether each is valid for a process of `job`.
fn list_marks(
    store: &Store,
    kinds: &[&str],
    now: SystemTime,
    job: Option<&str>,
) -> Result<Vec<(String, bool)>> {
    let items = match store.list_directory("") {
        Ok(items) => items,
        Err(Error::Missing { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let named =
        |name: &str| name.ends_with(".json") && kinds.iter().any(|kind| name.starts_with(kind));
    let ours = |item: &DirectoryItem| !item.is_directory && named(&item.name);
    items
        .into_iter()
        .filter(ours)
        .map(|item| Ok((item.name.clone(), is_mark_valid(store, &item, now, job)?)))
        .collect()
}

fn encode_holder(now: SystemTime, lasts: Option<Duration>, job: Option<&str>) -> Result<Bytes> {
    let text = serde_json::to_vec(&MarkHolder {
        job: job.map(str::to_owned),
        ..MarkHolder::of_this_process(now, lasts)
    });
    text.map(Bytes::from).map_err(|source| Error::Runtime { source: source.into() })
}

/// Acquires the directory for this process alone. Returns the name of the lease, or `None` if the
/// directory is in use.
///
/// If other hosts cannot observe this process, the lease is valid for `lasts` after it was last
/// renewed, or for a week. A process of a `job` may replace the lease of another process of the
/// same job, even of a living one.
///
/// # Errors
/// A backend that does not answer or does not write.
pub fn acquire_lease(
    store: &Store,
    now: SystemTime,
    lasts: Option<Duration>,
    job: Option<&str>,
) -> Result<Option<String>> {
    let found = list_marks(store, &[LEASE_PREFIX], now, job)?;
    if found.iter().any(|(_, lives)| *lives) {
        return Ok(None);
    }
    let name = unique_mark_name(LEASE_PREFIX, now);
    if !store.create_if_absent(&name, encode_holder(now, lasts, job)?)? {
        return Ok(None);
    }
    let ended = |other: &String| found.iter().any(|(dead, _)| dead == other);
    let deadline = Instant::now() + LEASE_RETURN_TIMEOUT;
    let others = loop {
        // Marks of the same job count here, too: the first check did not show this lease, so it is
        // about as old as ours.
        let others = list_marks(store, &[LEASE_PREFIX, USE_PREFIX], now, None)?;
        if !others.iter().any(|(other, _)| *other == name) {
            // The owner of the directory has deleted our lease.
            return Ok(None);
        }
        let living = others.iter().filter(|(other, lives)| *lives && !ended(other));
        let mut living = living.map(|(other, _)| other).filter(|other| **other != name).peekable();
        if living.peek().is_none() {
            break others;
        }
        let later = |other: &String| other.starts_with(LEASE_PREFIX) && *other > name;
        if !living.all(later) || Instant::now() >= deadline {
            store.delete(&name)?;
            return Ok(None);
        }
        std::thread::sleep(LEASE_POLL_INTERVAL);
    };
    for (dead, _) in found.iter().chain(others.iter().filter(|(_, lives)| !lives)) {
        store.delete(dead)?;
    }
    Ok(Some(name))
}

/// Returns a name that no other mark ever has. Later marks have greater names if clocks agree.
fn unique_mark_name(kind: &str, now: SystemTime) -> String {
    let count = MARK_COUNTER.fetch_add(1, Ordering::Relaxed);
    let nanoseconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{kind}{nanoseconds:x}-{}-{count}.json", std::process::id())
}

fn write_use_mark(store: &Store, now: SystemTime, lasts: Option<Duration>) -> Result<String> {
    let name = unique_mark_name(USE_PREFIX, now);
    store.write(&name, encode_holder(now, lasts, None)?)?;
    Ok(name)
}

/// Marks the directory as used, together with other readers. Returns the name of the mark, or
/// `None` if there is a valid lease.
///
/// # Errors
/// Like [`acquire_lease`].
pub fn mark_in_use(
    store: &Store,
    now: SystemTime,
    lasts: Option<Duration>,
) -> Result<Option<String>> {
    let name = write_use_mark(store, now, lasts)?;
    if list_marks(store, &[LEASE_PREFIX], now, None)?.iter().any(|(_, lives)| *lives) {
        store.delete(&name)?;
        return Ok(None);
    }
    Ok(Some(name))
}

/// Replaces this process's lease by a use mark.
///
/// # Errors
/// Like [`acquire_lease`].
pub fn downgrade_lease(store: &Store, lease: &str, now: SystemTime) -> Result<String> {
    let name = write_use_mark(store, now, None)?;
    store.delete(lease)?;
    Ok(name)
}

/// Deletes the content of the directory, for which this process has the lease, and then the lease;
/// returns the number of deleted files.
///
/// The manifest is deleted first, so that no reader finds a manifest without its files. After the
/// lease is deleted, another process may own the directory; new files of it are kept.
///
/// # Errors
/// A backend that does not answer or does not delete. Some files may be deleted by then.
pub fn clear_directory(store: &Store, lease: &str) -> Result<usize> {
    // If this process is killed, the mark shows that the remaining files may be deleted.
    prepared_files::mark_deletion(store)?;
    store.delete(MANIFEST_FILE)?;
    let (entries, links) = store.list_with_links("")?;
    let paths = entries.iter().map(|entry| entry.path.as_str()).chain(links.iter().map(|p| &**p));
    let files: Vec<&str> =
        paths.filter(|path| !is_mark(path) && *path != PREPARATION_FILE).collect();
    store.delete_files("", files.iter().copied())?;
    for item in store.list_directory("")?.into_iter().filter(|item| item.is_directory) {
        store.delete_all(&item.name)?;
    }
    store.remove_partial_uploads()?;
    store.delete(PREPARATION_FILE)?;
    store.delete(lease)?;
    store.remove_empty_directories()?;
    Ok(files.len())
}

/// Renews a mark of this process. Returns false if the mark is gone or belongs to another process.
///
/// # Errors
/// A backend that does not answer or does not write.
pub fn renew_mark(store: &Store, mark: &str, now: SystemTime) -> Result<bool> {
    let text = match store.read(mark) {
        Ok(text) => text,
        Err(Error::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    let Ok(found) = serde_json::from_slice::<MarkHolder>(&text) else { return Ok(false) };
    if !found.is_this_process() {
        return Ok(false);
    }
    store.write(
        mark,
        encode_holder(now, found.lasts.map(Duration::from_secs_f64), found.job.as_deref())?,
    )?;
    Ok(true)
}

/// Returns whether the directory is unused.
///
/// # Errors
/// A backend that does not answer.
pub fn is_free(store: &Store, now: SystemTime) -> Result<bool> {
    Ok(!list_marks(store, &[LEASE_PREFIX, USE_PREFIX], now, None)?.iter().any(|(_, lives)| *lives))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(name: &str) -> Store {
        Store::open(&format!("memory://lease-{name}/d")).unwrap()
    }

    fn left(store: &Store, name: &str, holder: &MarkHolder) {
        store.write(name, serde_json::to_vec(holder).unwrap().into()).unwrap();
    }

    #[test]
    fn one_takes_and_many_share_but_never_both() {
        let (store, now) = (store("both"), SystemTime::now());
        assert!(is_free(&store, now).unwrap());
        let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
        assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
        assert_eq!(mark_in_use(&store, now, None).unwrap(), None);
        let first = downgrade_lease(&store, &lease, now).unwrap();
        let second = mark_in_use(&store, now, None).unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
        assert!(!is_free(&store, now).unwrap());
        store.delete(&first).unwrap();
        assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
        store.delete(&second).unwrap();
        assert!(acquire_lease(&store, now, None, None).unwrap().is_some());
    }

    #[test]
    fn a_cleared_directory_keeps_what_another_process_has_there() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("d");
        let (store, now) = (Store::open(base.to_str().unwrap()).unwrap(), SystemTime::now());
        for file in ["part.parquet", MANIFEST_FILE, "x=1/part.parquet"] {
            store.write(file, Bytes::from_static(b"1")).unwrap();
        }
        let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
        let reader = write_use_mark(&store, now, None).unwrap();
        assert_eq!(clear_directory(&store, &lease).unwrap(), 2, "the manifest is not counted");
        let left: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, [reader.as_str()]);
        store.delete(&reader).unwrap();
        let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
        assert_eq!(clear_directory(&store, &lease).unwrap(), 0);
        assert!(!base.exists());
    }

    #[test]
    fn of_many_at_once_one_takes() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let now = SystemTime::now();
        let dead = MarkHolder { pid: u32::MAX, ..MarkHolder::of_this_process(now, None) };
        for _ in 0..200 {
            left(&store, "_lease-7.json", &dead);
            let taken: Vec<String> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| acquire_lease(&store, now, None, None).unwrap()))
                    .collect();
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(taken.len(), 1, "{taken:?}");
            store.delete_all("").unwrap();
        }
    }

    #[test]
    fn the_dead_do_not_count_and_the_unseen_do_for_a_week() {
        let (store, now) = (store("dead"), SystemTime::now());
        let me = MarkHolder::of_this_process(now, None);
        left(
            &store,
            "_lease-3.json",
            &MarkHolder { pid: u32::MAX, ..MarkHolder::of_this_process(now, None) },
        );
        left(
            &store,
            "_use-x.json",
            &MarkHolder {
                started: me.started.map(|ticks| ticks + 1),
                ..MarkHolder::of_this_process(now, None)
            },
        );
        assert!(is_free(&store, now).unwrap());
        let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
        let names: Vec<String> =
            store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(names, [lease.as_str()], "what the dead left goes");
        store.delete(&lease).unwrap();

        for unseen in [
            MarkHolder {
                host: "elsewhere".to_owned(),
                boot: None,
                ..MarkHolder::of_this_process(now, None)
            },
            // A host with the same name; no process here has that number.
            MarkHolder {
                boot: Some("another".to_owned()),
                pid: u32::MAX,
                ..MarkHolder::of_this_process(now, None)
            },
            MarkHolder {
                namespace: Some("pid:[1]".to_owned()),
                pid: u32::MAX,
                ..MarkHolder::of_this_process(now, None)
            },
        ] {
            left(&store, "_use-y.json", &unseen);
            assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
            assert!(is_free(&store, now + UNSEEN_HOLDER_LIFETIME + EMPTY_MARK_LIFETIME).unwrap());
        }
    }

    #[test]
    fn a_mark_that_says_nothing_counts_while_it_may_be_written() {
        let (store, now) = (store("half"), SystemTime::now());
        store.write("_lease-1.json", Bytes::new()).unwrap();
        assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
        assert!(
            acquire_lease(&store, now + EMPTY_MARK_LIFETIME * 2, None, None).unwrap().is_some()
        );
    }

    #[test]
    fn a_renewal_extends_a_lease_and_recreates_no_deleted_one() {
        let (store, now) = (store("renewed"), SystemTime::now());
        let lasts = Duration::from_secs(600);
        let lease = acquire_lease(&store, now, Some(lasts), None).unwrap().unwrap();
        let later = now + UNSEEN_HOLDER_LIFETIME;
        assert!(renew_mark(&store, &lease, later).unwrap());
        let held: MarkHolder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
        assert_eq!((held.time, held.lasts), (unix_seconds(later), Some(600.0)));
        let unseen = MarkHolder { boot: Some("another".to_owned()), ..held };
        assert!(unseen.is_alive(later + lasts));
        assert!(!unseen.is_alive(later + lasts + Duration::from_secs(1)));
        left(&store, &lease, &unseen);
        assert!(!renew_mark(&store, &lease, later).unwrap(), "another has taken it");
        store.delete(&lease).unwrap();
        assert!(!renew_mark(&store, &lease, later).unwrap());
        assert!(is_free(&store, later).unwrap());
    }

    #[test]
    fn a_process_takes_the_lease_of_another_process_of_its_job_and_of_no_other() {
        let (store, now) = (store("job"), SystemTime::now());
        let lasts = Some(Duration::from_secs(600));
        let elsewhere = |job: &str| MarkHolder {
            boot: Some("another".to_owned()),
            job: Some(job.to_owned()),
            ..MarkHolder::of_this_process(now, lasts)
        };
        left(&store, "_lease-1.json", &elsewhere("mine"));
        for other in [None, Some("another's")] {
            assert_eq!(acquire_lease(&store, now, lasts, other).unwrap(), None);
        }
        let lease = acquire_lease(&store, now, lasts, Some("mine")).unwrap().unwrap();
        assert!(!store.exists("_lease-1.json").unwrap(), "whoever had it learns that it is gone");
        assert_eq!(
            acquire_lease(&store, now, lasts, Some("mine")).unwrap(),
            None,
            "this process has it"
        );
        assert!(renew_mark(&store, &lease, now).unwrap());
        let held: MarkHolder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
        assert_eq!(held.job.as_deref(), Some("mine"), "a renewal keeps the job");
        left(&store, &lease, &elsewhere("mine"));
        assert_eq!(mark_in_use(&store, now, None).unwrap(), None);
        assert!(!is_free(&store, now).unwrap());
    }
}

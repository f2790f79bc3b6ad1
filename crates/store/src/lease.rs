// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The users of a directory of prepared data.
//!
//! Small files in the directory itself say so, each naming a process: `_lease-<name>.json` for the
//! one that writes, `_use-<name>.json` for any number that read. A file counts as long as its
//! process lives; what cannot be seen from here (another host, another container) counts for a
//! week.
//!
//! ```text
//! take:   no lease lives -> create a lease -> no use and no earlier lease lives, else give it back;
//!         wait for later ones, which are given back
//! share:  create a use -> no lease lives, else take it back
//! settle: create a use -> delete the own lease
//! clear:  delete the manifest -> the other files -> the own lease -> the directory if it is empty
//! ```
//!
//! A writer and a reader each leave their mark first and then look for the other's, so that of two
//! at the same time one sees the other. Two writers may both see no lease and create one. Then the
//! one with the greater name gives it back, and the other waits until it has. If it stays, its
//! process had looked before the other lease was there and has the directory, although its clock is
//! ahead: the other process gives its own back after a while. No name is used twice, so whoever
//! deletes a mark that has ended deletes no new one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::mark::{LEASE, USE, WRITING, is_mark};
use crate::store::{Item, Store};

/// The file without which a directory has no complete data.
const MANIFEST: &str = "_manifest.json";

/// Time for which a process counts that cannot be seen.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// Time in which a process gives back a lease after it has seen an earlier one.
const GIVEN_BACK: Duration = Duration::from_secs(5);

/// Time between two looks for it.
const LOOK: Duration = Duration::from_millis(10);

/// Tells the uses of one process apart.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The process that left a file.
#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    host: String,
    /// The kernel's, one for each start of it: hosts with equal names differ in it.
    #[serde(default)]
    boot: Option<String>,
    pid: u32,
    /// The process namespace, in which the number counts.
    #[serde(default)]
    namespace: Option<String>,
    /// Start time, in the kernel's ticks: process ids are used again.
    #[serde(default)]
    started: Option<u64>,
    /// Seconds since the epoch.
    time: f64,
    /// Seconds after that in which the process says again that it lives, where that is not a week.
    #[serde(default)]
    lasts: Option<f64>,
    /// The job of the process, if another process of the job may take its lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<String>,
}

impl Holder {
    fn here(now: SystemTime, lasts: Option<Duration>) -> Self {
        let pid = std::process::id();
        Self {
            host: host(),
            boot: boot(),
            pid,
            namespace: namespace(),
            started: started(pid),
            time: seconds(now),
            lasts: lasts.map(|lasts| lasts.as_secs_f64()),
            job: None,
        }
    }

    /// Returns whether this is the present process.
    fn is_this_process(&self) -> bool {
        let me = Self::here(SystemTime::UNIX_EPOCH, None);
        (&self.boot, self.pid, &self.namespace, self.started)
            == (&me.boot, me.pid, &me.namespace, me.started)
    }

    /// Returns whether another process of the same job left it, and so gives way to a process of
    /// `job`.
    fn gives_way_to(&self, job: Option<&str>) -> bool {
        job.is_some() && self.job.as_deref() == job && !self.is_this_process()
    }

    fn lives(&self, now: SystemTime) -> bool {
        // Another boot id is another host, or an earlier boot of this one, whose processes are
        // gone. The two cannot be distinguished, because hosts may have equal names.
        let elsewhere = match (&self.boot, boot()) {
            (Some(theirs), Some(ours)) => *theirs != ours,
            _ => self.host != host(),
        };
        if elsewhere || (self.namespace.is_some() && self.namespace != namespace()) {
            return seconds(now) - self.time <= self.lasts.unwrap_or(LONGEST.as_secs_f64());
        }
        match (started(self.pid), self.started) {
            (None, _) => false,
            (Some(found), Some(expected)) => found == expected,
            (Some(_), None) => true,
        }
    }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn namespace() -> Option<String> {
    Some(std::fs::read_link("/proc/self/ns/pid").ok()?.display().to_string())
}

/// Returns the start time of a process; `None` if there is none, or only the remains of one.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in brackets, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok()).flatten()
}

/// Returns whether the process that left `item` counts for a process of `job`.
fn counts(store: &Store, item: &Item, now: SystemTime, job: Option<&str>) -> Result<bool> {
    let text = match store.read(&item.name) {
        Ok(text) => text,
        Err(Error::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(match serde_json::from_slice::<Holder>(&text) {
        Ok(holder) => holder.lives(now) && !holder.gives_way_to(job),
        // Another clock may be ahead of ours.
        Err(_) => item
            .modified
            .is_some_and(|time| now.duration_since(time).map_or(true, |age| age < WRITING)),
    })
}

/// Files of some kinds, and whether they count for a process of `job`.
fn marks(
    store: &Store,
    kinds: &[&str],
    now: SystemTime,
    job: Option<&str>,
) -> Result<Vec<(String, bool)>> {
    let items = match store.look("") {
        Ok(items) => items,
        Err(Error::Missing { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let named =
        |name: &str| name.ends_with(".json") && kinds.iter().any(|kind| name.starts_with(kind));
    let ours = |item: &Item| !item.is_directory && named(&item.name);
    items
        .into_iter()
        .filter(ours)
        .map(|item| Ok((item.name.clone(), counts(store, &item, now, job)?)))
        .collect()
}

fn here(now: SystemTime, lasts: Option<Duration>, job: Option<&str>) -> Result<Bytes> {
    let text =
        serde_json::to_vec(&Holder { job: job.map(str::to_owned), ..Holder::here(now, lasts) });
    text.map(Bytes::from).map_err(|source| Error::Runtime { source: source.into() })
}

/// Takes the directory for this process alone: the name of its lease, or `None` if the directory is
/// in use.
///
/// Where the process cannot be seen, the lease counts for `lasts` after it was last renewed, or for
/// a week. A process of a `job` takes the lease of another process of the same job, even of a
/// living one.
///
/// # Errors
/// A backend that cannot be asked, or does not write.
pub fn take(
    store: &Store,
    now: SystemTime,
    lasts: Option<Duration>,
    job: Option<&str>,
) -> Result<Option<String>> {
    let found = marks(store, &[LEASE], now, job)?;
    if found.iter().any(|(_, lives)| *lives) {
        return Ok(None);
    }
    let name = unique(LEASE, now);
    if !store.create(&name, here(now, lasts, job)?)? {
        return Ok(None);
    }
    let ended = |other: &String| found.iter().any(|(dead, _)| dead == other);
    let deadline = Instant::now() + GIVEN_BACK;
    let others = loop {
        // Whatever its job: a lease that the first look did not show is about as old as this one.
        let others = marks(store, &[LEASE, USE], now, None)?;
        if !others.iter().any(|(other, _)| *other == name) {
            // The process that has the directory has deleted it.
            return Ok(None);
        }
        let living = others.iter().filter(|(other, lives)| *lives && !ended(other));
        let mut living = living.map(|(other, _)| other).filter(|other| **other != name).peekable();
        if living.peek().is_none() {
            break others;
        }
        let later = |other: &String| other.starts_with(LEASE) && *other > name;
        if !living.all(later) || Instant::now() >= deadline {
            store.delete(&name)?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    };
    for (dead, _) in found.iter().chain(others.iter().filter(|(_, lives)| !lives)) {
        store.delete(dead)?;
    }
    Ok(Some(name))
}

/// Returns a name that no other mark has or will have; later ones are greater, as far as clocks
/// agree.
fn unique(kind: &str, now: SystemTime) -> String {
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let nanoseconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{kind}{nanoseconds:x}-{}-{count}.json", std::process::id())
}

fn mark(store: &Store, now: SystemTime, lasts: Option<Duration>) -> Result<String> {
    let name = unique(USE, now);
    store.write(&name, here(now, lasts, None)?)?;
    Ok(name)
}

/// Uses the directory beside others: the name of the mark, or `None` if it is taken.
///
/// # Errors
/// Like [`take`].
pub fn share(store: &Store, now: SystemTime, lasts: Option<Duration>) -> Result<Option<String>> {
    let name = mark(store, now, lasts)?;
    if marks(store, &[LEASE], now, None)?.iter().any(|(_, lives)| *lives) {
        store.delete(&name)?;
        return Ok(None);
    }
    Ok(Some(name))
}

/// Makes the own lease a use beside others.
///
/// # Errors
/// Like [`take`].
pub fn settle(store: &Store, lease: &str, now: SystemTime) -> Result<String> {
    let name = mark(store, now, None)?;
    store.delete(lease)?;
    Ok(name)
}

/// Deletes the content of the directory, which this process has taken, and lets go of it; returns
/// the number of deleted files.
///
/// The manifest goes first, so that no reader finds data without its files. From the deletion of
/// the lease on, the directory may be another process's: what that has written stays.
///
/// # Errors
/// A backend that cannot be asked, or does not delete; some files may be gone by then.
pub fn clear(store: &Store, lease: &str) -> Result<usize> {
    store.delete(MANIFEST)?;
    let entries = store.list("")?;
    let files: Vec<&str> =
        entries.iter().map(|entry| entry.path.as_str()).filter(|path| !is_mark(path)).collect();
    store.delete_files("", files.iter().copied())?;
    for item in store.look("")?.into_iter().filter(|item| item.is_directory) {
        store.delete_all(&item.name)?;
    }
    store.tidy()?;
    store.delete(lease)?;
    store.remove_empty()?;
    Ok(files.len())
}

/// Says in a mark of this process that the process still lives; false when the mark is gone, or is
/// another's.
///
/// # Errors
/// A backend that cannot be asked, or does not write.
pub fn renew(store: &Store, mark: &str, now: SystemTime) -> Result<bool> {
    let text = match store.read(mark) {
        Ok(text) => text,
        Err(Error::Missing { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    let Ok(found) = serde_json::from_slice::<Holder>(&text) else { return Ok(false) };
    if !found.is_this_process() {
        return Ok(false);
    }
    store
        .write(mark, here(now, found.lasts.map(Duration::from_secs_f64), found.job.as_deref())?)?;
    Ok(true)
}

/// Returns whether the directory is unused.
///
/// # Errors
/// A backend that cannot be asked.
pub fn is_free(store: &Store, now: SystemTime) -> Result<bool> {
    Ok(!marks(store, &[LEASE, USE], now, None)?.iter().any(|(_, lives)| *lives))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(name: &str) -> Store {
        Store::open(&format!("memory://lease-{name}/d")).unwrap()
    }

    fn left(store: &Store, name: &str, holder: &Holder) {
        store.write(name, serde_json::to_vec(holder).unwrap().into()).unwrap();
    }

    #[test]
    fn one_takes_and_many_share_but_never_both() {
        let (store, now) = (store("both"), SystemTime::now());
        assert!(is_free(&store, now).unwrap());
        let lease = take(&store, now, None, None).unwrap().unwrap();
        assert_eq!(take(&store, now, None, None).unwrap(), None);
        assert_eq!(share(&store, now, None).unwrap(), None);
        let first = settle(&store, &lease, now).unwrap();
        let second = share(&store, now, None).unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(take(&store, now, None, None).unwrap(), None);
        assert!(!is_free(&store, now).unwrap());
        store.delete(&first).unwrap();
        assert_eq!(take(&store, now, None, None).unwrap(), None);
        store.delete(&second).unwrap();
        assert!(take(&store, now, None, None).unwrap().is_some());
    }

    #[test]
    fn a_cleared_directory_keeps_what_another_process_has_there() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("d");
        let (store, now) = (Store::open(base.to_str().unwrap()).unwrap(), SystemTime::now());
        for file in ["part.parquet", MANIFEST, "x=1/part.parquet"] {
            store.write(file, Bytes::from_static(b"1")).unwrap();
        }
        let lease = take(&store, now, None, None).unwrap().unwrap();
        let reader = mark(&store, now, None).unwrap();
        assert_eq!(clear(&store, &lease).unwrap(), 2, "the manifest is not counted");
        let left: Vec<String> = store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(left, [reader.as_str()]);
        store.delete(&reader).unwrap();
        let lease = take(&store, now, None, None).unwrap().unwrap();
        assert_eq!(clear(&store, &lease).unwrap(), 0);
        assert!(!base.exists());
    }

    #[test]
    fn of_many_at_once_one_takes() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().to_str().unwrap()).unwrap();
        let now = SystemTime::now();
        let dead = Holder { pid: u32::MAX, ..Holder::here(now, None) };
        for _ in 0..200 {
            left(&store, "_lease-7.json", &dead);
            let taken: Vec<String> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| take(&store, now, None, None).unwrap()))
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
        let me = Holder::here(now, None);
        left(&store, "_lease-3.json", &Holder { pid: u32::MAX, ..Holder::here(now, None) });
        left(
            &store,
            "_use-x.json",
            &Holder { started: me.started.map(|ticks| ticks + 1), ..Holder::here(now, None) },
        );
        assert!(is_free(&store, now).unwrap());
        let lease = take(&store, now, None, None).unwrap().unwrap();
        let names: Vec<String> =
            store.look("").unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(names, [lease.as_str()], "what the dead left goes");
        store.delete(&lease).unwrap();

        for unseen in [
            Holder { host: "elsewhere".to_owned(), boot: None, ..Holder::here(now, None) },
            // A host with the same name, in which no process has that number here.
            Holder { boot: Some("another".to_owned()), pid: u32::MAX, ..Holder::here(now, None) },
            Holder {
                namespace: Some("pid:[1]".to_owned()),
                pid: u32::MAX,
                ..Holder::here(now, None)
            },
        ] {
            left(&store, "_use-y.json", &unseen);
            assert_eq!(take(&store, now, None, None).unwrap(), None);
            assert!(is_free(&store, now + LONGEST + WRITING).unwrap());
        }
    }

    #[test]
    fn a_mark_that_says_nothing_counts_while_it_may_be_written() {
        let (store, now) = (store("half"), SystemTime::now());
        store.write("_lease-1.json", Bytes::new()).unwrap();
        assert_eq!(take(&store, now, None, None).unwrap(), None);
        assert!(take(&store, now + WRITING * 2, None, None).unwrap().is_some());
    }

    #[test]
    fn a_renewal_extends_a_lease_and_recreates_no_deleted_one() {
        let (store, now) = (store("renewed"), SystemTime::now());
        let lasts = Duration::from_secs(600);
        let lease = take(&store, now, Some(lasts), None).unwrap().unwrap();
        let later = now + LONGEST;
        assert!(renew(&store, &lease, later).unwrap());
        let held: Holder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
        assert_eq!((held.time, held.lasts), (seconds(later), Some(600.0)));
        let unseen = Holder { boot: Some("another".to_owned()), ..held };
        assert!(unseen.lives(later + lasts));
        assert!(!unseen.lives(later + lasts + Duration::from_secs(1)));
        left(&store, &lease, &unseen);
        assert!(!renew(&store, &lease, later).unwrap(), "another has taken it");
        store.delete(&lease).unwrap();
        assert!(!renew(&store, &lease, later).unwrap());
        assert!(is_free(&store, later).unwrap());
    }

    #[test]
    fn a_process_takes_the_lease_of_another_process_of_its_job_and_of_no_other() {
        let (store, now) = (store("job"), SystemTime::now());
        let lasts = Some(Duration::from_secs(600));
        let elsewhere = |job: &str| Holder {
            boot: Some("another".to_owned()),
            job: Some(job.to_owned()),
            ..Holder::here(now, lasts)
        };
        left(&store, "_lease-1.json", &elsewhere("mine"));
        for other in [None, Some("another's")] {
            assert_eq!(take(&store, now, lasts, other).unwrap(), None);
        }
        let lease = take(&store, now, lasts, Some("mine")).unwrap().unwrap();
        assert!(!store.exists("_lease-1.json").unwrap(), "whoever had it learns that it is gone");
        assert_eq!(take(&store, now, lasts, Some("mine")).unwrap(), None, "this process has it");
        assert!(renew(&store, &lease, now).unwrap());
        let held: Holder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
        assert_eq!(held.job.as_deref(), Some("mine"), "a renewal keeps the job");
        left(&store, &lease, &elsewhere("mine"));
        assert_eq!(share(&store, now, None).unwrap(), None);
        assert!(!is_free(&store, now).unwrap());
    }
}

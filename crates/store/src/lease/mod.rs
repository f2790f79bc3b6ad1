// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Leases and use marks: they record which processes use a directory of prepared data.
//!
//! A mark, or lease file, is a small file in the directory that names a process:
//! `_lease-<name>.json` for the only writer, `_use-<name>.json` for each of any number of readers.
//! A mark is valid while its process lives. A process on another host or in another container
//! cannot be observed, so its mark is valid for a week after its last write, or for the lifetime
//! that the mark states. So is the mark of another user's process if `/proc` hides the process
//! (`hidepid`) and the kernel says that a process with its number exists.
//!
//! Clocks of hosts differ. The age of a mark is therefore the difference of two times that the
//! store has recorded: the last write of our own mark, and of the other one. Before our own mark
//! exists, our clock counts. If it says that a lease is valid, a file is created for a moment,
//! whose time is the store's present time.
//!
//! ```text
//! acquire_lease:   no valid lease -> create a lease -> if a use mark or an earlier lease is valid,
//!                  delete our lease; wait until later leases are deleted
//! mark_in_use:     create a use mark -> if there is a valid lease, delete our use mark
//! downgrade_lease: create a use mark -> delete our lease
//! delete_content_and_lease: mark the deletion -> delete the manifest -> other files -> the mark -> our lease
//!                  -> the directory, if empty
//! ```
//!
//! A process whose lease is gone has lost the directory, and neither downgrades nor clears it.
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
use crate::mark_names::{CLOCK_PREFIX, EMPTY_MARK_LIFETIME, LEASE_PREFIX, USE_PREFIX};
use crate::prepared_files::{self, MANIFEST_FILE, PREPARATION_FILE};
use crate::store::{DirectoryItem, FileReplacement, Store, is_content_not_mark};

/// Time for which the mark of a process is valid if the process cannot be observed.
// Living processes renew their marks, so a week of silence means that the process was killed.
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
            started: own_start_time(),
            time: unix_seconds(now),
            lasts: lasts.map(|lasts| lasts.as_secs_f64()),
            job: None,
        }
    }

    /// Returns whether this is the current process.
    fn is_this_process(&self) -> bool {
        // Only the process counts here, not the time.
        let me = Self::of_this_process(SystemTime::UNIX_EPOCH, None);
        (&self.boot, self.pid, &self.namespace, self.started)
            == (&me.boot, me.pid, &me.namespace, me.started)
    }

    /// Returns whether another process of `job` created the mark, so that a process of the same job
    /// may replace it.
    fn is_replaceable_by(&self, job: Option<&str>) -> bool {
        job.is_some() && self.job.as_deref() == job && !self.is_this_process()
    }

    /// Returns whether the kernel of this process would show the process. Each of the three facts
    /// is equal on different hosts somewhere: the name in clusters of equal images, the boot id in
    /// clones of a running machine, the namespace on all hosts without containers.
    fn is_holder_process_visible(&self) -> bool {
        // Two values that are unknown are not the same.
        let is_same =
            |theirs: &Option<String>, ours: Option<String>| theirs.is_some() && *theirs == ours;
        is_same(&self.boot, boot_id())
            && is_same(&self.namespace, process_namespace())
            && self.host == host_name()
    }

    /// Returns whether the mark is valid, given the time of its last write and the present time by
    /// the same clock.
    fn is_mark_valid(&self, written: f64, now: f64) -> bool {
        // A mark from the future is valid: another clock is ahead.
        let recent = || now - written <= self.lasts.unwrap_or(UNSEEN_HOLDER_LIFETIME.as_secs_f64());
        if !self.is_holder_process_visible() {
            return recent();
        }
        match (observe_process(self.pid), self.started) {
            (ObservedProcess::Absent, _) => false,
            (ObservedProcess::Hidden, _) => recent(),
            (ObservedProcess::StartedAt(found), Some(expected)) => found == expected,
            // A wrong yes makes others wait; a wrong no deletes data in use.
            (ObservedProcess::StartedAt(_), None) => true,
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

/// The facts that the kernel shows about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObservedProcess {
    /// It does not exist, or is a zombie.
    Absent,
    /// It exists, and only its owner may see its start time: `/proc` is mounted with `hidepid`.
    Hidden,
    /// Its start time in kernel ticks.
    StartedAt(u64),
}

/// Asks the kernel for a process. `/proc/PID` may be invisible although the process exists, so only
/// the answer to a signal proves its absence.
fn observe_process(pid: u32) -> ObservedProcess {
    if let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        return parse_process_stat(&stat).unwrap_or(ObservedProcess::Hidden);
    }
    let number = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let Some(number) = number else { return ObservedProcess::Absent };
    match rustix::process::test_kill_process(number) {
        Err(rustix::io::Errno::SRCH) => ObservedProcess::Absent,
        // EPERM proves that the process exists, too.
        Ok(()) | Err(_) => ObservedProcess::Hidden,
    }
}

fn parse_process_stat(stat: &str) -> Option<ObservedProcess> {
    // The program name in parentheses may contain any character.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // A zombie runs no code any more; only its parent has not collected it.
    if state == "Z" || state == "X" {
        return Some(ObservedProcess::Absent);
    }
    // Field 22 of the line (proc(5)); the state was field 3.
    fields.nth(18)?.parse().ok().map(ObservedProcess::StartedAt)
}

/// Returns the start time of this process.
fn own_start_time() -> Option<u64> {
    match observe_process(std::process::id()) {
        ObservedProcess::StartedAt(ticks) => Some(ticks),
        ObservedProcess::Absent | ObservedProcess::Hidden => None,
    }
}

/// A mark in a directory.
#[derive(Clone, Debug)]
struct FoundMark {
    name: String,
    is_valid: bool,
    /// Whether the mark is valid whatever the time is, because its process was seen.
    is_seen_alive: bool,
    /// Whether a process of the job that asks may replace it.
    is_replaceable: bool,
}

impl FoundMark {
    /// Returns whether the mark keeps a process of the job that asks from the directory.
    fn excludes_others(&self) -> bool {
        self.is_valid && !self.is_replaceable
    }
}

/// Reads the mark `item`, for a process of `job`. `store_time` is the present time by the clock
/// that wrote the items' times, if it is known.
fn examine_mark(
    store: &Store,
    item: &DirectoryItem,
    now: SystemTime,
    store_time: Option<SystemTime>,
    job: Option<&str>,
) -> Result<FoundMark> {
    let name = item.name.clone();
    let text = match store.read(&item.name) {
        Ok(text) => text,
        // Its owner has deleted it since the listing.
        Err(Error::Missing { .. }) => {
            return Ok(FoundMark {
                name,
                is_valid: false,
                is_seen_alive: false,
                is_replaceable: false,
            });
        }
        Err(error) => return Err(error),
    };
    Ok(match serde_json::from_slice::<MarkHolder>(&text) {
        Ok(holder) => {
            let written = item.modified.map_or(holder.time, unix_seconds);
            let now = unix_seconds(store_time.unwrap_or(now));
            FoundMark {
                name,
                is_valid: holder.is_mark_valid(written, now),
                is_seen_alive: holder.is_mark_valid(written, f64::INFINITY),
                is_replaceable: holder.is_replaceable_by(job),
            }
        }
        // If the file is newer than our clock, the other clock is ahead; the mark is valid then.
        Err(_) => {
            let is_valid = item.modified.is_some_and(|time| {
                let age = store_time.unwrap_or(now).duration_since(time);
                age.map_or(true, |age| age < EMPTY_MARK_LIFETIME)
            });
            FoundMark { name, is_valid, is_seen_alive: false, is_replaceable: false }
        }
    })
}

/// Returns everything directly in the directory.
fn list_items(store: &Store) -> Result<Vec<DirectoryItem>> {
    match store.list_directory("") {
        // The first mark creates the directory.
        Err(Error::Missing { .. }) => Ok(Vec::new()),
        other => other,
    }
}

/// Returns marks of these kinds, for a process of `job`. `own` is a file of ours, which was just
/// written, if there is one.
fn list_marks(
    store: &Store,
    kinds: &[&str],
    now: SystemTime,
    own: Option<&str>,
    job: Option<&str>,
) -> Result<Vec<FoundMark>> {
    let items = list_items(store)?;
    let named =
        |name: &str| name.ends_with(".json") && kinds.iter().any(|kind| name.starts_with(kind));
    let ours = |item: &DirectoryItem| !item.is_directory && named(&item.name);
    let store_time =
        items.iter().find(|item| Some(item.name.as_str()) == own).and_then(|item| item.modified);
    items
        .into_iter()
        .filter(ours)
        .map(|item| examine_mark(store, &item, now, store_time, job))
        .collect()
}

/// Returns leases for a process of `job` that has no mark yet. If our clock is behind,
/// it says that an expired lease is valid. So the time of a file that was just written decides.
fn list_leases(store: &Store, now: SystemTime, job: Option<&str>) -> Result<Vec<FoundMark>> {
    let leases = list_marks(store, &[LEASE_PREFIX], now, None, job)?;
    let mut excluding = leases.iter().filter(|lease| lease.excludes_others()).peekable();
    if excluding.peek().is_none() || excluding.any(|lease| lease.is_seen_alive) {
        return Ok(leases);
    }
    let name = unique_mark_name(CLOCK_PREFIX, now);
    create_mark(store, &name, Bytes::new())?;
    let leases = list_marks(store, &[LEASE_PREFIX], now, Some(&name), job);
    store.delete(&name)?;
    leases
}

fn encode_mark_holder(
    now: SystemTime,
    lasts: Option<Duration>,
    job: Option<&str>,
) -> Result<Bytes> {
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
    acquire_lease_with_content(store, now, encode_mark_holder(now, lasts, job)?, job)
}

/// Acquires the directory in order to delete its content. On a full disk the lease is an empty
/// file, which needs no block, and is valid for a minute; [`make_room_and_complete_lease`]
/// completes it.
///
/// # Errors
/// Like [`acquire_lease`]. A disk may be so full that there is no room for an empty file.
pub(crate) fn acquire_for_deletion(store: &Store, now: SystemTime) -> Result<Option<String>> {
    match acquire_lease(store, now, None, None) {
        Err(error) if error.is_no_space() => {
            acquire_lease_with_content(store, now, Bytes::new(), None)
        }
        other => other,
    }
}

/// Completes a lease that is an empty file. Files of the directory are deleted until there is room,
/// the manifest first.
///
/// # Errors
/// A backend that does not answer, write or delete.
pub(crate) fn make_room_and_complete_lease(store: &Store, lease: &str) -> Result<()> {
    if store.size(lease)? > 0 {
        return Ok(());
    }
    let holder = |text: &[u8]| {
        text.is_empty().then(|| encode_mark_holder(SystemTime::now(), None, None)).transpose()
    };
    // First, so that no reader finds a manifest without its files.
    store.delete(MANIFEST_FILE)?;
    for file in store.list("")?.into_iter().filter(|file| is_content_not_mark(&file.path)) {
        match store.replace_existing(lease, holder) {
            Err(error) if error.is_no_space() => store.delete(&file.path)?,
            done => return done.map(drop),
        }
    }
    Ok(())
}

fn acquire_lease_with_content(
    store: &Store,
    now: SystemTime,
    holder: Bytes,
    job: Option<&str>,
) -> Result<Option<String>> {
    let found = list_leases(store, now, job)?;
    if found.iter().any(FoundMark::excludes_others) {
        return Ok(None);
    }
    let name = unique_mark_name(LEASE_PREFIX, now);
    create_mark(store, &name, holder)?;
    let acquired = win_or_withdraw_lease(store, &name, now, job, &found).inspect_err(|_| {
        // The first error is reported. A lease that stays is valid until this process ends.
        drop(store.delete(&name));
    })?;
    Ok(acquired.then_some(name))
}

/// Creates a mark. The answer to the creation may be lost, and its repetition then refused: names
/// are never reused, so a mark with this name is ours.
fn create_mark(store: &Store, name: &str, holder: Bytes) -> Result<()> {
    store.create_if_absent(name, holder).map(drop).inspect_err(|_| {
        // It may have been created before the error.
        drop(store.delete(name));
    })
}

/// Waits until our lease `name` is the only valid mark, and deletes the others. Returns false, and
/// deletes our lease, if another process has the directory. The leases in `found` were there before
/// ours.
fn win_or_withdraw_lease(
    store: &Store,
    name: &str,
    now: SystemTime,
    job: Option<&str>,
    found: &[FoundMark],
) -> Result<bool> {
    let was_found = |other: &str| found.iter().any(|earlier| earlier.name == other);
    let deadline = Instant::now() + LEASE_RETURN_TIMEOUT;
    let kinds = [LEASE_PREFIX, USE_PREFIX];
    let others = loop {
        let others = list_marks(store, &kinds, now, Some(name), job)?;
        if !others.iter().any(|other| other.name == name) {
            // The owner of the directory has deleted our lease.
            return Ok(false);
        }
        // Leases of the same job that the first check did not show are about as old as ours, and
        // count, too.
        let living: Vec<&str> = others
            .iter()
            .filter(|other| other.excludes_others() || !was_found(&other.name) && other.is_valid)
            .map(|other| other.name.as_str())
            .filter(|other| *other != name)
            .collect();
        if living.is_empty() {
            break others;
        }
        // A lease that was there before ours lives by the store's clock, and only our clock is
        // ahead.
        let later =
            |other: &str| other.starts_with(LEASE_PREFIX) && other > name && !was_found(other);
        if !living.into_iter().all(later) || Instant::now() >= deadline {
            store.delete(name)?;
            return Ok(false);
        }
        std::thread::sleep(LEASE_POLL_INTERVAL);
    };
    for dead in others.iter().filter(|other| other.name != name) {
        store.delete(&dead.name)?;
    }
    // Killed processes leave such files, too.
    for item in list_items(store)?.iter().filter(|item| item.name.starts_with(CLOCK_PREFIX)) {
        store.delete(&item.name)?;
    }
    Ok(true)
}

/// Returns a name that no other mark ever has. Later marks have greater names if clocks agree.
fn unique_mark_name(kind: &str, now: SystemTime) -> String {
    // Relaxed: only the uniqueness of the number counts.
    let count = MARK_COUNTER.fetch_add(1, Ordering::Relaxed);
    let nanoseconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    // The time comes first, so the order of names is the order of creation.
    format!("{kind}{nanoseconds:x}-{}-{count}.json", std::process::id())
}

fn write_use_mark(store: &Store, now: SystemTime, lasts: Option<Duration>) -> Result<String> {
    let name = unique_mark_name(USE_PREFIX, now);
    create_mark(store, &name, encode_mark_holder(now, lasts, None)?)?;
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
    // Use marks are listed for the store's time of our own mark, which was just written.
    let leases = list_marks(store, &[LEASE_PREFIX, USE_PREFIX], now, Some(&name), None)?;
    if leases.iter().any(|other| other.is_valid && other.name.starts_with(LEASE_PREFIX)) {
        store.delete(&name)?;
        return Ok(None);
    }
    Ok(Some(name))
}

/// Returns an error if a lease of the directory is gone, so that its owner must not write there.
/// Its name is never used again.
///
/// # Errors
/// [`Error::LostLease`], or a backend that does not answer.
pub fn check_lease(store: &Store, lease: &str) -> Result<()> {
    if store.exists(lease)? {
        return Ok(());
    }
    Err(Error::LostLease { path: store.display_path("") })
}

/// Replaces this process's lease by a use mark.
///
/// # Errors
/// Like [`acquire_lease`] and [`check_lease`].
pub fn downgrade_lease(store: &Store, lease: &str, now: SystemTime) -> Result<String> {
    // The use mark comes first: without any mark, a writer could take the directory.
    let name = write_use_mark(store, now, None)?;
    check_lease(store, lease).inspect_err(|_| drop(store.delete(&name)))?;
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
/// A directory that is a symbolic link, a lease that is gone, a backend that does not answer or
/// does not delete. Some files may be deleted by then.
pub fn delete_content_and_lease(store: &Store, lease: &str) -> Result<usize> {
    store.check_not_symlink()?;
    check_lease(store, lease)?;
    // If this process is killed, the mark shows that the remaining files may be deleted.
    prepared_files::mark_deletion_in_progress(store)?;
    let files = store.delete_content_except_marks()?;
    // After the content, so that the next sweep continues an interrupted deletion.
    store.delete(PREPARATION_FILE)?;
    store.delete(lease)?;
    store.remove_empty_directory()?;
    Ok(files)
}

/// Deletes the content of the directory, for which this process has the lease and which has the
/// sign of a preparation. Both stay; returns the number of deleted files.
///
/// # Errors
/// Like [`delete_content_and_lease`].
pub fn delete_content_keep_lease(store: &Store, lease: &str) -> Result<usize> {
    check_lease(store, lease)?;
    store.delete_content_except_marks()
}

/// Renews a mark of this process. Returns false if the mark is gone or belongs to another process.
/// A mark that another process deletes meanwhile is not created again.
///
/// # Errors
/// A backend that does not answer or does not write.
pub fn renew_mark(store: &Store, mark: &str, now: SystemTime) -> Result<bool> {
    let renewed = |text: &[u8]| {
        let Ok(found) = serde_json::from_slice::<MarkHolder>(text) else { return Ok(None) };
        if !found.is_this_process() {
            return Ok(None);
        }
        let lasts = found.lasts.map(Duration::from_secs_f64);
        encode_mark_holder(now, lasts, found.job.as_deref()).map(Some)
    };
    match store.replace_existing(mark, renewed)? {
        FileReplacement::Replaced => Ok(true),
        FileReplacement::Refused => Ok(false),
        FileReplacement::Unconditional => {
            // The mark may have been deleted just before, by a process that holds a lease now.
            // Our mark was written just now, so its time is the store's.
            let leases = list_marks(store, &[LEASE_PREFIX], now, Some(mark), None)?;
            let lost = leases.iter().any(|other| other.is_valid && other.name != mark);
            if lost {
                store.delete(mark)?;
            }
            Ok(!lost)
        }
    }
}

/// Returns whether the directory is unused.
///
/// # Errors
/// A backend that does not answer.
pub fn is_free(store: &Store, now: SystemTime) -> Result<bool> {
    let marks = list_marks(store, &[LEASE_PREFIX, USE_PREFIX], now, None, None)?;
    Ok(!marks.iter().any(|mark| mark.is_valid))
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded blocks in a file that the processes of a host share. In a shared-memory directory, the
//! file is memory.
//!
//! ```text
//! | one byte per block: 1 if it is complete | block 0: column 0, column 1, ... | block 1 ... |
//! ```
//!
//! The file's name is a hash of its content's origin, so all readers of the same columns of the
//! same data use the same file. The first process that decodes a block writes it. If two processes
//! decode a block at the same time, both write the same bytes. A block's flag byte is written after
//! its columns. The last process that closes the file deletes it. A killed process leaves an
//! unlocked file, which the next reader deletes.
//!
//! Other users can create files in a shared-memory directory, too. So a file is used only after its
//! owner, its kind and its lock were checked, without following links and without waiting for long.
//! A reader that cannot use the file works without a cache.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farandole_dataset::{PlanPart, fold_hash};
use rustix::fs::OFlags;

use crate::column::SelectedColumn;
use crate::dataset::ParquetDataset;
use crate::error::{Error, Result};

/// Prefix of the names of all cache files; the user's id and a key follow.
const CACHE_FILE_PREFIX: &str = "farandole-cache-";

/// Longest wait for the lock of the file. Processes of this user hold it exclusively only for the
/// moment in which they delete the file.
const FILE_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two attempts to lock the file.
const FILE_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Alignment of blocks in the file.
const CACHE_PAGE_BYTES: u64 = 4096;

/// Position of a block in the file.
#[derive(Clone, Copy, Debug)]
struct CachedBlockPosition {
    /// Offset of the flag byte.
    flag: u64,
    /// Offset of the first column.
    start: u64,
    rows: u64,
}

/// Decoded blocks of a data set, shared by the processes of this host.
#[derive(Debug)]
pub(crate) struct BlockCache {
    file: File,
    path: PathBuf,
    places: BTreeMap<(usize, usize, u64), CachedBlockPosition>,
    /// Bytes of one row of each column.
    widths: Vec<u64>,
    process: u32,
    /// Whether a write failed, usually because the memory is full.
    full: AtomicBool,
}

impl BlockCache {
    /// Opens the cache file of these columns in `directory`, or creates it. Returns `None`, with a
    /// warning, if the file cannot be used, such as one of another user.
    ///
    /// # Errors
    /// The directory does not exist.
    pub(crate) fn open_or_create(
        directory: &str,
        dataset: &ParquetDataset,
        selected: &[SelectedColumn],
    ) -> Result<Option<Self>> {
        let widths: Vec<u64> =
            selected.iter().map(|column| column.field.row_width() as u64).collect();
        let row: u64 = widths.iter().sum();
        let mut places = BTreeMap::new();
        let mut start = (dataset.lane_layout().block_ranges().count() as u64)
            .next_multiple_of(CACHE_PAGE_BYTES);
        for (flag, (file, group, rows)) in (0..).zip(dataset.lane_layout().block_ranges()) {
            let many = rows.end - rows.start;
            places
                .insert((file, group, rows.start), CachedBlockPosition { flag, start, rows: many });
            start += (many * row).next_multiple_of(CACHE_PAGE_BYTES);
        }
        let directory = Path::new(directory);
        let user = rustix::process::geteuid().as_raw();
        let prefix = format!("{CACHE_FILE_PREFIX}{user}-");
        delete_stale_files(directory, &prefix, user);
        let path = directory.join(format!("{prefix}{:016x}", cache_key(dataset, selected)));
        let file = match open_shared_file(&path, start, user) {
            Ok(file) => file,
            Err(source) if source.kind() == ErrorKind::NotFound => {
                return Err(Error::Cache { path: path.display().to_string(), source });
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    path = %path.display(),
                    "decoded rows are not kept in memory, because the file for them cannot be \
                     used: each epoch decodes them again"
                );
                return Ok(None);
            }
        };
        let (process, full) = (std::process::id(), AtomicBool::new(false));
        Ok(Some(Self { file, path, places, widths, process, full }))
    }

    /// Returns the block that contains a part, and the number of its rows before the part.
    fn find_block(&self, part: &PlanPart) -> Option<(CachedBlockPosition, u64)> {
        let key = (part.file, part.group, part.rows.start);
        let ((file, group, start), place) = self.places.range(..=key).next_back()?;
        let inside =
            (*file, *group) == (part.file, part.group) && part.rows.end <= start + place.rows;
        inside.then(|| (*place, part.rows.start - start))
    }

    /// Returns whether the rows of a part are in the cache.
    pub(crate) fn contains_part(&self, part: &PlanPart) -> bool {
        let Some((place, _)) = self.find_block(part) else { return false };
        let mut flag = [0];
        self.file.read_exact_at(&mut flag, place.flag).is_ok() && flag == [1]
    }

    fn column_offset(&self, place: CachedBlockPosition, index: usize) -> u64 {
        let before: u64 = self.widths.iter().take(index).sum();
        place.start + before * place.rows
    }

    /// Reads column number `index` of a cached part into `out`.
    ///
    /// # Errors
    /// The operating system's error.
    pub(crate) fn read_column(&self, part: &PlanPart, index: usize, out: &mut [u8]) -> Result<()> {
        let Some((place, before)) = self.find_block(part) else { return Err(Error::Ended) };
        let width = self.widths.get(index).copied().unwrap_or_default();
        let read = self.file.read_exact_at(out, self.column_offset(place, index) + before * width);
        read.map_err(|source| Error::Cache { path: self.path.display().to_string(), source })
    }

    /// Returns the block of a part, if the part is the whole block and the memory is not full.
    fn writable_block(&self, part: &PlanPart) -> Option<CachedBlockPosition> {
        let (place, before) = self.find_block(part)?;
        let whole = before == 0 && part.rows.end - part.rows.start == place.rows;
        (whole && !self.full.load(Ordering::Relaxed)).then_some(place)
    }

    /// Writes column number `index` of a part, if the part is a whole block.
    pub(crate) fn write_column(&self, part: &PlanPart, index: usize, column: &[u8]) {
        let Some(place) = self.writable_block(part) else { return };
        if self.file.write_all_at(column, self.column_offset(place, index)).is_err() {
            // Out of memory: blocks that are complete stay usable, the others are decoded in every
            // epoch.
            self.full.store(true, Ordering::Relaxed);
        }
    }

    /// Marks all columns of a part as written.
    pub(crate) fn mark_complete(&self, part: &PlanPart) {
        if let Some(place) = self.writable_block(part)
            && self.file.write_all_at(&[1], place.flag).is_err()
        {
            self.full.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for BlockCache {
    fn drop(&mut self) {
        // A forked child shares the lock with its parent, which still uses the file.
        if self.process == std::process::id() && self.file.try_lock().is_ok() {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Returns a hash of everything that the cached bytes depend on.
fn cache_key(dataset: &ParquetDataset, selected: &[SelectedColumn]) -> u64 {
    let mut text = format!("{}\n{}\n", dataset.url(), dataset.manifest().fingerprint);
    for column in selected {
        let field = &column.field;
        let fill = column.fill.map(|value| value.to_string());
        let (name, element, shape) = (&field.name, field.element.numpy_name(), &field.shape);
        text += &format!("{name:?} {element} {shape:?} {fill:?} {}\n", column.allow_nan);
    }
    text.bytes().fold(0, |state, byte| fold_hash(state, u64::from(byte)))
}

/// Opens a file without following a link, and without waiting for the other end of a pipe.
///
/// # Errors
/// The system's; `PermissionDenied` for a file of another user or a special file.
fn open_without_following_link(
    options: &mut OpenOptions,
    path: &Path,
    user: u32,
) -> std::io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let file = options.read(true).write(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    let denied = |reason| Err(IoError::new(ErrorKind::PermissionDenied, reason));
    if found.uid() != user {
        return denied("the file belongs to another user");
    }
    if !found.is_file() || found.mode() & 0o077 != 0 {
        return denied("the file is no private file of this user");
    }
    Ok(file)
}

/// Locks a file of this user, together with other readers.
///
/// # Errors
/// The system's; `TimedOut` if another process keeps the lock.
fn lock_shared(file: &File) -> std::io::Result<()> {
    let deadline = Instant::now() + FILE_LOCK_TIMEOUT;
    loop {
        match file.try_lock_shared() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                let reason = format!("another process has locked it for {FILE_LOCK_TIMEOUT:?}");
                return Err(IoError::new(ErrorKind::TimedOut, reason));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(FILE_LOCK_POLL_INTERVAL),
        }
    }
}

/// Opens and locks the file. It must belong to `user`, and gets `bytes` bytes.
fn open_shared_file(path: &Path, bytes: u64, user: u32) -> std::io::Result<File> {
    // Another process may delete the file between our opening and our locking. The locked file then
    // is not the file of this name, so open again.
    for _ in 0..16 {
        let mut options = OpenOptions::new();
        let file = open_without_following_link(
            options.create(true).truncate(false).mode(0o600),
            path,
            user,
        )?;
        lock_shared(&file)?;
        let ours = file.metadata()?;
        let same =
            |named: std::fs::Metadata| (named.dev(), named.ino()) == (ours.dev(), ours.ino());
        if !std::fs::symlink_metadata(path).is_ok_and(same) {
            continue;
        }
        if ours.len() != bytes {
            file.set_len(bytes)?;
        }
        return Ok(file);
    }
    Err(IoError::other("the file is deleted again and again"))
}

/// Deletes files that killed processes left.
fn delete_stale_files(directory: &Path, prefix: &str, user: u32) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let Ok(file) = open_without_following_link(&mut OpenOptions::new(), &entry.path(), user)
        else {
            continue;
        };
        match file.try_lock() {
            Ok(()) => drop(std::fs::remove_file(entry.path())),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    const BYTES: u64 = 8192;

    fn own_user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn only_a_private_file_of_this_user_is_shared() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        let first = open_shared_file(&path, BYTES, own_user()).unwrap();
        assert_eq!(first.metadata().unwrap().len(), BYTES);
        drop(open_shared_file(&path, BYTES, own_user()).unwrap());
        let kind = |user| open_shared_file(&path, BYTES, user).unwrap_err().kind();
        assert_eq!(kind(own_user() + 1), ErrorKind::PermissionDenied);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(kind(own_user()), ErrorKind::PermissionDenied, "others can read it");
        std::fs::remove_file(&path).unwrap();
        let target = directory.path().join("target");
        std::fs::write(&target, b"mine").unwrap();
        symlink(&target, &path).unwrap();
        assert!(open_shared_file(&path, BYTES, own_user()).is_err(), "a link is not followed");
        assert_eq!(std::fs::read(&target).unwrap(), b"mine");
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert_eq!(kind(own_user()), ErrorKind::PermissionDenied, "a pipe is no file");
    }

    #[test]
    fn a_lock_that_another_process_keeps_is_waited_for_with_a_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        let held = open_shared_file(&path, BYTES, own_user()).unwrap();
        held.unlock().unwrap();
        held.lock().unwrap();
        let began = Instant::now();
        let error = open_shared_file(&path, BYTES, own_user()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(began.elapsed() < 2 * FILE_LOCK_TIMEOUT);
        delete_stale_files(directory.path(), "cache", own_user());
        assert!(path.exists(), "its process lives");
        drop(held);
        delete_stale_files(directory.path(), "cache", own_user() + 1);
        assert!(path.exists(), "files of other users stay");
        delete_stale_files(directory.path(), "cache", own_user());
        assert!(!path.exists());
    }
}

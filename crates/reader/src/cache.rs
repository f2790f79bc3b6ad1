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

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use farandole_dataset::{PlanPart, fold_hash};

use crate::column::SelectedColumn;
use crate::dataset::ParquetDataset;
use crate::error::{Error, Result};

/// Prefix of the names of all cache files; the user's id and a key follow.
const CACHE_FILE_PREFIX: &str = "farandole-cache-";

/// Alignment of blocks in the file.
const CACHE_PAGE_BYTES: u64 = 4096;

/// Position of a block in the file.
#[derive(Clone, Copy, Debug)]
struct CachedBlockPlace {
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
    places: BTreeMap<(usize, usize, u64), CachedBlockPlace>,
    /// Bytes of one row of each column.
    widths: Vec<u64>,
    process: u32,
    /// Whether a write failed, usually because the memory is full.
    full: AtomicBool,
}

impl BlockCache {
    /// Opens the cache file of these columns in `directory`, or creates it.
    ///
    /// # Errors
    /// A directory in which no file can be created.
    pub(crate) fn open_or_create(
        directory: &str,
        dataset: &ParquetDataset,
        selected: &[SelectedColumn],
    ) -> Result<Self> {
        let widths: Vec<u64> =
            selected.iter().map(|column| column.field.row_width() as u64).collect();
        let row: u64 = widths.iter().sum();
        let mut places = BTreeMap::new();
        let mut start = (dataset.lane_layout().block_ranges().count() as u64)
            .next_multiple_of(CACHE_PAGE_BYTES);
        for (flag, (file, group, rows)) in (0..).zip(dataset.lane_layout().block_ranges()) {
            let many = rows.end - rows.start;
            places.insert((file, group, rows.start), CachedBlockPlace { flag, start, rows: many });
            start += (many * row).next_multiple_of(CACHE_PAGE_BYTES);
        }
        let fail = |path: &Path, source| Error::Cache { path: path.display().to_string(), source };
        let directory = Path::new(directory);
        let user = std::fs::metadata("/proc/self").map_or(0, |found| found.uid());
        let prefix = format!("{CACHE_FILE_PREFIX}{user}-");
        delete_stale_files(directory, &prefix);
        let path = directory.join(format!("{prefix}{:016x}", cache_key(dataset, selected)));
        let file = open_shared_file(&path, start, user).map_err(|source| fail(&path, source))?;
        let (process, full) = (std::process::id(), AtomicBool::new(false));
        Ok(Self { file, path, places, widths, process, full })
    }

    /// Returns the block that contains a part, and the number of its rows before the part.
    fn find_block(&self, part: &PlanPart) -> Option<(CachedBlockPlace, u64)> {
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

    fn column_offset(&self, place: CachedBlockPlace, index: usize) -> u64 {
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
    fn writable_block(&self, part: &PlanPart) -> Option<CachedBlockPlace> {
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

/// Opens and locks the file. It must belong to `user`, and gets `bytes` bytes.
fn open_shared_file(path: &Path, bytes: u64, user: u32) -> std::io::Result<File> {
    // Another process may delete the file between our opening and our locking. The locked file then
    // is not the file of this name, so open again.
    for _ in 0..16 {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        file.lock_shared()?;
        let ours = file.metadata()?;
        let same =
            |named: std::fs::Metadata| (named.dev(), named.ino()) == (ours.dev(), ours.ino());
        if !std::fs::symlink_metadata(path).is_ok_and(same) {
            continue;
        }
        if ours.uid() != user {
            return Err(IoError::new(
                ErrorKind::PermissionDenied,
                "the file belongs to another user",
            ));
        }
        if ours.len() != bytes {
            file.set_len(bytes)?;
        }
        return Ok(file);
    }
    Err(IoError::other("the file is deleted again and again"))
}

/// Deletes files that killed processes left.
fn delete_stale_files(directory: &Path, prefix: &str) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else {
            continue;
        };
        match file.try_lock() {
            Ok(()) => drop(std::fs::remove_file(entry.path())),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

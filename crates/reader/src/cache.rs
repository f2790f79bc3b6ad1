// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded blocks in a file that the processes of a host share: in a directory of shared memory,
//! memory.
//!
//! ```text
//! | a byte for every block: 1 when it is there | block 0: column 0, column 1, ... | block 1 ... |
//! ```
//!
//! The file's name says what is in it, so that all readers of the same columns of the same data
//! find each other. The first process that decodes a block writes it; two that do so at a time
//! write the same bytes. The byte of a block is written after its columns. The last process that
//! closes the file deletes it; a killed process leaves an unlocked file, which the next one
//! deletes.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use farandole_dataset::{Part, fold};

use crate::column::Selected;
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Prefix of the names of all such files, before a user's number and a key.
const PREFIX: &str = "farandole-cache-";

/// Alignment of columns.
const PAGE: u64 = 4096;

/// The place of a block.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Number of its byte.
    flag: u64,
    /// Its first byte.
    start: u64,
    rows: u64,
}

/// Decoded blocks of a data set, shared by the processes of this host.
#[derive(Debug)]
pub(crate) struct Cache {
    file: File,
    path: PathBuf,
    places: BTreeMap<(usize, usize, u64), Place>,
    /// Bytes of a row of each column.
    widths: Vec<u64>,
    process: u32,
    /// Whether there was no more room.
    full: AtomicBool,
}

impl Cache {
    /// Opens the cache of these columns in `directory`, or starts it.
    ///
    /// # Errors
    /// A directory where no file can be made.
    pub(crate) fn open(directory: &str, dataset: &Dataset, selected: &[Selected]) -> Result<Self> {
        let widths: Vec<u64> = selected.iter().map(|column| column.field.width() as u64).collect();
        let row: u64 = widths.iter().sum();
        let mut places = BTreeMap::new();
        let mut start = (dataset.lanes().blocks().count() as u64).next_multiple_of(PAGE);
        for (flag, (file, group, rows)) in (0..).zip(dataset.lanes().blocks()) {
            let many = rows.end - rows.start;
            places.insert((file, group, rows.start), Place { flag, start, rows: many });
            start += (many * row).next_multiple_of(PAGE);
        }
        let fail = |path: &Path, source| Error::Cache { path: path.display().to_string(), source };
        let directory = Path::new(directory);
        let user = std::fs::metadata("/proc/self").map_or(0, |found| found.uid());
        let prefix = format!("{PREFIX}{user}-");
        sweep(directory, &prefix);
        let path = directory.join(format!("{prefix}{:016x}", key(dataset, selected)));
        let file = join(&path, start, user).map_err(|source| fail(&path, source))?;
        let (process, full) = (std::process::id(), AtomicBool::new(false));
        Ok(Self { file, path, places, widths, process, full })
    }

    /// The block that holds a part, and how many rows come before the part in it.
    fn find(&self, part: &Part) -> Option<(Place, u64)> {
        let key = (part.file, part.group, part.rows.start);
        let ((file, group, start), place) = self.places.range(..=key).next_back()?;
        let inside =
            (*file, *group) == (part.file, part.group) && part.rows.end <= start + place.rows;
        inside.then(|| (*place, part.rows.start - start))
    }

    /// Returns whether the rows of a part are there.
    pub(crate) fn has(&self, part: &Part) -> bool {
        let Some((place, _)) = self.find(part) else { return false };
        let mut flag = [0];
        self.file.read_exact_at(&mut flag, place.flag).is_ok() && flag == [1]
    }

    fn column(&self, place: Place, index: usize) -> u64 {
        let before: u64 = self.widths.iter().take(index).sum();
        place.start + before * place.rows
    }

    /// Reads column number `index` of a part that is there into `out`.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn get(&self, part: &Part, index: usize, out: &mut [u8]) -> Result<()> {
        let Some((place, before)) = self.find(part) else { return Err(Error::Ended) };
        let width = self.widths.get(index).copied().unwrap_or_default();
        let read = self.file.read_exact_at(out, self.column(place, index) + before * width);
        read.map_err(|source| Error::Cache { path: self.path.display().to_string(), source })
    }

    /// Returns the place for a part that is a whole block, if there is room.
    fn takes(&self, part: &Part) -> Option<Place> {
        let (place, before) = self.find(part)?;
        let whole = before == 0 && part.rows.end - part.rows.start == place.rows;
        (whole && !self.full.load(Ordering::Relaxed)).then_some(place)
    }

    /// Keeps column number `index` of a part, if the part is all of a block.
    pub(crate) fn put(&self, part: &Part, index: usize, column: &[u8]) {
        let Some(place) = self.takes(part) else { return };
        if self.file.write_all_at(column, self.column(place, index)).is_err() {
            // Out of memory: what is kept so far stays of use, the rest is decoded again in every
            // epoch.
            self.full.store(true, Ordering::Relaxed);
        }
    }

    /// Says that all columns of a part were kept.
    pub(crate) fn done(&self, part: &Part) {
        if let Some(place) = self.takes(part)
            && self.file.write_all_at(&[1], place.flag).is_err()
        {
            self.full.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // A forked child shares the lock with its parent, which continues.
        if self.process == std::process::id() && self.file.try_lock().is_ok() {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Everything that the bytes of a cache depend on.
fn key(dataset: &Dataset, selected: &[Selected]) -> u64 {
    let mut text = format!("{}\n{}\n", dataset.url(), dataset.manifest().fingerprint);
    for column in selected {
        let field = &column.field;
        let fill = column.fill.map(f64::to_bits);
        let (name, element, shape) = (&field.name, field.element.name(), &field.shape);
        text += &format!("{name:?} {element} {shape:?} {fill:?} {}\n", column.allow_nan);
    }
    text.bytes().fold(0, |state, byte| fold(state, u64::from(byte)))
}

/// Opens and locks the file, which belongs to `user` and has `bytes` bytes.
fn join(path: &Path, bytes: u64, user: u32) -> std::io::Result<File> {
    // A file that is deleted by its last user between our opening and our locking it is not the one
    // of that name.
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

/// Deletes what killed processes left behind.
fn sweep(directory: &Path, prefix: &str) {
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The file of a timeline. With a limit, it is two files: the newest records, and those before.
//!
//! ```text
//! 0.json is full:  0.json.old is removed, 0.json becomes 0.json.old, a new 0.json begins
//! ```

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The suffix of the file with the earlier part of a timeline.
pub const OLD_FILE_SUFFIX: &str = ".old";
/// A file has at least this many bytes before the next one begins.
const MIN_FILE_BYTES: u64 = 32 << 10;
/// Bytes of records that are written together at most.
const MAX_WRITE_BYTES: u64 = 64 << 10;
/// First bytes of a timeline; a record follows.
pub(super) const TRACE_BEGIN: &str = "[\n";
const TRACE_END: &str = "\n]\n";

/// The file of records. It ends with `]` after every write; the next write begins by overwriting
/// that.
pub(super) struct TraceFile {
    path: PathBuf,
    file: File,
    /// Offset of the next record.
    offset: u64,
    /// Bytes after which the next file begins.
    max_bytes: u64,
}

impl TraceFile {
    pub(super) fn new(path: &Path, limit: Option<u64>) -> io::Result<Self> {
        remove_old_timeline(path, limit.is_some())?;
        // Two files exist at a time: this one and the older one.
        let most = limit.map_or(u64::MAX, |limit| (limit / 2).max(MIN_FILE_BYTES));
        Ok(Self { path: path.to_owned(), file: File::create(path)?, offset: 0, max_bytes: most })
    }

    /// Returns whether nothing was written to the file yet.
    pub(super) fn is_empty(&self) -> bool {
        self.offset == 0
    }

    /// Returns the bytes of records after which they are written: a small part of a file, so that
    /// its size is kept.
    pub(super) fn write_threshold_bytes(&self) -> u64 {
        MAX_WRITE_BYTES.min(self.max_bytes / 4)
    }

    /// Returns whether the next records go to the next file.
    pub(super) fn is_full(&self) -> bool {
        self.offset.saturating_add(self.write_threshold_bytes()) > self.max_bytes
    }

    /// Begins the next file.
    pub(super) fn rotate_file(&mut self) -> io::Result<()> {
        fs::rename(&self.path, old_file_path(&self.path))?;
        self.file = File::create(&self.path)?;
        self.offset = 0;
        Ok(())
    }

    /// Writes records and takes them out of `text`.
    pub(super) fn write_records(&mut self, text: &mut String) -> io::Result<()> {
        let records = text.len() as u64;
        text.push_str(TRACE_END);
        self.file.write_all_at(text.as_bytes(), self.offset)?;
        self.offset += records;
        text.clear();
        Ok(())
    }
}

/// Removes the earlier part of an earlier timeline. Another file of this name stays.
///
/// # Errors
/// Another file, if this timeline `needs` its name.
fn remove_old_timeline(path: &Path, needs: bool) -> io::Result<()> {
    let old = old_file_path(path);
    let mut begin = [0; TRACE_BEGIN.len() + 1];
    match File::open(&old) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) => match file.read_exact_at(&mut begin, 0) {
            Ok(()) if begin.strip_prefix(TRACE_BEGIN.as_bytes()) == Some(b"{") => {
                fs::remove_file(old)
            }
            _ if !needs => Ok(()),
            _ => {
                let reason = format!("{} is no timeline, so it stays: move it", old.display());
                Err(io::Error::new(io::ErrorKind::AlreadyExists, reason))
            }
        },
    }
}

fn old_file_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(OLD_FILE_SUFFIX);
    name.into()
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations on local files that other backends do not have: reads of ranges into reused buffers
//! (new buffers cost more in page faults and clearing than the copy out of the page cache),
//! exclusive creation of files, and deletion of files that killed uploads left.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read as _, Result, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use rustix::fs::OFlags;

use crate::fork_reset_value::ForkResetValue;
use crate::local_tree;
use crate::mark_names;

/// Largest gap between two ranges that are read together.
const MAX_JOINED_GAP_BYTES: u64 = 64 << 10;
/// Smallest buffer that is pooled; the allocator handles smaller ones.
const MIN_POOLED_BYTES: usize = 64 << 10;
/// Most bytes of buffers that are kept for later reads.
const MAX_POOLED_BYTES: usize = 96 << 20;

/// Unused buffers.
static FREE_BUFFERS: ForkResetValue<Vec<Vec<u8>>> = ForkResetValue::new();

/// A buffer that returns to the pool when its last slice is dropped.
struct PooledFileBuffer(Vec<u8>);

impl AsRef<[u8]> for PooledFileBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for PooledFileBuffer {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.0);
        FREE_BUFFERS.with(|free| {
            let kept: usize = free.iter().map(Vec::capacity).sum();
            if kept + buffer.capacity() <= MAX_POOLED_BYTES {
                buffer.clear();
                free.push(buffer);
            }
        });
    }
}

/// Returns an empty buffer with capacity for `bytes`: the smallest pooled one of up to four times
/// that size, or else a new one.
fn take_buffer(bytes: usize) -> Vec<u8> {
    // A small read must not hold a large buffer while a large read allocates one.
    let fits = |buffer: &Vec<u8>| (bytes..=bytes.saturating_mul(4)).contains(&buffer.capacity());
    let found = FREE_BUFFERS.with(|free| {
        let best = (0..free.len())
            .filter(|index| fits(&free[*index]))
            .min_by_key(|index| free[*index].capacity());
        best.map(|index| free.swap_remove(index))
    });
    found.unwrap_or_else(|| Vec::with_capacity(bytes))
}

/// Opens a file and returns its size. A directory is no file. Another user's pipe in a shared
/// directory must not block this process, so it is opened without waiting and refused.
///
/// # Errors
/// The operating system's error.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64)> {
    let no_wait = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(no_wait).open(path)?;
    let bytes = check_regular(&file.metadata()?)?.len();
    Ok((file, bytes))
}

/// Returns the metadata of a file. A directory is no file.
///
/// # Errors
/// The operating system's error, and a pipe or device.
pub(crate) fn file_metadata(path: &Path) -> Result<Metadata> {
    let found = std::fs::metadata(path)?;
    check_regular(&found)?;
    Ok(found)
}

fn check_regular(found: &Metadata) -> Result<&Metadata> {
    if found.is_dir() {
        return Err(Error::new(ErrorKind::NotFound, "it is a directory"));
    }
    if !found.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is a pipe, socket or device"));
    }
    Ok(found)
}

/// Returns the bytes of each range.
///
/// # Errors
/// The system's; a range past the end is an `UnexpectedEof`.
pub(crate) fn read_ranges(path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let (mut file, _) = open_file(path)?;
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|index| ranges[*index].start);
    let mut found = vec![Bytes::new(); ranges.len()];
    let mut rest = order.as_slice();
    while let Some(first) = rest.first() {
        let start = ranges[*first].start;
        let mut end = ranges[*first].end;
        let joined = rest.iter().take_while(|index| {
            let near = ranges[**index].start <= end.saturating_add(MAX_JOINED_GAP_BYTES);
            if near {
                end = end.max(ranges[**index].end);
            }
            near
        });
        let count = joined.count();
        let whole = read_range(&mut file, start..end)?;
        for index in &rest[..count] {
            let from =
                usize::try_from(ranges[*index].start - start).map_err(|_| too_large_error())?;
            // A damaged footer may give a range that ends before it begins.
            let to = usize::try_from(ranges[*index].end.max(ranges[*index].start) - start)
                .map_err(|_| too_large_error())?;
            found[*index] = whole.slice(from..to);
        }
        rest = &rest[count..];
    }
    Ok(found)
}

fn too_large_error() -> Error {
    Error::new(ErrorKind::InvalidInput, "a range is larger than memory")
}

fn read_range(file: &mut File, range: Range<u64>) -> Result<Bytes> {
    let wanted = range.end.saturating_sub(range.start);
    let bytes = usize::try_from(wanted).map_err(|_| too_large_error())?;
    // The length may come from a damaged footer, so check it before it is allocated.
    if range.end > file.metadata()?.len() {
        let length = file.metadata()?.len();
        let text = format!("the file ends at {length}, before the end of the range: {}", range.end);
        return Err(Error::new(ErrorKind::UnexpectedEof, text));
    }
    file.seek(SeekFrom::Start(range.start))?;
    let mut buffer = take_buffer(bytes);
    // Reading to the end of a `Take` fills spare capacity without clearing it first.
    let got = file.take(wanted).read_to_end(&mut buffer)?;
    if got != bytes {
        return Err(Error::new(
            ErrorKind::UnexpectedEof,
            format!("the file shrank while being read: {got} of {bytes}"),
        ));
    }
    Ok(if bytes < MIN_POOLED_BYTES {
        Bytes::from(buffer)
    } else {
        Bytes::from_owner(PooledFileBuffer(buffer))
    })
}

/// Creates a file and its directories, unless the file exists; returns whether it was created.
///
/// # Errors
/// The operating system's error.
pub(crate) fn create_file(path: &Path, data: &[u8]) -> Result<bool> {
    let directory = path.parent().unwrap_or_else(|| Path::new("/"));
    // The kernel creates the file for one process only, even on NFS.
    let create = || File::options().write(true).create_new(true).open(path);
    let mut file = match create_in_directory(
        directory,
        |directory| std::fs::create_dir_all(directory),
        create,
    ) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(error),
    };
    file.write_all(data).map(|()| true).inspect_err(|_| drop(std::fs::remove_file(path)))
}

/// Attempts to create a file in a directory that other processes may remove.
const MAX_CREATE_ATTEMPTS: usize = 100;

/// Creates the directory and then the file in it. If another process removes the empty directory in
/// between, both are repeated.
fn create_in_directory(
    directory: &Path,
    make: impl Fn(&Path) -> Result<()>,
    mut create: impl FnMut() -> Result<File>,
) -> Result<File> {
    for _ in 1..MAX_CREATE_ATTEMPTS {
        match make(directory).and_then(|()| create()) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            done => return done,
        }
    }
    make(directory)?;
    create()
}

/// Counter that makes the names of this process's staged files unique.
static STAGED_FILE_COUNTER: AtomicU64 = AtomicU64::new(0);

/// Writes a file and creates its directories. The file is visible completely or not at all, even
/// after a power failure: the content is on disk before the name, and the name before this function
/// returns.
///
/// # Errors
/// The operating system's error; the previous content is then unchanged.
pub(crate) fn write_file(path: &Path, data: &[u8]) -> Result<()> {
    write_file_with_callback(path, |file| file.write_all(data))
}

/// Copies a file like [`write_file`].
///
/// # Errors
/// The operating system's error; the previous content is then unchanged.
pub(crate) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let (mut source, _) = open_file(from)?;
    write_file_with_callback(to, |file| std::io::copy(&mut source, file).map(drop))
}

fn write_file_with_callback(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<()>,
) -> Result<()> {
    let directory = path.parent().unwrap_or_else(|| Path::new("/"));
    let mut staged = PathBuf::new();
    let mut file = create_in_directory(directory, create_directories, || {
        let (name, file) = create_staged_file(path)?;
        staged = name;
        Ok(file)
    })?;
    // Before the rename: after a power failure, the name must not lead to an empty file.
    let written = write(&mut file).and_then(|()| file.sync_all());
    drop(file);
    written
        .and_then(|()| std::fs::rename(&staged, path))
        .inspect_err(|_| drop(std::fs::remove_file(&staged)))?;
    sync_directory_entry(path)
}

/// Creates a file beside `path`, with the name of an unfinished upload.
fn create_staged_file(path: &Path) -> Result<(PathBuf, File)> {
    loop {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(
            "#{}{}",
            std::process::id(),
            STAGED_FILE_COUNTER.fetch_add(1, Ordering::Relaxed)
        ));
        match File::options().write(true).create_new(true).open(&name) {
            Ok(file) => return Ok((name.into(), file)),
            // A killed process with the same number may have left the name.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Creates directories so that they survive a power failure.
fn create_directories(directory: &Path) -> Result<()> {
    match std::fs::metadata(directory) {
        Ok(found) if found.is_dir() => return Ok(()),
        // The creation below names a file in the way.
        Ok(_) => {}
        Err(error) if local_tree::is_absence(&error) => {}
        Err(error) => return Err(error),
    }
    // From the top down: a name on disk is of no use in a directory that is not.
    if let Some(above) = directory.parent() {
        create_directories(above)?;
        std::fs::create_dir_all(directory)?;
        return sync_directory_entry(directory);
    }
    Ok(())
}

/// Syncs a file that was written by other code, and its name, so that both survive a power failure.
///
/// # Errors
/// The system's.
pub(crate) fn sync_file(path: &Path) -> Result<()> {
    File::open(path)?.sync_all()?;
    sync_directory_entry(path)
}

/// Syncs the name of a file or directory, so that it survives a power failure, if the file system
/// supports it.
fn sync_directory_entry(path: &Path) -> Result<()> {
    let Some(directory) = path.parent() else { return Ok(()) };
    let synced = match File::open(directory) {
        Ok(directory) => directory.sync_all(),
        // A directory in which this user may create names without reading them, such as one of mode
        // 0733, cannot be opened. Then the whole file system is synced.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            File::open(path).and_then(|file| Ok(rustix::fs::syncfs(file)?))
        }
        Err(error) => Err(error),
    };
    match synced {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Ok(())
        }
        done => done,
    }
}

/// Deletes files whose names end in `#` and a number, the names of unfinished uploads.
///
/// # Errors
/// The system's.
pub(crate) fn remove_partial_uploads(directory: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let (name, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
        let name = name.to_string_lossy().into_owned();
        if !local_tree::is_staged_name(&name) {
            continue;
        }
        // Another process may have renamed or deleted the file since the listing.
        let written = match std::fs::symlink_metadata(&path).and_then(|found| found.modified()) {
            Ok(written) => written,
            Err(error) if local_tree::is_absence(&error) => continue,
            Err(error) => return Err(error),
        };
        if !mark_names::may_become_mark(&name, || Some(written)) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_created_once_and_leavings_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b.json");
        assert!(create_file(&path, b"first").unwrap());
        assert!(!create_file(&path, b"second").unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        for name in ["x.parquet#1", "y#z", "z#", "_use-a.json#1"] {
            std::fs::write(directory.path().join("a").join(name), b"").unwrap();
        }
        remove_partial_uploads(&directory.path().join("a")).unwrap();
        remove_partial_uploads(&directory.path().join("nowhere")).unwrap();
        let mut left: Vec<_> = std::fs::read_dir(directory.path().join("a"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["_use-a.json#1", "b.json", "y#z", "z#"], "a mark may be coming");
    }

    #[test]
    fn a_file_is_replaced_and_a_failure_leaves_the_one_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/c");
        for text in ["first", "second"] {
            write_file(&path, text.as_bytes()).unwrap();
            sync_file(&path).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), text.as_bytes());
        }
        assert!(write_file(&directory.path().join("a/b"), b"a directory is there").is_err());
        let names: Vec<_> = std::fs::read_dir(directory.path().join("a")).unwrap().collect();
        assert_eq!(names.len(), 1, "what failed leaves nothing: {names:?}");
    }

    #[test]
    fn ranges_come_back_in_the_order_asked_whatever_is_joined() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let data: Vec<u8> =
            (0..600_000_u32).map(|index| u8::try_from(index % 251).unwrap()).collect();
        std::fs::write(file.path(), &data).unwrap();
        let ranges =
            [500_000..500_010, 0..70_000, 70_100..70_100, 69_000..80_000, 300_000..600_000];
        for _ in 0..3 {
            let found = read_ranges(file.path(), &ranges).unwrap();
            for (range, bytes) in ranges.iter().zip(found) {
                let (from, to) =
                    (usize::try_from(range.start).unwrap(), usize::try_from(range.end).unwrap());
                assert_eq!(bytes, data[from..to]);
            }
        }
    }

    #[test]
    fn a_range_past_the_end_is_an_error_and_allocates_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"short").unwrap();
        let endless = 0..u64::MAX / 2;
        let error = read_ranges(file.path(), std::slice::from_ref(&endless)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert_eq!(read_ranges(file.path(), std::slice::from_ref(&(1..3))).unwrap(), ["ho"]);
    }
}

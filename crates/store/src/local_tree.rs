// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Recursive operations on local directories. They never follow a symbolic link below the
//! directory at which they begin, so they read and delete nothing outside of it. The directory
//! itself may be a link, because administrators place stores so.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::file_entry::FileEntry;

/// Deepest nesting of directories in a store. Each level needs an open file.
const MAX_DEPTH: usize = 100;

/// Files below a directory.
#[derive(Debug, Default)]
pub(crate) struct LocalTree {
    /// The files, with paths relative to the directory. A link to a file counts as a file.
    pub(crate) files: Vec<FileEntry>,
    /// Links to directories, whose content is not listed.
    pub(crate) linked_directories: Vec<String>,
    /// Entries that no listing shows: files with the name of an unfinished upload, links to
    /// nothing, pipes, sockets and devices.
    pub(crate) hidden: Vec<String>,
}

/// Returns whether an error means that there is no such file. All others mean that the file system
/// could not be asked.
pub(crate) fn is_absence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Returns whether a file or directory exists.
///
/// # Errors
/// A file system that cannot be asked.
pub(crate) fn path_exists(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether the path itself is a symbolic link.
///
/// # Errors
/// A file system that cannot be asked.
pub(crate) fn is_link(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(without_end_slash(path)) {
        Ok(found) => Ok(found.is_symlink()),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the path without a slash at its end, by which the system would follow a link.
fn without_end_slash(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Returns everything below a directory, sorted; nothing if it does not exist.
///
/// # Errors
/// A directory that cannot be read, or a name that is not UTF-8.
pub(crate) fn list_tree(directory: &Path) -> Result<LocalTree> {
    let mut tree = LocalTree::default();
    // A program that another thread starts must not inherit open directories.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, directory, flags, Mode::empty()) {
        Ok(opened) => list_directory(&File::from(opened), "", MAX_DEPTH, &mut tree)?,
        Err(Errno::NOENT | Errno::NOTDIR) => {}
        Err(error) => return Err(error.into()),
    }
    tree.files.sort_by(|a, b| a.path.cmp(&b.path));
    tree.linked_directories.sort();
    tree.hidden.sort();
    Ok(tree)
}

fn list_directory(opened: &File, above: &str, depth: usize, tree: &mut LocalTree) -> Result<()> {
    if depth == 0 {
        let text = format!("directories are nested more than {MAX_DEPTH} deep: {above}");
        return Err(Error::new(ErrorKind::InvalidData, text));
    }
    for entry in Dir::read_from(opened)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let text = name.to_str().map_err(|_| {
            let text = format!("a name in {above:?} is not UTF-8: {name:?}");
            Error::new(ErrorKind::InvalidData, text)
        })?;
        let path = if above.is_empty() { text.to_owned() } else { format!("{above}/{text}") };
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        // A file may be deleted between the listing of its name and the look at it.
        let Some(found) = absent_as_none(statat(opened, name, flags))? else { continue };
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let inner = absent_as_none(openat(opened.as_fd(), name, flags, Mode::empty()))?;
                if let Some(inner) = inner {
                    list_directory(&File::from(inner), &path, depth - 1, tree)?;
                }
            }
            FileType::Symlink => match statat(opened, name, AtFlags::empty()) {
                Ok(target) if FileType::from_raw_mode(target.st_mode).is_dir() => {
                    tree.linked_directories.push(path);
                }
                Ok(target) => push_file(path, &target, tree),
                // The target does not exist, or the link leads to itself.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => tree.hidden.push(path),
                Err(error) => return Err(error.into()),
            },
            _ => push_file(path, &found, tree),
        }
    }
    Ok(())
}

/// Returns the answer, or `None` if the file does not exist any more.
fn absent_as_none<T>(asked: rustix::io::Result<T>) -> Result<Option<T>> {
    match asked {
        Ok(found) => Ok(Some(found)),
        // A directory may be replaced by a link in between: the link is not followed.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn push_file(path: String, found: &Stat, tree: &mut LocalTree) {
    let regular = FileType::from_raw_mode(found.st_mode).is_file();
    if !regular || is_staged_name(&path) {
        return tree.hidden.push(path);
    }
    let bytes = u64::try_from(found.st_size).unwrap_or_default();
    tree.files.push(FileEntry { path, bytes, modified: modified_time(found) });
}

fn modified_time(found: &Stat) -> Option<SystemTime> {
    let seconds = u64::try_from(found.st_mtime).ok()?;
    let nanoseconds = u32::try_from(found.st_mtime_nsec).unwrap_or_default();
    Some(SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds))
}

/// Returns whether a path is the temporary name of a file that is being written: it ends in `#` and
/// a number. Listings do not show such files.
pub(crate) fn is_staged_name(path: &str) -> bool {
    final_name(path).is_some()
}

/// Returns the path that a file will have after it has been written, for its temporary name.
pub(crate) fn final_name(path: &str) -> Option<&str> {
    let (name, number) = path.rsplit_once('#')?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// Deletes a directory and everything in it, links as links. If the path itself is a link, only the
/// link is deleted.
///
/// # Errors
/// The system's; a missing directory is no error.
pub(crate) fn remove_tree(directory: &Path) -> Result<()> {
    // The standard library opens each directory relative to the one above it, without following
    // links, and deletes a link that it is given.
    std::fs::remove_dir_all(directory).or_else(ignore_absence)
}

/// A directory whose content is deleted. It is opened once and not through a link, so nothing that
/// lies elsewhere is deleted, whatever is renamed meanwhile.
pub(crate) struct DirectoryBeingCleared(File);

impl DirectoryBeingCleared {
    /// Opens a directory; `None` if it does not exist.
    ///
    /// # Errors
    /// A symbolic link, and the system's.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>> {
        let path = without_end_slash(path);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(CWD, &path, flags, Mode::empty()) {
            Ok(opened) => Ok(Some(Self(File::from(opened)))),
            Err(Errno::NOTDIR | Errno::LOOP) if is_link(&path)? => {
                let text = "it is a symbolic link, through which nothing is deleted";
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a file of the directory; a missing file is no error.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn remove_file(&self, name: &str) -> Result<()> {
        absent_as_none(unlinkat(&self.0, name, AtFlags::empty())).map(drop)
    }

    /// Deletes everything in the directory, links as links, except the files directly in it whose
    /// name and time `keeps` accepts. Returns the number of deleted files and links.
    ///
    /// # Errors
    /// The system's. Some files may be deleted by then.
    pub(crate) fn remove_content(
        &self,
        keeps: impl Fn(&str, Option<SystemTime>) -> bool,
    ) -> Result<usize> {
        remove_entries(&self.0, MAX_DEPTH, &keeps)
    }
}

fn remove_entries(
    opened: &File,
    depth: usize,
    keeps: &dyn Fn(&str, Option<SystemTime>) -> bool,
) -> Result<usize> {
    if depth == 0 {
        let text = format!("directories are nested more than {MAX_DEPTH} deep");
        return Err(Error::new(ErrorKind::InvalidData, text));
    }
    // The names come first: a directory that changes while it is read may omit some.
    let entries = Dir::read_from(opened)?.collect::<rustix::io::Result<Vec<_>>>()?;
    let mut removed = 0;
    for entry in entries {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Some(found) = absent_as_none(statat(opened, name, AtFlags::SYMLINK_NOFOLLOW))? else {
            continue;
        };
        if FileType::from_raw_mode(found.st_mode).is_dir() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Some(inner) = absent_as_none(openat(opened.as_fd(), name, flags, Mode::empty()))?
            {
                removed += remove_entries(&File::from(inner), depth - 1, &|_, _| false)?;
            }
            absent_as_none(unlinkat(opened, name, AtFlags::REMOVEDIR))?;
        } else if !name.to_str().is_ok_and(|name| keeps(name, modified_time(&found))) {
            removed +=
                usize::from(absent_as_none(unlinkat(opened, name, AtFlags::empty()))?.is_some());
        }
    }
    Ok(removed)
}

fn ignore_absence(error: Error) -> Result<()> {
    if is_absence(&error) { Ok(()) } else { Err(error) }
}

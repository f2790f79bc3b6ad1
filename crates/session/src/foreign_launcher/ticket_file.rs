// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The file in which rank 0 passes its ticket, which is a secret, to the other ranks.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::OFlags;

/// Largest number of bytes that are read of a ticket.
// A ticket has a few hundred bytes; a wrong file in its place must not fill the memory.
const MAX_TICKET_BYTES: u64 = 64 << 10;
/// Permissions of other users, which a ticket file or a private folder must not have.
const OTHERS_PERMISSION_MASK: u32 = 0o077;

/// A ticket file that this process wrote. Dropping it removes the file, unless another file has
/// replaced it.
#[derive(Debug)]
pub(super) struct TicketFile {
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

/// Creates a private folder, unless it exists.
///
/// # Errors
/// The folder cannot be created, or other users may use it.
pub(super) fn ensure_private_folder(folder: &Path) -> Result<(), String> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(format!("cannot make {}: {error}", folder.display()));
        }
        _ => {}
    }
    // Not `metadata`: another user could put a link to a folder of this user there.
    let found =
        fs::symlink_metadata(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if !found.is_dir() {
        return Err(format!("{} is no directory", folder.display()));
    }
    check_owner_only(&found).map_err(|reason| format!("{} {reason}", folder.display()))
}

/// Returns the first folder that is private to this user, and creates it if necessary. Another user
/// may have created some of the folders.
///
/// # Errors
/// None can be used.
pub(super) fn first_private_folder(folders: &[PathBuf]) -> Result<&Path, String> {
    let mut reasons = Vec::new();
    for folder in folders {
        match ensure_private_folder(folder) {
            Ok(()) => return Ok(folder),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

/// Writes a ticket into the first private folder that takes it.
///
/// # Errors
/// None can be used.
pub(super) fn write_private_ticket(
    folders: &[PathBuf],
    name: &str,
    text: &str,
) -> Result<TicketFile, String> {
    let mut reasons = Vec::new();
    for folder in folders {
        match ensure_private_folder(folder).and_then(|()| write_ticket(folder, name, text)) {
            Ok(written) => return Ok(written),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

/// Returns the content of the ticket file that was written last; `None` if no folder has one. With
/// `private`, folders of other users are skipped.
///
/// # Errors
/// No file can be read, and some file cannot be trusted.
pub(super) fn read_newest_ticket(
    folders: &[PathBuf],
    private: bool,
    name: &str,
) -> Result<Option<String>, String> {
    let (mut newest, mut refused) = (None, None);
    for folder in folders {
        if private && !is_private_folder(folder) {
            continue;
        }
        match read_ticket_with_time(folder, name) {
            // An earlier start may have written into another folder than this one.
            Ok(Some(found)) => newest = newest.max(Some(found)),
            Ok(None) => {}
            Err(reason) => refused = Some(reason),
        }
    }
    match (newest, refused) {
        (None, Some(reason)) => Err(reason),
        (newest, _) => Ok(newest.map(|(_, text)| text)),
    }
}

fn is_private_folder(folder: &Path) -> bool {
    fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && check_owner_only(&found).is_ok())
}

/// Checks that the folder that the user named exists.
///
/// # Errors
/// It does not exist.
pub(super) fn check_existing_folder(folder: &Path) -> Result<(), String> {
    let reason = match fs::metadata(folder) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => "it is no directory".to_owned(),
        Err(error) => error.to_string(),
    };
    let name = folder.display();
    Err(format!("FARANDOLE_RENDEZVOUS must be a directory that is there: {name} ({reason})"))
}

/// Writes `text` atomically: a reader sees either the earlier content or all of the new one.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write_ticket(folder: &Path, name: &str, text: &str) -> Result<TicketFile, String> {
    let path = folder.join(name);
    let half = folder.join(format!(".{name}.{}-{:08x}", std::process::id(), unique_suffix()));
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    let mut file = OpenOptions::new()
        .write(true)
        // With NOFOLLOW: another user who guesses the name cannot make this process write
        // elsewhere.
        .create_new(true)
        .mode(0o600)
        .custom_flags(open_flags(OFlags::NOFOLLOW))
        .open(&half)
        .map_err(failed)?;
    let written = file
        .write_all(text.as_bytes())
        // Before the rename: on a network file system, other hosts could find the name without the
        // content.
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&half, &path));
    if let Err(error) = written {
        drop(fs::remove_file(&half));
        return Err(failed(error));
    }
    let identity = file_identity(&file.metadata().map_err(failed)?);
    Ok(TicketFile { path, identity })
}

fn file_identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Returns the time of the last write of the file, and its content; `None` if it does not exist
/// yet.
///
/// # Errors
/// The file cannot be read, or another user could have written or read it.
fn read_ticket_with_time(
    folder: &Path,
    name: &str,
) -> Result<Option<(SystemTime, String)>, String> {
    // Listing makes network file systems look again: they cache that a file does not exist.
    drop(fs::read_dir(folder).map(Iterator::count));
    let path = folder.join(name);
    let failed = |error: std::io::Error| format!("cannot read it: {error}");
    let mut file = match OpenOptions::new()
        .read(true)
        // NONBLOCK: opening a FIFO of that name would wait for a writer for ever.
        .custom_flags(open_flags(OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC))
        .open(&path)
    {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err("it is a symbolic link".to_owned());
        }
        other => other.map_err(failed)?,
    };
    // The open file is checked, not the path, which could be replaced in between.
    check_ticket_file(&file)?;
    let written = file.metadata().and_then(|found| found.modified()).map_err(failed)?;
    let mut text = String::new();
    (&mut file).take(MAX_TICKET_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(Some((written, text)))
}

fn check_ticket_file(file: &File) -> Result<(), String> {
    let found = file.metadata().map_err(|error| format!("cannot read it: {error}"))?;
    if !found.is_file() {
        return Err("it is no plain file".to_owned());
    }
    check_owner_only(&found)
}

/// # Errors
/// Another user owns it or may use it.
fn check_owner_only(found: &Metadata) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own {
        return Err(format!("belongs to user {} and not to {own}", found.uid()));
    }
    if found.mode() & OTHERS_PERMISSION_MASK != 0 {
        return Err(format!("can be used by others: its mode is {:o}", found.mode() & 0o7777));
    }
    Ok(())
}

fn open_flags(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or_default()
}

/// Returns a number that, with the process number, makes a temporary name unique on this host.
fn unique_suffix() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map(|now| now.subsec_nanos()).unwrap_or_default()
}

impl Drop for TicketFile {
    fn drop(&mut self) {
        // A later start of the same job may have replaced the file.
        if fs::symlink_metadata(&self.path)
            .is_ok_and(|found| file_identity(&found) == self.identity)
        {
            drop(fs::remove_file(&self.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("farandole-file-{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&folder));
        ensure_private_folder(&folder).unwrap();
        folder
    }

    fn read_ticket(folder: &Path, name: &str) -> Result<Option<String>, String> {
        read_newest_ticket(&[folder.to_owned()], true, name)
    }

    #[test]
    fn a_folder_that_another_user_could_use_is_passed_over_by_all_ranks() {
        let base = folder("candidates");
        let folders = [base.join("taken"), base.join("no/parent"), base.join("own")];
        let home = base.join("home");
        let all: Vec<PathBuf> = folders.iter().cloned().chain([home.clone()]).collect();
        fs::create_dir(&folders[0]).unwrap();
        mode(&folders[0], 0o755);
        assert_eq!(first_private_folder(&all).unwrap(), folders[2]);
        let written = write_private_ticket(&all, "t", "first").unwrap();
        assert_eq!(fs::read(folders[2].join("t")).unwrap(), b"first");
        assert_eq!(read_newest_ticket(&all, true, "t"), Ok(Some("first".to_owned())));
        // A file in another user's folder counts for no rank.
        fs::write(folders[0].join("t"), "theirs").unwrap();
        mode(&folders[0].join("t"), 0o600);
        assert_eq!(read_newest_ticket(&all, true, "t"), Ok(Some("first".to_owned())));
        // The other user takes the folder away before the next start of rank 0.
        drop(written);
        fs::remove_dir(&folders[2]).unwrap();
        fs::write(&folders[2], b"").unwrap();
        let written = write_private_ticket(&all, "t", "second").unwrap();
        assert!(home.join("t").exists());
        fs::remove_file(&folders[2]).unwrap();
        ensure_private_folder(&folders[2]).unwrap();
        assert_eq!(read_newest_ticket(&all, true, "t"), Ok(Some("second".to_owned())));
        // A ticket that an earlier start left does not hide the newer one.
        let later = write_ticket(&folders[2], "t", "third").unwrap();
        assert_eq!(read_newest_ticket(&all, true, "t"), Ok(Some("third".to_owned())));
        drop((written, later));
        assert_eq!(read_newest_ticket(&all, true, "t"), Ok(None));
        let error = first_private_folder(&all[..2]).unwrap_err();
        assert!(error.contains("taken can be used by others") && error.contains("cannot make"));
        fs::remove_dir_all(&base).unwrap();
    }

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_ticket_of_a_later_start_stays_when_an_earlier_one_gives_up() {
        let folder = folder("later");
        let earlier = write_ticket(&folder, "t", "earlier").unwrap();
        let later = write_ticket(&folder, "t", "later").unwrap();
        drop(earlier);
        assert_eq!(read_ticket(&folder, "t"), Ok(Some("later".to_owned())));
        drop(later);
        assert_eq!(read_ticket(&folder, "t"), Ok(None));
    }

    #[test]
    fn a_ticket_is_there_until_its_writer_lets_go_of_it() {
        let folder = folder("there");
        assert_eq!(read_ticket(&folder, "t"), Ok(None));
        let first = write_ticket(&folder, "t", "old").unwrap();
        std::mem::forget(first);
        let written = write_ticket(&folder, "t", "new").unwrap();
        assert_eq!(read_ticket(&folder, "t").unwrap().unwrap(), "new");
        assert_eq!(fs::metadata(folder.join("t")).unwrap().mode() & 0o7777, 0o600);
        drop(written);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_file_that_other_users_could_write_or_read_is_not_trusted() {
        let folder = folder("others");
        let written = write_ticket(&folder, "t", "x").unwrap();
        let path = folder.join("t");
        for (bits, shown) in [(0o640, "640"), (0o602, "602"), (0o644, "644")] {
            mode(&path, bits);
            let error = read_ticket(&folder, "t").unwrap_err();
            assert_eq!(error, format!("can be used by others: its mode is {shown}"));
        }
        drop(written);
        symlink("/etc/passwd", &path).unwrap();
        assert_eq!(read_ticket(&folder, "t").unwrap_err(), "it is a symbolic link");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(read_ticket(&folder, "t").unwrap_err(), "it is no plain file");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_private_folder_is_the_users_alone_and_no_link() {
        let folder = folder("private");
        mode(&folder, 0o750);
        assert!(
            ensure_private_folder(&folder)
                .unwrap_err()
                .ends_with("can be used by others: its mode is 750")
        );
        let link = folder.with_extension("link");
        drop(fs::remove_file(&link));
        mode(&folder, 0o700);
        symlink(&folder, &link).unwrap();
        assert!(ensure_private_folder(&link).unwrap_err().ends_with("is no directory"));
        assert!(
            ensure_private_folder(&folder.join("a/b")).unwrap_err().starts_with("cannot make ")
        );
        assert!(
            check_existing_folder(&folder.join("a"))
                .unwrap_err()
                .contains("must be a directory that is there: /")
        );
        fs::remove_file(&link).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}

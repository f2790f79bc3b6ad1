// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The file through which rank 0 passes its ticket, which is a secret, to the other ranks.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Longest ticket that is read.
const MOST: u64 = 64 << 10;
/// Permissions that only the owner may have on such a file, or on a private folder.
const OTHERS: u32 = 0o077;

/// A ticket file that this process has written; it goes with this value, unless another one took
/// its place.
#[derive(Debug)]
pub(super) struct Written {
    path: PathBuf,
    /// Device and number of the file.
    identity: (u64, u64),
}

/// Makes a private folder unless it is there.
///
/// # Errors
/// It is not the user's alone, or cannot be made.
pub(super) fn private(folder: &Path) -> Result<(), String> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(format!("cannot make {}: {error}", folder.display()));
        }
        _ => {}
    }
    let found =
        fs::symlink_metadata(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if !found.is_dir() {
        return Err(format!("{} is no directory", folder.display()));
    }
    owned(&found).map_err(|reason| format!("{} {reason}", folder.display()))
}

/// A folder named by the user.
///
/// # Errors
/// There is none.
pub(super) fn existing(folder: &Path) -> Result<(), String> {
    if folder.is_dir() {
        return Ok(());
    }
    Err(format!("FARANDOLE_RENDEZVOUS must be a directory that is there: {}", folder.display()))
}

/// Writes `text` so that a reader sees all of it or none, instead of what an earlier job has left.
///
/// # Errors
/// What the system says.
pub(super) fn write(folder: &Path, name: &str, text: &str) -> Result<Written, String> {
    let path = folder.join(name);
    let half = folder.join(format!(".{name}.{}-{:08x}", std::process::id(), draw()));
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(flags(OFlags::NOFOLLOW))
        .open(&half)
        .map_err(failed)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&half, &path));
    if let Err(error) = written {
        drop(fs::remove_file(&half));
        return Err(failed(error));
    }
    let identity = identity(&file.metadata().map_err(failed)?);
    Ok(Written { path, identity })
}

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// The content of the file; `None` if it does not exist yet.
///
/// # Errors
/// It is not one that only its owner, this user, can have written and read.
pub(super) fn read(folder: &Path, name: &str) -> Result<Option<String>, String> {
    // Listing makes network file systems look again instead of remembering that nothing was there.
    drop(fs::read_dir(folder).map(Iterator::count));
    let path = folder.join(name);
    let failed = |error: std::io::Error| format!("cannot read it: {error}");
    let mut file = match OpenOptions::new()
        .read(true)
        .custom_flags(flags(OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC))
        .open(&path)
    {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err("it is a symbolic link".to_owned());
        }
        other => other.map_err(failed)?,
    };
    check(&file)?;
    let mut text = String::new();
    (&mut file).take(MOST).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

fn check(file: &File) -> Result<(), String> {
    let found = file.metadata().map_err(|error| format!("cannot read it: {error}"))?;
    if !found.is_file() {
        return Err("it is no plain file".to_owned());
    }
    owned(&found)
}

/// # Errors
/// Others own it or may use it.
fn owned(found: &Metadata) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own {
        return Err(format!("belongs to user {} and not to {own}", found.uid()));
    }
    if found.mode() & OTHERS != 0 {
        return Err(format!("can be used by others: its mode is {:o}", found.mode() & 0o7777));
    }
    Ok(())
}

fn flags(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or_default()
}

/// A number that no other process of this host draws at the same time.
fn draw() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map(|now| now.subsec_nanos()).unwrap_or_default()
}

impl Drop for Written {
    fn drop(&mut self) {
        // A later start of the same job may have put its own there.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity) {
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
        private(&folder).unwrap();
        folder
    }

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_ticket_of_a_later_start_stays_when_an_earlier_one_gives_up() {
        let folder = folder("later");
        let earlier = write(&folder, "t", "earlier").unwrap();
        let later = write(&folder, "t", "later").unwrap();
        drop(earlier);
        assert_eq!(read(&folder, "t"), Ok(Some("later".to_owned())));
        drop(later);
        assert_eq!(read(&folder, "t"), Ok(None));
    }

    #[test]
    fn a_ticket_is_there_until_its_writer_lets_go_of_it() {
        let folder = folder("there");
        assert_eq!(read(&folder, "t"), Ok(None));
        let first = write(&folder, "t", "old").unwrap();
        std::mem::forget(first);
        let written = write(&folder, "t", "new").unwrap();
        assert_eq!(read(&folder, "t").unwrap().unwrap(), "new");
        assert_eq!(fs::metadata(folder.join("t")).unwrap().mode() & 0o7777, 0o600);
        drop(written);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_file_that_other_users_could_write_or_read_is_not_trusted() {
        let folder = folder("others");
        let written = write(&folder, "t", "x").unwrap();
        let path = folder.join("t");
        for (bits, shown) in [(0o640, "640"), (0o602, "602"), (0o644, "644")] {
            mode(&path, bits);
            let error = read(&folder, "t").unwrap_err();
            assert_eq!(error, format!("can be used by others: its mode is {shown}"));
        }
        drop(written);
        symlink("/etc/passwd", &path).unwrap();
        assert_eq!(read(&folder, "t").unwrap_err(), "it is a symbolic link");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(read(&folder, "t").unwrap_err(), "it is no plain file");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_private_folder_is_the_users_alone_and_no_link() {
        let folder = folder("private");
        mode(&folder, 0o750);
        assert!(private(&folder).unwrap_err().ends_with("can be used by others: its mode is 750"));
        let link = folder.with_extension("link");
        drop(fs::remove_file(&link));
        mode(&folder, 0o700);
        symlink(&folder, &link).unwrap();
        assert!(private(&link).unwrap_err().ends_with("is no directory"));
        assert!(private(&folder.join("a/b")).unwrap_err().starts_with("cannot make "));
        assert!(
            existing(&folder.join("a"))
                .unwrap_err()
                .contains("must be a directory that is there: /")
        );
        fs::remove_file(&link).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}

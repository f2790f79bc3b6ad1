// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A file from which the registrar of an elastic job continues after its process was killed.
//!
//! Each record is a line of JSON, in the order of what happened. The first line is the [`Head`]. A
//! record is written before its effects can be seen. The kernel keeps what a killed process has
//! written, so no record waits for the disk. A last line that is cut off was not seen by anybody,
//! and is removed.
//!
//! If the host loses power, the last records may be lost, and workers on other hosts may know more
//! than the file. So the head contains the boot id, and a job from before the last start of the
//! host is not continued. A new file is on the disk before it gets its name, so a file under that
//! name always has a head.
//!
//! The head contains the token and the private key of the job. Only the owner may read the file. A
//! lock gives it to one process at a time. After it has grown by [`LONG`], a new file that contains
//! only the present state, and what happened since, replaces it. Until then, records are added to
//! the old one: nothing waits for the new file to be on the disk.

#[cfg(test)]
mod tests;

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::host::boot_id;
use crate::kv::Pair;
use crate::meetings::Formed;
use crate::membership::elastic::{Elastic, Step};
use crate::ticket::Ticket;
use crate::tls::Identity;

/// The release: another one may take other decisions from the same records.
const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Bytes by which the file grows before a new one replaces it.
const LONG: u64 = 4 << 20;
/// Longest first line. A longer one is not a head.
const LONGEST_HEAD: u64 = 8 << 20;
const GIVE_UP: &str = "or remove the file to give up the job";

/// The values that stay the same for the life of a job.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Head {
    /// The release that wrote the file.
    farandole: String,
    /// The host's boot id.
    boot: String,
    /// The purpose of the job, in the words of its user.
    purpose: String,
    /// Token, fingerprint, name and addresses.
    ticket: String,
    certificate: String,
    key: String,
    pub(crate) port: u16,
}

/// The part of a head that every release understands.
#[derive(Deserialize)]
struct Written {
    farandole: String,
}

/// The event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Record {
    /// The members of the job. Records before it have no effect any more.
    State { at: Duration, machine: Box<Elastic> },
    /// A step of that.
    Step(Step),
    /// A key got its value.
    Put(Pair),
    /// Ranks have met.
    Met(Formed),
}

/// The state that an earlier registrar has left.
pub(crate) struct Left {
    pub(crate) head: Head,
    pub(crate) records: Vec<Record>,
}

/// The file. If no job has begun when it is dropped, the file is removed.
pub struct Journal {
    path: PathBuf,
    purpose: String,
    left: Option<Left>,
    writing: Mutex<Writing>,
}

struct Writing {
    /// `None` after a record could not be written, or when the job is over.
    file: Option<File>,
    grown: u64,
    head: Option<Head>,
    /// While a new file is written: records that were added to the old one since the state with
    /// which the new one begins.
    since: Option<Vec<u8>>,
}

impl Head {
    fn new(purpose: String, ticket: &Ticket, identity: &Identity, port: u16) -> Self {
        Self {
            farandole: RELEASE.to_owned(),
            boot: boot_id(),
            purpose,
            ticket: ticket.encode(),
            certificate: identity.certificate_pem.clone(),
            key: identity.key_pem.clone(),
            port,
        }
    }

    pub(crate) fn ticket(&self) -> Result<Ticket> {
        self.ticket.parse()
    }

    pub(crate) fn identity(&self, ticket: &Ticket) -> Identity {
        let (certificate_pem, key_pem) = (self.certificate.clone(), self.key.clone());
        Identity { certificate_pem, key_pem, fingerprint: ticket.fingerprint }
    }
}

impl Journal {
    /// Opens the file, or creates it. `purpose` says what the job is for; a job for another purpose
    /// is not continued.
    ///
    /// # Errors
    /// `Journal` if the file cannot be read or written, is something else, belongs to another job,
    /// user or release, or another process has it. The file is unchanged then.
    pub fn open(path: &Path, purpose: &str) -> Result<Self> {
        let failed = |reason: String| Error::Journal { path: path.display().to_string(), reason };
        let file = take(path).map_err(failed)?;
        let (left, whole) = read(&file, purpose).map_err(failed)?;
        let left = left.filter(|left| {
            let current = left.head.boot == boot_id();
            if !current {
                let path = path.display();
                tracing::warn!(%path, "this host was started after the journal was written: the \
                                       job begins from the start");
            }
            current
        });
        // An empty file that existed may be readable by others.
        file.set_permissions(Permissions::from_mode(0o600))
            .map_err(|error| failed(error.to_string()))?;
        // A line that was cut off would spoil the next one.
        file.set_len(if left.is_some() { whole } else { 0 })
            .map_err(|error| failed(error.to_string()))?;
        let head = left.as_ref().map(|left| left.head.clone());
        let writing = Mutex::new(Writing { file: Some(file), grown: 0, head, since: None });
        Ok(Self { path: path.to_owned(), purpose: purpose.to_owned(), left, writing })
    }

    /// Returns the state that an earlier registrar has left; returned once.
    pub(crate) fn left(&mut self) -> Option<Left> {
        self.left.take()
    }

    /// Begins the journal of a new job.
    ///
    /// # Errors
    /// `Journal`.
    pub(crate) fn begin(
        &self,
        ticket: &Ticket,
        identity: &Identity,
        port: u16,
        machine: &Elastic,
    ) -> Result<()> {
        let head = Head::new(self.purpose.clone(), ticket, identity, port);
        self.writing.lock().head = Some(head);
        let state = Record::State { at: Duration::ZERO, machine: Box::new(machine.clone()) };
        self.renew(&[state]).map_err(|error| {
            // No job has begun.
            self.writing.lock().head = None;
            Error::Journal { path: self.path.display().to_string(), reason: error.to_string() }
        })
    }

    /// Adds what happened.
    pub(crate) fn note(&self, record: &Record) {
        let mut writing = self.writing.lock();
        let Some(file) = &mut writing.file else { return };
        match line(record).and_then(|line| file.write_all(&line).map(|()| line)) {
            Ok(line) => {
                writing.grown += line.len() as u64;
                if let Some(since) = &mut writing.since {
                    since.extend(line);
                }
            }
            Err(error) => self.give_up(&mut writing, &error),
        }
    }

    /// Returns whether it has grown so much that the present state should replace it. Does not wait
    /// for writers.
    pub(crate) fn is_long(&self) -> bool {
        let long = |writing: &Writing| {
            writing.file.is_some() && writing.since.is_none() && writing.grown >= LONG
        };
        self.writing.try_lock().is_some_and(|writing| long(&writing))
    }

    /// Notes everything from now on after the state with which the caller will replace the file.
    /// Returns false if there is no file, or if another caller is replacing it.
    pub(crate) fn begin_whole(&self) -> bool {
        let mut writing = self.writing.lock();
        let free = writing.file.is_some() && writing.since.is_none();
        if free {
            writing.since = Some(Vec::new());
        }
        free
    }

    /// Replaces the file by one that contains only these records, and those noted since
    /// [`Journal::begin_whole`].
    pub(crate) fn replace(&self, records: &[Record]) {
        if let Err(error) = self.renew(records) {
            self.give_up(&mut self.writing.lock(), &error);
        }
    }

    fn renew(&self, records: &[Record]) -> io::Result<()> {
        let head = {
            let writing = self.writing.lock();
            let (Some(head), Some(present)) = (&writing.head, &writing.file) else { return Ok(()) };
            self.check_place(present)?;
            head.clone()
        };
        let new = self.new_path();
        let renewed = begun(&new, &head, records).and_then(|file| self.put_in_place(file, &new));
        if renewed.is_err() {
            // It contains secrets.
            drop(std::fs::remove_file(&new));
        }
        renewed
    }

    /// Gives the new file its name, once it has everything that the old one has.
    fn put_in_place(&self, mut file: File, new: &Path) -> io::Result<()> {
        let mut writing = self.writing.lock();
        let Some(present) = &writing.file else {
            // The job is over by now.
            return std::fs::remove_file(new);
        };
        self.check_place(present)?;
        let since = writing.since.take().unwrap_or_default();
        file.write_all(&since)?;
        std::fs::rename(new, &self.path)?;
        (writing.file, writing.grown) = (Some(file), since.len() as u64);
        Ok(())
    }

    fn check_place(&self, present: &File) -> io::Result<()> {
        if is_at(present, &self.path) {
            return Ok(());
        }
        Err(io::Error::other("another file has its name, or it was removed"))
    }

    fn new_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        PathBuf::from(name)
    }

    /// An incomplete journal is removed: a registrar that continued from it would decide by an old
    /// state.
    fn give_up(&self, writing: &mut Writing, error: &io::Error) {
        let path = self.path.display();
        tracing::error!(%error, %path, "the journal cannot be written: if this launcher is killed, \
                                        the job ends");
        self.end(writing);
    }

    /// Returns a disk that takes nothing until the guard is dropped.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Drop {
        self.writing.lock()
    }

    /// The job is over, and the file is removed.
    pub(crate) fn finish(&self) {
        self.end(&mut self.writing.lock());
    }

    fn end(&self, writing: &mut Writing) {
        let Some(file) = writing.file.take() else { return };
        if writing.since.take().is_some() {
            // The process may end before the new file is finished.
            drop(std::fs::remove_file(self.new_path()));
        }
        // If it cannot be removed, it is at least empty.
        drop(file.set_len(0));
        if is_at(&file, &self.path) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let mut writing = self.writing.lock();
        if writing.head.is_none() {
            self.end(&mut writing);
        }
    }
}

/// Returns a new file that is on the disk.
fn begun(new: &Path, head: &Head, records: &[Record]) -> io::Result<File> {
    // A killed process may have left one.
    drop(std::fs::remove_file(new));
    let mut file =
        OpenOptions::new().create_new(true).append(true).read(true).mode(0o600).open(new)?;
    // Locked before anybody can find it under its name.
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let mut text = line(head)?;
    for record in records {
        text.extend(line(record)?);
    }
    file.write_all(&text)?;
    file.sync_data()?;
    Ok(file)
}

/// Opens the file and locks it.
fn take(path: &Path) -> std::result::Result<File, String> {
    let open = || OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path);
    loop {
        let file = open().map_err(|error| error.to_string())?;
        let opened = file.metadata().map_err(|error| error.to_string())?;
        if !opened.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        // The owner could read the secrets that are written to it.
        if opened.uid() != geteuid().as_raw() {
            return Err("it belongs to another user".to_owned());
        }
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            let held = error == rustix::io::Errno::WOULDBLOCK;
            return Err(if held {
                "another launcher uses it".to_owned()
            } else {
                error.to_string()
            });
        }
        // Otherwise another file has replaced it in the meantime.
        if is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// Returns whether a path names an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |found: Metadata| (found.dev(), found.ino());
    let named = std::fs::metadata(path).map(number);
    named.is_ok_and(|named| file.metadata().map(number).is_ok_and(|open| open == named))
}

/// Returns the content of the file, and the length of its complete lines.
fn read(file: &File, purpose: &str) -> std::result::Result<(Option<Left>, u64), String> {
    let mut lines = BufReader::new(file);
    let mut text = Vec::new();
    let mut whole = 0;
    let length = (&mut lines).take(LONGEST_HEAD).read_until(b'\n', &mut text);
    if length.map_err(|error| error.to_string())? == 0 {
        return Ok((None, 0));
    }
    let head = head(&text, purpose)?;
    let mut records = Vec::new();
    while text.last() == Some(&b'\n') {
        whole += text.len() as u64;
        text.clear();
        lines.read_until(b'\n', &mut text).map_err(|error| error.to_string())?;
        if text.last() == Some(&b'\n') {
            let number = records.len() + 2;
            let damaged =
                |error| format!("line {number} is damaged ({error}): restore it, {GIVE_UP}");
            records.push(serde_json::from_slice(&text).map_err(damaged)?);
        }
    }
    if !matches!(records.first(), Some(Record::State { .. })) {
        return Err(format!("line 2 is damaged: restore it, {GIVE_UP}"));
    }
    Ok((Some(Left { head, records }), whole))
}

fn head(text: &[u8], purpose: &str) -> std::result::Result<Head, String> {
    let other = |_| "it is not a journal: use another path".to_owned();
    let Written { farandole } = serde_json::from_slice(text).map_err(other)?;
    if farandole != RELEASE {
        return Err(format!(
            "farandole {farandole} wrote it, and this is {RELEASE}: use that release, {GIVE_UP}"
        ));
    }
    let head: Head = serde_json::from_slice(text)
        .map_err(|error| format!("line 1 is damaged ({error}): restore it, {GIVE_UP}"))?;
    if head.purpose != purpose {
        return Err(format!("it is of another job: run {}, {GIVE_UP}", head.purpose));
    }
    Ok(head)
}

fn line(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The journal: a file from which the registrar of an elastic job continues after its process was
//! killed.
//!
//! Each record is a line of JSON, in the order of the steps. The first line is the [`JournalHead`].
//! A record is written before its effects can be seen. The kernel keeps all data that a killed
//! process has written, so no record waits for the disk. If the last line is cut off, its effects
//! were not seen by any process, and the line is removed.
//!
//! If the host loses power, the last records may be lost, and workers on other hosts may have seen
//! effects that are not in the file. So the head contains the boot id, and a job from before the
//! last start of the host is not continued. A new file is on the disk before it gets its name, so a
//! file under that name always has a head.
//!
//! The head contains the token and the private key of the job. Only the owner may read the file. A
//! lock limits the file to one process at a time. When the file has grown by
//! [`REPLACE_AFTER_BYTES`], a new file replaces it, with only the present state and the later
//! records. Until then, records are added to the old file: no record waits until the new file is on
//! the disk.

#[cfg(test)]
mod tests;

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use farandole_membership::{ElasticMembership, JournalStep};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::formation::FormedWorldRecord;
use crate::generation_key_values::KeyValuePair;
use crate::local_host_facts::boot_id;
use crate::ticket::Ticket;
use crate::tls::CertificateIdentity;

/// The release that writes the file. Another release may take other decisions from the same
/// records.
const RELEASE_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Bytes by which the file grows before a new one replaces it.
const REPLACE_AFTER_BYTES: u64 = 4 << 20;
/// Longest first line. A longer one is not a head.
const MAX_HEAD_BYTES: u64 = 8 << 20;
const GIVE_UP_HINT: &str = "or remove the file to give up the job";

/// The values that stay the same for the life of a job.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct JournalHead {
    /// The release that wrote the file.
    farandole: String,
    /// The host's boot id.
    boot: String,
    /// The purpose of the job, as its user has described it.
    purpose: String,
    /// Token, fingerprint, name and addresses.
    ticket: String,
    certificate: String,
    key: String,
    pub(crate) port: u16,
}

/// The part of a head that every release understands.
#[derive(Deserialize)]
struct JournalRelease {
    farandole: String,
}

/// A line of the journal after its head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum JournalRecord {
    /// The members of the job. Earlier records have no effect any more.
    State { at: Duration, machine: Box<ElasticMembership> },
    /// A step of the membership.
    Step(JournalStep),
    /// A key got its value.
    Put(KeyValuePair),
    /// A world has formed.
    #[serde(rename = "Met")]
    WorldFormed(FormedWorldRecord),
}

/// The journal of a job that did not end, as an earlier registrar left it.
pub(crate) struct UnfinishedJournal {
    pub(crate) head: JournalHead,
    pub(crate) records: Vec<JournalRecord>,
}

/// A journal file. If no job has begun when the value is dropped, the file is removed.
pub struct MembershipJournal {
    path: PathBuf,
    purpose: String,
    unfinished: Option<UnfinishedJournal>,
    writing: Mutex<JournalWriter>,
}

struct JournalWriter {
    /// `None` if a record could not be written, or if the job is over.
    file: Option<File>,
    grown_bytes: u64,
    head: Option<JournalHead>,
    /// While a replacement file is written: records that were added to the old file after the state
    /// with which the replacement begins.
    added_since: Option<Vec<u8>>,
}

impl JournalHead {
    fn new(purpose: String, ticket: &Ticket, identity: &CertificateIdentity, port: u16) -> Self {
        Self {
            farandole: RELEASE_VERSION.to_owned(),
            // After a loss of power, records may be missing that other hosts have seen.
            boot: boot_id(),
            purpose,
            ticket: ticket.encode_text(),
            certificate: identity.certificate_pem.clone(),
            key: identity.key_pem.clone(),
            port,
        }
    }

    pub(crate) fn parse_ticket(&self) -> Result<Ticket> {
        self.ticket.parse()
    }

    pub(crate) fn certificate_identity(&self, ticket: &Ticket) -> CertificateIdentity {
        let (certificate_pem, key_pem) = (self.certificate.clone(), self.key.clone());
        CertificateIdentity { certificate_pem, key_pem, fingerprint: ticket.fingerprint }
    }
}

impl MembershipJournal {
    /// Opens or creates the file. `purpose` describes the job; the job of a file with another
    /// purpose is not continued.
    ///
    /// # Errors
    /// `Journal` if the file cannot be read or written, is no journal, or belongs to another job,
    /// user or release, or if another process has it. The file is unchanged then.
    pub fn open_or_create(path: &Path, purpose: &str) -> Result<Self> {
        let failed = |reason: String| Error::Journal { path: path.display().to_string(), reason };
        let file = open_locked_journal(path).map_err(failed)?;
        let (unfinished, whole) = read_journal(&file, purpose).map_err(failed)?;
        let unfinished = unfinished.filter(|unfinished| {
            let current = unfinished.head.boot == boot_id();
            if !current {
                let path = path.display();
                tracing::warn!(%path, "this host was started after the journal was written: the \
                                       job begins from the start");
            }
            current
        });
        // An empty file that existed before may be readable by other users.
        file.set_permissions(Permissions::from_mode(0o600))
            .map_err(|error| failed(error.to_string()))?;
        // Remove a line that is cut off: the next record would be appended to it.
        file.set_len(if unfinished.is_some() { whole } else { 0 })
            .map_err(|error| failed(error.to_string()))?;
        let head = unfinished.as_ref().map(|unfinished| unfinished.head.clone());
        let writing =
            Mutex::new(JournalWriter { file: Some(file), grown_bytes: 0, head, added_since: None });
        Ok(Self { path: path.to_owned(), purpose: purpose.to_owned(), unfinished, writing })
    }

    /// Returns the unfinished job of an earlier registrar, once.
    pub(crate) fn take_unfinished_job(&mut self) -> Option<UnfinishedJournal> {
        self.unfinished.take()
    }

    /// Begins the journal of a new job.
    ///
    /// # Errors
    /// `Journal`.
    pub(crate) fn begin_new_journal(
        &self,
        ticket: &Ticket,
        identity: &CertificateIdentity,
        port: u16,
        machine: &ElasticMembership,
    ) -> Result<()> {
        let head = JournalHead::new(self.purpose.clone(), ticket, identity, port);
        // Before the file: `write_replacement` takes the head from here.
        self.writing.lock().head = Some(head);
        let state = JournalRecord::State { at: Duration::ZERO, machine: Box::new(machine.clone()) };
        self.write_replacement(&[state]).map_err(|error| {
            // Without a head, the drop removes the file: no job has begun.
            self.writing.lock().head = None;
            Error::Journal { path: self.path.display().to_string(), reason: error.to_string() }
        })
    }

    /// Appends a record.
    pub(crate) fn append_record(&self, record: &JournalRecord) {
        let mut writing = self.writing.lock();
        let Some(file) = &mut writing.file else { return };
        // One write for the whole line: a process that is killed leaves no half line, except at a
        // full disk.
        match json_line(record).and_then(|line| file.write_all(&line).map(|()| line)) {
            Ok(line) => {
                writing.grown_bytes += line.len() as u64;
                if let Some(since) = &mut writing.added_since {
                    since.extend(line);
                }
            }
            Err(error) => self.abandon_journal(&mut writing, &error),
        }
    }

    /// Returns whether the file has grown so much that the present state should replace it. Does
    /// not wait for writers.
    pub(crate) fn needs_replacement(&self) -> bool {
        let long = |writing: &JournalWriter| {
            writing.file.is_some()
                && writing.added_since.is_none()
                && writing.grown_bytes >= REPLACE_AFTER_BYTES
        };
        // The clock of the registrar asks, and must not wait for a disk that hangs.
        self.writing.try_lock().is_some_and(|writing| long(&writing))
    }

    /// Starts to collect all records that follow the state with which the caller will replace the
    /// file. Returns false if there is no file, or if another caller is replacing it.
    pub(crate) fn begin_replacement(&self) -> bool {
        let mut writing = self.writing.lock();
        let free = writing.file.is_some() && writing.added_since.is_none();
        if free {
            writing.added_since = Some(Vec::new());
        }
        free
    }

    /// Replaces the file by a file that contains only these records, and the records collected
    /// since [`Self::begin_replacement`]. If there is no room for it, the file stays, which is
    /// complete, and a later call tries again.
    pub(crate) fn replace_records(&self, records: &[JournalRecord]) {
        let Err(error) = self.write_replacement(records) else { return };
        let mut writing = self.writing.lock();
        // If another launcher has replaced the file, writing on would mix two jobs.
        let is_ours =
            writing.file.as_ref().is_some_and(|file| path_names_open_file(file, &self.path));
        if !is_ours {
            return self.abandon_journal(&mut writing, &error);
        }
        (writing.added_since, writing.grown_bytes) = (None, 0);
        let path = self.path.display();
        tracing::warn!(%error, %path, "the journal cannot be shortened now and keeps growing");
    }

    fn write_replacement(&self, records: &[JournalRecord]) -> io::Result<()> {
        let head = {
            let writing = self.writing.lock();
            let (Some(head), Some(present)) = (&writing.head, &writing.file) else { return Ok(()) };
            self.check_file_identity(present)?;
            head.clone()
        };
        let new = self.replacement_path();
        let renewed = create_replacement(&new, &head, records)
            .and_then(|file| self.install_replacement(file, &new));
        if renewed.is_err() {
            // The replacement contains secrets.
            drop(std::fs::remove_file(&new));
        }
        renewed
    }

    /// Completes the replacement with the collected records, and renames it over the old file.
    fn install_replacement(&self, mut file: File, new: &Path) -> io::Result<()> {
        let mut writing = self.writing.lock();
        let Some(present) = &writing.file else {
            // The job has ended in the meantime.
            return std::fs::remove_file(new);
        };
        self.check_file_identity(present)?;
        let since = writing.added_since.take().unwrap_or_default();
        file.write_all(&since)?;
        // Rename last: a process that is killed earlier leaves the old file, which is complete.
        std::fs::rename(new, &self.path)?;
        (writing.file, writing.grown_bytes) = (Some(file), since.len() as u64);
        Ok(())
    }

    fn check_file_identity(&self, present: &File) -> io::Result<()> {
        if path_names_open_file(present, &self.path) {
            return Ok(());
        }
        Err(io::Error::other("another file has its name, or it was removed"))
    }

    fn replacement_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        PathBuf::from(name)
    }

    /// Removes an incomplete journal. A registrar that continued from it would decide by an old
    /// state.
    fn abandon_journal(&self, writing: &mut JournalWriter, error: &io::Error) {
        let path = self.path.display();
        tracing::error!(%error, %path, "the journal cannot be written: if this launcher is killed, \
                                        the job ends");
        self.remove_journal(writing);
    }

    /// Blocks all writes, like a disk that hangs, until the guard is dropped.
    #[cfg(test)]
    pub(crate) fn block_writes(&self) -> impl Drop {
        self.writing.lock()
    }

    /// Removes the file, because the job is over.
    pub(crate) fn remove_finished_journal(&self) {
        self.remove_journal(&mut self.writing.lock());
    }

    fn remove_journal(&self, writing: &mut JournalWriter) {
        let Some(file) = writing.file.take() else { return };
        if writing.added_since.take().is_some() {
            // The process may end before the new file is finished.
            drop(std::fs::remove_file(self.replacement_path()));
        }
        // If the removal fails, the file is at least empty.
        drop(file.set_len(0));
        if path_names_open_file(&file, &self.path) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

impl Drop for MembershipJournal {
    fn drop(&mut self) {
        let mut writing = self.writing.lock();
        if writing.head.is_none() {
            self.remove_journal(&mut writing);
        }
    }
}

/// Returns a new file with this content, after it has been written to the disk.
fn create_replacement(
    new: &Path,
    head: &JournalHead,
    records: &[JournalRecord],
) -> io::Result<File> {
    // A killed process may have left a replacement file.
    drop(std::fs::remove_file(new));
    let mut file =
        OpenOptions::new().create_new(true).append(true).read(true).mode(0o600).open(new)?;
    // Lock the file before another process can find it under its final name.
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let mut text = json_line(head)?;
    for record in records {
        text.extend(json_line(record)?);
    }
    file.write_all(&text)?;
    // Before the rename: after a loss of power, the name must not show a file without its content.
    file.sync_data()?;
    Ok(file)
}

/// Opens the file and locks it.
fn open_locked_journal(path: &Path) -> std::result::Result<File, String> {
    let open = || OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path);
    loop {
        let file = open().map_err(|error| error.to_string())?;
        let opened = file.metadata().map_err(|error| error.to_string())?;
        if !opened.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        // Refuse another user's file: its owner could read the secrets that are written to it.
        if opened.uid() != geteuid().as_raw() {
            return Err("it belongs to another user".to_owned());
        }
        // Two launchers with one journal would both continue the job.
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            let held = error == rustix::io::Errno::WOULDBLOCK;
            return Err(if held {
                "another launcher uses it".to_owned()
            } else {
                error.to_string()
            });
        }
        // If the path names another file now, that file has replaced this one: open it instead.
        if path_names_open_file(&file, path) {
            return Ok(file);
        }
    }
}

/// Returns whether a path names an open file.
fn path_names_open_file(file: &File, path: &Path) -> bool {
    let number = |found: Metadata| (found.dev(), found.ino());
    let named = std::fs::metadata(path).map(number);
    named.is_ok_and(|named| file.metadata().map(number).is_ok_and(|open| open == named))
}

/// Returns the content of the file, and the length of its complete lines.
fn read_journal(
    file: &File,
    purpose: &str,
) -> std::result::Result<(Option<UnfinishedJournal>, u64), String> {
    let mut lines = BufReader::new(file);
    let mut text = Vec::new();
    let mut whole = 0;
    // The path comes from the user and may name any file, also a huge one without line ends.
    let length = (&mut lines).take(MAX_HEAD_BYTES).read_until(b'\n', &mut text);
    if length.map_err(|error| error.to_string())? == 0 {
        return Ok((None, 0));
    }
    let head = parse_head(&text, purpose)?;
    let mut records = Vec::new();
    while text.last() == Some(&b'\n') {
        whole += text.len() as u64;
        text.clear();
        lines.read_until(b'\n', &mut text).map_err(|error| error.to_string())?;
        if text.last() == Some(&b'\n') {
            let number = records.len() + 2;
            let damaged =
                |error| format!("line {number} is damaged ({error}): restore it, {GIVE_UP_HINT}");
            records.push(serde_json::from_slice(&text).map_err(damaged)?);
        }
    }
    if !matches!(records.first(), Some(JournalRecord::State { .. })) {
        return Err(format!("line 2 is damaged: restore it, {GIVE_UP_HINT}"));
    }
    Ok((Some(UnfinishedJournal { head, records }), whole))
}

fn parse_head(text: &[u8], purpose: &str) -> std::result::Result<JournalHead, String> {
    let other = |_| "it is not a journal: use another path".to_owned();
    let JournalRelease { farandole } = serde_json::from_slice(text).map_err(other)?;
    // The same steps may lead to other decisions in another release, and then to another world.
    if farandole != RELEASE_VERSION {
        return Err(format!(
            "farandole {farandole} wrote it, and this is {RELEASE_VERSION}: use that release, {GIVE_UP_HINT}"
        ));
    }
    let head: JournalHead = serde_json::from_slice(text)
        .map_err(|error| format!("line 1 is damaged ({error}): restore it, {GIVE_UP_HINT}"))?;
    if head.purpose != purpose {
        return Err(format!("it is of another job: run {}, {GIVE_UP_HINT}", head.purpose));
    }
    Ok(head)
}

fn json_line(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

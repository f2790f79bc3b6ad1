// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A file from which the registrar of an elastic job goes on after its process was killed.
//!
//! A line of JSON for each record, in the order of what happened; the first is the [`Head`]. A record is written before
//! anybody can see what follows from it, and what a killed process has written the system keeps: nothing waits for the
//! disk, so a host that loses power may lose the last records. A line that is cut off at the end was not yet seen.
//!
//! The head holds the job's token and its certificate's key, so only its owner may read the file. One process at a time
//! has it, by a lock on it. When it has grown by [`LONG`], a new file with the present state alone takes its place.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kv::Pair;
use crate::meetings::Formed;
use crate::membership::elastic::{Elastic, Step};
use crate::ticket::Ticket;
use crate::tls::Identity;

/// Version of what is in the file.
const VERSION: u32 = 1;
/// Bytes by which it grows before a new one takes its place.
const LONG: u64 = 4 << 20;

/// What stays the same for the life of a job.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Head {
    version: u32,
    /// What the job is for, in the words of whoever runs it.
    purpose: String,
    /// Token, fingerprint, name and addresses.
    ticket: String,
    certificate: String,
    key: String,
    pub(crate) port: u16,
}

/// What happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Record {
    /// Who is in the job. Everything before it is of no more interest.
    State { at: Duration, machine: Box<Elastic> },
    /// A step of that.
    Step(Step),
    /// A key got its value.
    Put(Pair),
    /// Ranks have met.
    Met(Formed),
}

/// What an earlier registrar has left.
pub(crate) struct Left {
    pub(crate) head: Head,
    pub(crate) records: Vec<Record>,
}

/// The file.
pub struct Journal {
    path: PathBuf,
    purpose: String,
    left: Option<Left>,
    writing: Mutex<Writing>,
}

struct Writing {
    /// None once a record could not be written, or the job is over.
    file: Option<File>,
    grown: u64,
    head: Option<Head>,
}

impl Head {
    fn new(purpose: String, ticket: &Ticket, identity: &Identity, port: u16) -> Self {
        let Identity { certificate_pem, key_pem, .. } = identity;
        let (certificate, key) = (certificate_pem.clone(), key_pem.clone());
        Self { version: VERSION, purpose, ticket: ticket.encode(), certificate, key, port }
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
    /// Takes the file, which may not exist yet. `purpose` says what the job is for: a job for something else is not
    /// taken over.
    ///
    /// # Errors
    /// `Journal` where it cannot be read or written, belongs to another job, or another process has it.
    pub fn open(path: &Path, purpose: &str) -> Result<Self> {
        let failed = |reason: String| Error::Journal { path: path.display().to_string(), reason };
        let file = take(path).map_err(failed)?;
        let (left, whole) = read(&file, purpose).map_err(failed)?;
        // What was cut off would spoil the line that comes next.
        file.set_len(whole).map_err(|error| failed(error.to_string()))?;
        let head = left.as_ref().map(|left| left.head.clone());
        let writing = Mutex::new(Writing { file: Some(file), grown: 0, head });
        Ok(Self { path: path.to_owned(), purpose: purpose.to_owned(), left, writing })
    }

    /// What an earlier registrar has left, the first time.
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
        self.renew(&[state]).map_err(|error| Error::Journal {
            path: self.path.display().to_string(),
            reason: error.to_string(),
        })
    }

    /// Adds what happened.
    pub(crate) fn note(&self, record: &Record) {
        let mut writing = self.writing.lock();
        let Some(file) = &mut writing.file else { return };
        match line(record).and_then(|line| file.write_all(&line).map(|()| line.len() as u64)) {
            Ok(length) => writing.grown += length,
            Err(error) => self.give_up(&mut writing, &error),
        }
    }

    /// Whether it has grown so much that the present state should take its place.
    pub(crate) fn is_long(&self) -> bool {
        self.writing.lock().grown >= LONG
    }

    /// Has a file with these records alone take its place.
    pub(crate) fn replace(&self, records: &[Record]) {
        if let Err(error) = self.renew(records) {
            self.give_up(&mut self.writing.lock(), &error);
        }
    }

    fn renew(&self, records: &[Record]) -> io::Result<()> {
        let mut writing = self.writing.lock();
        let (Some(head), true) = (&writing.head, writing.file.is_some()) else { return Ok(()) };
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        // One that a killed process has left.
        drop(std::fs::remove_file(&new));
        let mut file = OpenOptions::new().create_new(true).append(true).read(true).mode(0o600).open(&new)?;
        // Locked before anybody can find it under its name.
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let mut text = line(head)?;
        for record in records {
            text.extend(line(record)?);
        }
        file.write_all(&text)?;
        std::fs::rename(&new, &self.path)?;
        (writing.file, writing.grown) = (Some(file), 0);
        Ok(())
    }

    /// Without a whole journal there is none: what is left would make a registrar believe what is no longer true.
    fn give_up(&self, writing: &mut Writing, error: &io::Error) {
        let path = self.path.display();
        tracing::error!(%error, %path, "the journal cannot be written any more: the job outlives no launcher");
        self.end(writing);
    }

    /// The job is over, and the file is removed.
    pub(crate) fn finish(&self) {
        self.end(&mut self.writing.lock());
    }

    fn end(&self, writing: &mut Writing) {
        if writing.file.is_some() {
            // What cannot be removed has been emptied at least.
            drop(writing.file.take().map(|file| file.set_len(0)));
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Opens the file and locks it.
fn take(path: &Path) -> std::result::Result<File, String> {
    let open = || OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path);
    loop {
        let file = open().map_err(|error| error.to_string())?;
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            let held = error == rustix::io::Errno::WOULDBLOCK;
            return Err(if held { "another launcher works with it".to_owned() } else { error.to_string() });
        }
        // A file that existed may be readable by others.
        file.set_permissions(Permissions::from_mode(0o600)).map_err(|error| error.to_string())?;
        let found = std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
        let locked = file.metadata().map(|locked| (locked.dev(), locked.ino()));
        // Another one has taken its place in the meantime.
        if found.ok().is_some_and(|found| locked.is_ok_and(|locked| locked == found)) {
            return Ok(file);
        }
    }
}

/// What is in the file, and the length of its whole lines.
fn read(file: &File, purpose: &str) -> std::result::Result<(Option<Left>, u64), String> {
    let mut lines = BufReader::new(file);
    let (mut head, mut records, mut whole) = (None::<Head>, Vec::new(), 0);
    loop {
        let mut text = Vec::new();
        let length = lines.read_until(b'\n', &mut text).map_err(|error| error.to_string())?;
        if text.last() != Some(&b'\n') {
            break;
        }
        let malformed =
            |error: serde_json::Error| format!("it is no journal that this version can read: {error}");
        if head.is_none() {
            head = Some(known(serde_json::from_slice(&text).map_err(malformed)?, purpose)?);
        } else {
            records.push(serde_json::from_slice(&text).map_err(malformed)?);
        }
        whole += length as u64;
    }
    // A job that has a head and no state has begun nothing.
    let left = head.filter(|_| !records.is_empty()).map(|head| Left { head, records });
    Ok((left, whole))
}

fn known(head: Head, purpose: &str) -> std::result::Result<Head, String> {
    if head.version != VERSION {
        return Err(format!("it is of version {}, and this is version {VERSION}", head.version));
    }
    if head.purpose != purpose {
        return Err(format!(
            "it is of another job, {}: run that, or remove the file to give that job up",
            head.purpose
        ));
    }
    Ok(head)
}

fn line(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::Pair;
    use crate::membership::Liveness;
    use crate::membership::elastic::Rules;
    use crate::secret::Secret;
    use bytes::Bytes;
    use farandole_world::{Generation, JobId};

    const SECOND: Duration = Duration::from_secs(1);

    fn machine() -> Elastic {
        let liveness = Liveness { heartbeat_timeout: 5 * SECOND, disconnect_grace: SECOND };
        Elastic::new(Rules {
            first: 2,
            least: 1,
            most: 4,
            spares: 0,
            timeout: SECOND,
            reset_limit: None,
            cooldown: (SECOND, SECOND),
            start_timeout: SECOND,
            liveness,
        })
    }

    fn begun(path: &Path) -> Journal {
        let secret = Secret::new("sixteen letters.", &JobId("job".to_owned())).unwrap();
        let ticket = secret.ticket(vec!["a:1".to_owned()]).unwrap();
        let mut journal = Journal::open(path, "train").unwrap();
        assert!(journal.left().is_none());
        journal.begin(&ticket, &secret.identity().unwrap(), 7, &machine()).unwrap();
        journal
    }

    fn put(key: &str) -> Record {
        let (key, value) = (key.to_owned(), Bytes::from_static(b"\x00\xff"));
        Record::Put(Pair { generation: Generation(1), key, value })
    }

    fn keys(path: &Path) -> Vec<String> {
        let left = Journal::open(path, "train").unwrap().left().unwrap();
        assert_eq!(left.head.port, 7);
        let key = |record: Record| match record {
            Record::Put(pair) => Some(pair.key),
            _ => None,
        };
        left.records.into_iter().filter_map(key).collect()
    }

    #[test]
    fn a_line_that_is_cut_off_is_left_out_and_the_next_one_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = begun(&path);
        [put("a"), put("b")].iter().for_each(|record| journal.note(record));
        drop(journal);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 3]).unwrap();
        let again = Journal::open(&path, "train").unwrap();
        again.note(&put("c"));
        drop(again);
        assert_eq!(keys(&path), ["a", "c"]);
    }

    #[test]
    fn it_is_for_its_owner_for_one_process_and_for_one_job() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let refused = |purpose: &str| Journal::open(&path, purpose).err().unwrap().to_string();
        let journal = begun(&path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(refused("train").contains("another launcher works with it"), "{}", refused("train"));
        drop(journal);
        assert!(refused("other").contains("it is of another job, train"), "{}", refused("other"));
        std::fs::write(&path, "no journal\n").unwrap();
        assert!(refused("train").contains("no journal that this version can read"), "{}", refused("train"));
    }

    #[test]
    fn a_new_file_takes_the_place_of_a_long_one_and_none_is_left_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = begun(&path);
        let record = put(&"k".repeat(1000));
        while !journal.is_long() {
            journal.note(&record);
        }
        let state = Record::State { at: SECOND, machine: Box::new(machine()) };
        journal.replace(&[state, put("a")]);
        assert!(!journal.is_long() && std::fs::metadata(&path).unwrap().len() < LONG / 100);
        journal.note(&put("b"));
        assert!(Journal::open(&path, "train").is_err(), "the new file is locked, too");
        drop(journal);
        assert_eq!(keys(&path), ["a", "b"]);
        let journal = Journal::open(&path, "train").unwrap();
        journal.finish();
        journal.note(&put("c"));
        assert!(!path.exists());
    }

    #[test]
    fn a_journal_that_cannot_be_written_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = begun(&path);
        // A file that takes no more.
        journal.writing.lock().file = Some(File::open(&path).unwrap());
        journal.note(&put("a"));
        assert!(!path.exists(), "half of what happened is worse than nothing");
    }
}

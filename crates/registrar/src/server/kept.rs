// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state of an elastic job's registrar that survives its process, through the journal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use farandole_world::{Generation, TaskId, World};

use super::core::Core;
use crate::error::Result;
use crate::exit::Verdict;
use crate::journal::{Journal, Record};
use crate::kv::{Full, KeyValues, Pair};
use crate::meetings::Meetings;
use crate::membership::elastic::{Elastic, Rules};
use crate::ticket::Ticket;
use crate::tls::Identity;

/// The answer to a worker that the registrar counts no more.
const GONE: &str = "the registrar counts this worker as gone";

/// A job as an earlier registrar has left it.
#[derive(Clone, Debug, Default)]
pub struct Resumed {
    /// Workers that have registered and are not known to have ended, and the host of each, as it
    /// was discovered.
    pub workers: BTreeMap<TaskId, String>,
    /// The present world, seen from rank 0.
    pub world: Option<World>,
}

/// The state that a journal holds.
pub(super) struct Kept {
    pub(super) machine: Elastic,
    pub(super) journal: Option<Arc<Journal>>,
    /// The job's time.
    pub(super) at: Duration,
    pub(super) kv: KeyValues,
    pub(super) meetings: Meetings,
}

impl Kept {
    /// Returns a job that begins.
    pub(super) fn new(rules: Rules, journal: Option<Arc<Journal>>) -> Self {
        let mut meetings = Meetings::default();
        if let Some(journal) = &journal {
            let journal = Arc::clone(journal);
            meetings.note_with(move |formed| journal.note(&Record::Met(formed.clone())));
        }
        Self {
            machine: Elastic::new(rules),
            journal,
            at: Duration::ZERO,
            kv: KeyValues::default(),
            meetings,
        }
    }

    /// Begins the journal.
    ///
    /// # Errors
    /// `Journal`.
    pub(super) fn begin(&self, ticket: &Ticket, identity: &Identity, port: u16) -> Result<()> {
        self.journal
            .as_ref()
            .map_or(Ok(()), |journal| journal.begin(ticket, identity, port, &self.machine))
    }

    /// Returns a job that continues, by new rules.
    pub(super) fn resumed(rules: Rules, journal: Arc<Journal>, records: Vec<Record>) -> Self {
        let mut kept = Self::new(rules.clone(), Some(journal));
        for record in records {
            match record {
                Record::State { at, machine } => (kept.at, kept.machine) = (at, *machine),
                Record::Step(step) => {
                    kept.at = step.at;
                    kept.machine.repeat(step);
                }
                // Values that were refused then are refused now.
                Record::Put(Pair { generation, key, value }) => {
                    drop(kept.kv.put(generation, key, value))
                }
                Record::Met(formed) => kept.meetings.restore(formed),
            }
        }
        kept.machine.go_by(rules);
        kept
    }
}

impl Core {
    /// Continues a job of an earlier registrar: workers that still run get no new orders, and
    /// workers that were given up must end.
    pub(super) fn resume(&self) -> Resumed {
        // Steps by other rules than those before them would be done again by the wrong ones.
        self.shorten_journal();
        let verdict = Arc::new(Verdict { reason: GONE.to_owned(), cause: None, retry: false });
        let mut membership = self.membership.lock();
        let left = membership.machine().map(|machine| Resumed {
            workers: machine.living().map(|(task, host)| (task, host.to_owned())).collect(),
            world: machine.world(),
        });
        let resumed = left.unwrap_or_default();
        membership.resume(self.now());
        let gone: Vec<TaskId> =
            membership.machine().map(|machine| machine.gone().collect()).unwrap_or_default();
        drop(membership);
        if let Some(world) = resumed.world.clone() {
            self.publish(world);
        }
        self.board.send_modify(|board| {
            board.ends.extend(gone.into_iter().map(|task| (task, Arc::clone(&verdict))));
        });
        self.carry_out();
        resumed
    }

    /// Shortens a journal that has become long, in its own thread, so that the clock continues
    /// meanwhile.
    pub(super) fn shorten_journal_beside(self: &Arc<Self>) {
        if self.journal.as_ref().is_some_and(|journal| journal.is_long()) {
            let core = Arc::clone(self);
            // Its end is not waited for: the journal tells everything before and after it.
            drop(tokio::task::spawn_blocking(move || core.shorten_journal()));
        }
    }

    /// Replaces the journal's records by the present state.
    fn shorten_journal(&self) {
        let Some(journal) = &self.journal else { return };
        if let Some(records) = self.whole(journal) {
            // No lock of the job is held while this is written, and waits for the disk.
            journal.replace(&records);
        }
    }

    /// Returns the present state; what happens after it follows it in the journal. `None` where
    /// that is being written.
    fn whole(&self, journal: &Journal) -> Option<Vec<Record>> {
        let _turn = self.turn.lock();
        let mut membership = self.membership.lock();
        let due = membership.take_due();
        let machine = membership.machine().cloned();
        let at = self.now();
        drop(membership);
        self.carry_out_these(due);
        let state = Record::State { at, machine: Box::new(machine?) };
        let (kv, meetings) = (self.kv.lock(), self.meetings.lock());
        if !journal.begin_whole() {
            return None;
        }
        let puts = kv.pairs().map(Record::Put);
        let met = meetings.formed().iter().cloned().map(Record::Met);
        Some([state].into_iter().chain(puts).chain(met).collect())
    }

    /// The job is over: there is nothing to continue with.
    pub(super) fn finish_journal(&self) {
        if let Some(journal) = &self.journal {
            journal.finish();
        }
    }

    /// Publishes a value.
    pub(super) fn put(
        &self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> std::result::Result<(), Full> {
        let mut kv = self.kv.lock();
        self.note_put(generation, &key, &value);
        kv.put(generation, key, value)
    }

    /// Publishes a value unless there is one, and returns what there is.
    pub(super) fn put_if_absent(
        &self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> std::result::Result<Bytes, Full> {
        let mut kv = self.kv.lock();
        if let Some(held) = kv.held(generation, &key) {
            return Ok(held);
        }
        self.note_put(generation, &key, &value);
        kv.put_if_absent(generation, key, value)
    }

    /// Notes a value before anybody hears of it. One that is refused now is refused again when the
    /// journal is read.
    fn note_put(&self, generation: Generation, key: &str, value: &Bytes) {
        if let Some(journal) = &self.journal {
            journal.note(&Record::Put(Pair {
                generation,
                key: key.to_owned(),
                value: value.clone(),
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use farandole_config::Config;
    use farandole_world::{HostHash, JobId};

    use super::*;
    use crate::membership::Input;
    use crate::secret::Secret;
    use crate::server::core::rules;
    use crate::server::{Elastic, Options};

    fn core(journal: Journal) -> Core {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let options = Options::from_config(1, &config);
        let second = Duration::from_secs(1);
        let elastic = Elastic {
            first: 2,
            least: 1,
            most: 2,
            spares: 0,
            timeout: 60 * second,
            reset_limit: None,
            cooldown: (second, second),
        };
        let secret = Secret::new("sixteen letters.", &JobId("job".to_owned())).unwrap();
        let ticket = secret.ticket(vec!["a:1".to_owned()]).unwrap();
        let kept = Kept::new(rules(&options, &elastic), Some(Arc::new(journal)));
        kept.begin(&ticket, &secret.identity().unwrap(), 7).unwrap();
        Core::elastic(ticket.job_id().clone(), &options, kept)
    }

    #[test]
    fn a_slow_disk_delays_no_sign_of_life_and_no_answer_precedes_its_journal_record() {
        let folder = tempfile::tempdir().unwrap();
        let core = core(Journal::open(&folder.path().join("journal"), "train").unwrap());
        let journal = Arc::clone(core.journal.as_ref().unwrap());
        core.observe(Input::Hosts(vec![("a".to_owned(), 2)]));
        let register =
            |task| core.register(TaskId(task), 0, u64::from(task), HostHash("a".to_owned()));
        let told = |task| core.board.borrow().holders.contains_key(&TaskId(task));
        register(0).unwrap();
        thread::scope(|scope| {
            let disk = journal.hold();
            let registers = scope.spawn(|| register(1));
            let deadline = Instant::now() + Duration::from_secs(20);
            while core.turn.try_lock().is_some() {
                assert!(Instant::now() < deadline, "nothing is written");
            }
            let beats = scope.spawn(|| core.beat(TaskId(0), 0));
            while !beats.is_finished() {
                assert!(Instant::now() < deadline, "a sign of life waits for the disk");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!registers.is_finished() && !told(1));
            drop(disk);
            registers.join().unwrap().unwrap();
            assert!(told(1));
        });
    }
}

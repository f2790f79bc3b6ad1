// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state of an elastic job's registrar that survives its process, through the journal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use farandole_world::{Generation, TaskId, World};

use super::core::Core;
use super::members::{Members, step};
use crate::error::Result;
use crate::exit::Verdict;
use crate::journal::{Journal, Record};
use crate::kv::{Full, KeyValues, Pair};
use crate::meetings::Meetings;
use crate::membership::elastic::{Elastic, Rules, What};
use crate::ticket::Ticket;
use crate::tls::Identity;

/// What a worker is told whom the registrar does not count any more.
const GONE: &str = "the registrar counts this worker as gone";

/// A job as an earlier registrar has left it.
#[derive(Clone, Debug, Default)]
pub struct Resumed {
    /// Workers that have registered and are not known to have ended, and the host of each, as it was discovered.
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
    /// A job that begins.
    pub(super) fn new(rules: Rules, journal: Option<Arc<Journal>>) -> Self {
        let mut meetings = Meetings::default();
        if let Some(journal) = &journal {
            let journal = Arc::clone(journal);
            meetings.note_with(move |formed| journal.note(&Record::Met(formed.clone())));
        }
        Self { machine: Elastic::new(rules), journal, at: Duration::ZERO, kv: KeyValues::default(), meetings }
    }

    /// Begins the journal.
    ///
    /// # Errors
    /// `Journal`.
    pub(super) fn begin(&self, ticket: &Ticket, identity: &Identity, port: u16) -> Result<()> {
        self.journal.as_ref().map_or(Ok(()), |journal| journal.begin(ticket, identity, port, &self.machine))
    }

    /// A job that continues, by new rules.
    pub(super) fn resumed(rules: Rules, journal: Arc<Journal>, records: Vec<Record>) -> Self {
        let mut kept = Self::new(rules.clone(), Some(journal));
        for record in records {
            match record {
                Record::State { at, machine } => (kept.at, kept.machine) = (at, *machine),
                Record::Step(step) => {
                    kept.at = step.at;
                    kept.machine.repeat(step);
                }
                // What was refused then is refused now.
                Record::Put(Pair { generation, key, value }) => drop(kept.kv.put(generation, key, value)),
                Record::Met(formed) => kept.meetings.restore(formed),
            }
        }
        kept.machine.go_by(rules);
        kept
    }
}

impl Core {
    /// Goes on with a job of an earlier registrar: who still works is told nothing new, and who was given up has to end.
    pub(super) fn resume(&self) -> Resumed {
        let mut membership = self.membership.lock();
        let now = self.now();
        let Members::Elastic(machine, journal) = &mut *membership else { return Resumed::default() };
        let workers = machine.living().map(|(task, host)| (task, host.to_owned())).collect();
        let resumed = Resumed { workers, world: machine.world() };
        if let Some(world) = resumed.world.clone() {
            self.publish(world);
        }
        if let Some(journal) = journal {
            // Steps by other rules than those before them would be done again by the wrong ones.
            self.write_whole(machine, now, journal);
        }
        // Nothing that merely happens is refused.
        let decisions = step(machine, journal.as_deref(), now, What::Resumes).unwrap_or_default();
        let verdict = Arc::new(Verdict { reason: GONE.to_owned(), cause: None, retry: false });
        let gone: Vec<TaskId> = machine.gone().collect();
        self.board.send_modify(|board| {
            board.ends.extend(gone.into_iter().map(|task| (task, Arc::clone(&verdict))));
        });
        self.apply(decisions);
        resumed
    }

    /// Has the present state replace a journal that has become long.
    pub(super) fn shorten_journal(&self) {
        let membership = self.membership.lock();
        let Members::Elastic(machine, Some(journal)) = &*membership else { return };
        if journal.is_long() {
            self.write_whole(machine, self.now(), journal);
        }
    }

    /// Has the journal tell the present state and nothing before it; membership is locked.
    fn write_whole(&self, machine: &Elastic, now: Duration, journal: &Journal) {
        let state = Record::State { at: now, machine: Box::new(machine.clone()) };
        let (kv, meetings) = (self.kv.lock(), self.meetings.lock());
        let puts = kv.pairs().map(Record::Put);
        let met = meetings.formed().iter().cloned().map(Record::Met);
        let records: Vec<Record> = [state].into_iter().chain(puts).chain(met).collect();
        journal.replace(&records);
    }

    /// The job is over: there is nothing to continue with.
    pub(super) fn finish_journal(&self) {
        if let Members::Elastic(_, Some(journal)) = &*self.membership.lock() {
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

    /// Notes a value before anybody hears of it. One that is refused now is refused again when the journal is read.
    fn note_put(&self, generation: Generation, key: &str, value: &Bytes) {
        if let Some(journal) = &self.journal {
            journal.note(&Record::Put(Pair { generation, key: key.to_owned(), value: value.clone() }));
        }
    }
}

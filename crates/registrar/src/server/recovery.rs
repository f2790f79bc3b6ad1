// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Recovery of an elastic job from the journal of an earlier registrar.

use std::sync::Arc;

use bytes::Bytes;
use farandole_membership::GenerationVerdict;
use farandole_world::{Generation, TaskId};

use super::recovered_state::ResumedJob;
use super::registrar_core::RegistrarCore;
use crate::generation_key_values::{KeyValuePair, KeyValueRefusal};
use crate::journal::{JournalRecord, MembershipJournal};

/// The reason that a worker gets if the registrar counts it as gone.
const GONE_WORKER_REASON: &str = "the registrar counts this worker as gone";

impl RegistrarCore {
    /// Continues the job of an earlier registrar: workers that still run get no new orders, and
    /// workers that were given up must end.
    pub(super) fn resume_job(&self) -> ResumedJob {
        // Start a new journal: a later replay would apply the new rules to the earlier steps too.
        self.compact_journal();
        let verdict = Arc::new(GenerationVerdict {
            reason: GONE_WORKER_REASON.to_owned(),
            cause: None,
            retry: false,
        });
        let mut membership = self.membership.lock();
        let left = membership.elastic_machine().map(|machine| ResumedJob {
            workers: machine.living_workers().map(|(task, host)| (task, host.to_owned())).collect(),
            world: machine.current_world(),
        });
        let resumed = left.unwrap_or_default();
        membership.resume_after_outage(self.job_time());
        let gone: Vec<TaskId> = membership
            .elastic_machine()
            .map(|machine| machine.gone_workers().collect())
            .unwrap_or_default();
        drop(membership);
        if let Some(world) = resumed.world.clone() {
            self.publish_world(world);
        }
        self.board.send_modify(|board| {
            board.ends.extend(gone.into_iter().map(|task| (task, Arc::clone(&verdict))));
        });
        self.carry_out_pending_effects();
        resumed
    }

    /// Replaces a long journal by a short one, on a separate thread, so that the clock continues
    /// meanwhile.
    pub(super) fn spawn_journal_compaction(self: &Arc<Self>) {
        if self.journal.as_ref().is_some_and(|journal| journal.needs_replacement()) {
            let core = Arc::clone(self);
            // The task is not awaited: the journal is complete before and after the replacement.
            drop(tokio::task::spawn_blocking(move || core.compact_journal()));
        }
    }

    /// Replaces the journal's records by the present state.
    fn compact_journal(&self) {
        let Some(journal) = &self.journal else { return };
        if let Some(records) = self.snapshot_records(journal) {
            // No lock of the job is held during this write, which waits for the disk.
            journal.replace_records(&records);
        }
    }

    /// Returns the present state; later records follow it in the journal. Returns `None` if a
    /// replacement is already being written.
    fn snapshot_records(&self, journal: &MembershipJournal) -> Option<Vec<JournalRecord>> {
        let _turn = self.effects_turn.lock();
        let mut membership = self.membership.lock();
        let due = membership.take_pending_effects();
        let machine = membership.elastic_machine().cloned();
        let at = self.job_time();
        drop(membership);
        self.carry_out_effects(due);
        let state = JournalRecord::State { at, machine: Box::new(machine?) };
        // Both are held until the replacement begins, so that no record falls between it and the
        // old file.
        let (kv, formation) = (self.kv.lock(), self.formation.lock());
        if !journal.begin_replacement() {
            return None;
        }
        let puts = kv.key_value_pairs().map(JournalRecord::Put);
        let formed_worlds =
            formation.formed_worlds().iter().cloned().map(JournalRecord::WorldFormed);
        Some([state].into_iter().chain(puts).chain(formed_worlds).collect())
    }

    /// Ends the journal, because the job is over.
    pub(super) fn finish_journal(&self) {
        if let Some(journal) = &self.journal {
            journal.remove_finished_journal();
        }
    }

    /// Publishes a value.
    pub(super) fn put_value(
        &self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> std::result::Result<(), KeyValueRefusal> {
        let mut kv = self.kv.lock();
        self.journal_key_value(generation, &key, &value);
        kv.put_value(generation, key, value)
    }

    /// Publishes a value if the key has none, and returns the value of the key.
    pub(super) fn put_if_absent(
        &self,
        generation: Generation,
        key: String,
        value: Bytes,
    ) -> std::result::Result<Bytes, KeyValueRefusal> {
        let mut kv = self.kv.lock();
        if let Some(held) = kv.current_value(generation, &key) {
            return Ok(held);
        }
        self.journal_key_value(generation, &key, &value);
        kv.put_if_absent(generation, key, value)
    }

    /// Records a value in the journal before any task can read it. A value that is refused now is
    /// refused again when the journal is read.
    fn journal_key_value(&self, generation: Generation, key: &str, value: &Bytes) {
        if let Some(journal) = &self.journal {
            journal.append_record(&JournalRecord::Put(KeyValuePair {
                generation,
                key: key.to_owned(),
                value: value.clone(),
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::thread;
    use std::time::{Duration, Instant};

    use farandole_config::Config;
    use farandole_membership::MembershipInput;
    use farandole_world::{HostHash, JobId};

    use super::*;
    use crate::secret::JobSecret;
    use crate::server::recovered_state::RecoveredState;
    use crate::server::registrar_core::elastic_rules;
    use crate::server::{ElasticOptions, RegistrarOptions};

    fn core(journal: MembershipJournal) -> RegistrarCore {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let options = RegistrarOptions::from_config(1, &config);
        let second = Duration::from_secs(1);
        let elastic = ElasticOptions {
            first: 2,
            min_workers: 1,
            max_workers: 2,
            spares: 0,
            timeout: 60 * second,
            reset_limit: None,
            cooldown: (second, second),
        };
        let secret = JobSecret::new("sixteen letters.", &JobId("job".to_owned())).unwrap();
        let ticket = secret.make_ticket(vec!["a:1".to_owned()]).unwrap();
        let recovered =
            RecoveredState::new(elastic_rules(&options, &elastic), Some(Arc::new(journal)));
        recovered.begin_journal(&ticket, &secret.derive_identity().unwrap(), 7).unwrap();
        RegistrarCore::new_elastic(ticket.job_id().clone(), &options, recovered)
    }

    #[test]
    fn a_slow_disk_delays_no_sign_of_life_and_no_answer_precedes_its_journal_record() {
        let folder = tempfile::tempdir().unwrap();
        let core = core(
            MembershipJournal::open_or_create(&folder.path().join("journal"), "train").unwrap(),
        );
        let journal = Arc::clone(core.journal.as_ref().unwrap());
        core.apply_membership_input(MembershipInput::Hosts(vec![("a".to_owned(), 2)]));
        let register =
            |task| core.register_task(TaskId(task), 0, u64::from(task), HostHash("a".to_owned()));
        let is_assigned = |task| core.board.borrow().holders.contains_key(&TaskId(task));
        register(0).unwrap();
        thread::scope(|scope| {
            let disk = journal.block_writes();
            let registers = scope.spawn(|| register(1));
            let deadline = Instant::now() + Duration::from_secs(20);
            while core.effects_turn.try_lock().is_some() {
                assert!(Instant::now() < deadline, "nothing is written");
            }
            let beats = scope.spawn(|| core.record_heartbeat(TaskId(0), 0));
            while !beats.is_finished() {
                assert!(Instant::now() < deadline, "a sign of life waits for the disk");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!registers.is_finished() && !is_assigned(1));
            drop(disk);
            registers.join().unwrap().unwrap();
            assert!(is_assigned(1));
        });
    }
}

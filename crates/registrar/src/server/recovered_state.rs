// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state of an elastic job, as the journal of an earlier registrar has it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use farandole_membership::{ElasticMembership, ElasticRules};
use farandole_world::{TaskId, World};

use crate::error::Result;
use crate::formation::FormationTable;
use crate::generation_key_values::{KeyValuePair, KeyValueStore};
use crate::journal::{JournalRecord, MembershipJournal};
use crate::ticket::Ticket;
use crate::tls::CertificateIdentity;

/// A job as an earlier registrar left it.
#[derive(Clone, Debug, Default)]
pub struct ResumedJob {
    /// Workers that have registered and are not known to have ended, and the discovered name of the
    /// host of each.
    pub workers: BTreeMap<TaskId, String>,
    /// The present world, seen from rank 0.
    pub world: Option<World>,
}

/// The state that was read from a journal.
pub(super) struct RecoveredState {
    pub(super) machine: ElasticMembership,
    pub(super) journal: Option<Arc<MembershipJournal>>,
    /// The job time at the end of the journal.
    pub(super) at: Duration,
    pub(super) kv: KeyValueStore,
    pub(super) formation: FormationTable,
}

impl RecoveredState {
    /// Returns the state of a new job.
    pub(super) fn new(rules: ElasticRules, journal: Option<Arc<MembershipJournal>>) -> Self {
        let mut formation = FormationTable::default();
        if let Some(journal) = &journal {
            let journal = Arc::clone(journal);
            formation.set_world_formed_callback(move |formed| {
                journal.append_record(&JournalRecord::WorldFormed(formed.clone()))
            });
        }
        Self {
            machine: ElasticMembership::new(rules),
            journal,
            at: Duration::ZERO,
            kv: KeyValueStore::default(),
            formation,
        }
    }

    /// Begins the journal of a new job.
    ///
    /// # Errors
    /// `Journal`.
    pub(super) fn begin_journal(
        &self,
        ticket: &Ticket,
        identity: &CertificateIdentity,
        port: u16,
    ) -> Result<()> {
        self.journal.as_ref().map_or(Ok(()), |journal| {
            journal.begin_new_journal(ticket, identity, port, &self.machine)
        })
    }

    /// Returns the state of a job that continues, with new rules.
    pub(super) fn replay_records(
        rules: ElasticRules,
        journal: Arc<MembershipJournal>,
        records: Vec<JournalRecord>,
    ) -> Self {
        let mut recovered = Self::new(rules.clone(), Some(journal));
        for record in records {
            match record {
                JournalRecord::State { at, machine } => {
                    (recovered.at, recovered.machine) = (at, *machine)
                }
                JournalRecord::Step(step) => {
                    recovered.at = step.at;
                    recovered.machine.replay_step(step);
                }
                // Values that were refused before the restart are refused again.
                JournalRecord::Put(KeyValuePair { generation, key, value }) => {
                    drop(recovered.kv.put_value(generation, key, value))
                }
                JournalRecord::WorldFormed(formed) => {
                    recovered.formation.restore_formed_world(formed)
                }
            }
        }
        // After the replay: the steps were decided by the earlier rules.
        recovered.machine.replace_rules(rules);
        recovered
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of the state machine in the journal, and their replay when the registrar restarts.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId};
use serde::{Deserialize, Serialize};

use super::{ElasticMembership, ElasticPhase, ElasticRules, JOB_DONE_REASON, WorkerStage};
use crate::inputs_and_decisions::{
    AgentPresence, MembershipDecision, MembershipInput, RegistrationRefusal,
};

/// The input of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ElasticStepInput {
    /// An agent registers.
    #[serde(rename = "Registers")]
    AgentRegistration {
        /// Its task.
        task: TaskId,
        /// The session of its process.
        session: u64,
        /// Its host.
        #[serde(rename = "place")]
        host_hash: HostHash,
    },
    /// A worker asks for a world.
    #[serde(rename = "Asks")]
    WorldRequest {
        /// Its task.
        task: TaskId,
        /// The generation that it leaves.
        after: Generation,
        /// The members of that generation that it lost.
        suspects: BTreeSet<TaskId>,
    },
    /// Any other input.
    #[serde(rename = "Happens")]
    Input(MembershipInput),
    /// The registrar has restarted.
    #[serde(rename = "Resumes")]
    Restart,
}

impl ElasticStepInput {
    /// Returns whether a journal records the step in any case. Frequent or repeatable steps are
    /// recorded only if they changed something.
    fn is_always_journaled(&self) -> bool {
        match self {
            Self::AgentRegistration { .. } | Self::WorldRequest { .. } => false,
            Self::Input(input) => !matches!(
                input,
                MembershipInput::Heartbeat { .. }
                    | MembershipInput::Disconnected { .. }
                    | MembershipInput::Abort { .. }
                    | MembershipInput::Tick
            ),
            Self::Restart => true,
        }
    }
}

/// A step that changed something.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JournalStep {
    /// The job time of the step.
    pub at: Duration,
    /// Its input.
    #[serde(rename = "what")]
    pub input: ElasticStepInput,
    /// The tasks that the step gave up because of their silence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses: Vec<(TaskId, String)>,
}

impl ElasticMembership {
    /// Takes a step, and returns its journal record and its outcome. The record is `None` if the
    /// step has changed nothing that a replay needs. Heartbeats are never recorded, because every
    /// agent gets a new time limit after a restart.
    pub fn take_journaled_step(
        &mut self,
        now: Duration,
        input: ElasticStepInput,
    ) -> (Option<JournalStep>, Result<Vec<MembershipDecision>, RegistrationRefusal>) {
        // Before the clone below: thousands of heartbeats come each second.
        if let ElasticStepInput::Input(MembershipInput::Heartbeat { .. }) = input {
            return (None, self.take_step(now, input));
        }
        let outcome = self.take_step(now, input.clone());
        let losses = std::mem::take(&mut self.losses);
        let changed = std::mem::take(&mut self.changed) || input.is_always_journaled();
        let decided = outcome.as_ref().is_ok_and(|decisions| !decisions.is_empty());
        // A record for each tick would fill the journal with 20 lines a second.
        let step = (decided || changed).then_some(JournalStep { at: now, input, losses });
        (step, outcome)
    }

    /// Takes a step.
    pub fn take_step(
        &mut self,
        now: Duration,
        input: ElasticStepInput,
    ) -> Result<Vec<MembershipDecision>, RegistrationRefusal> {
        match input {
            ElasticStepInput::AgentRegistration { task, session, host_hash } => {
                self.register_worker(now, task, session, host_hash)
            }
            ElasticStepInput::WorldRequest { task, after, suspects } => {
                self.request_world(now, task, after, suspects)
            }
            ElasticStepInput::Input(input) => Ok(self.apply_membership_input(now, input)),
            ElasticStepInput::Restart => Ok(self.resume_after_outage(now)),
        }
    }

    /// Replays a journal step. Its decisions were carried out before the restart and are dropped.
    pub fn replay_step(&mut self, step: JournalStep) {
        self.repeated = Some(step.losses);
        // An input that was refused before the restart is refused again.
        drop(self.take_step(step.at, step.input));
        self.repeated = None;
        self.losses.clear();
        self.changed = false;
    }

    /// Continues after an outage in which no agent was heard: all agents get the usual time to show
    /// that they live. It is unknown whether workers that were about to start have started. Other
    /// workers are started in their place when a new list of hosts is given, because the hosts may
    /// have changed.
    fn resume_after_outage(&mut self, now: Duration) -> Vec<MembershipDecision> {
        // The list in the journal is older than the outage: a host in it may be gone.
        self.hosts.mark_hosts_outdated();
        self.returning_until = now + self.rules.liveness.heartbeat_timeout;
        // Their start may have been lost with the launcher, and their numbers are not used again.
        self.workers.retain(|_, worker| worker.stage != WorkerStage::Starting);
        for worker in self.workers.values_mut() {
            worker.presence = AgentPresence::seen_at(now);
        }
        match &self.phase {
            ElasticPhase::Open => {}
            ElasticPhase::Aborted { reason } => {
                return vec![MembershipDecision::Aborted { reason: reason.clone() }];
            }
            ElasticPhase::Finished { generation } => {
                let end = |task: &TaskId| MembershipDecision::End {
                    task: *task,
                    reason: JOB_DONE_REASON.to_owned(),
                };
                let finished = MembershipDecision::Finished { generation: *generation };
                return self.unheard.keys().map(end).chain([finished]).collect();
            }
        }
        if let Some(present) = &mut self.present {
            present.reset_announcements();
        }
        self.make_due_decisions(now)
    }

    /// Replaces the rules from now on.
    pub fn replace_rules(&mut self, rules: ElasticRules) {
        self.hosts.set_cooldown(rules.cooldown);
        self.rules = rules;
    }

    /// Returns the workers that have registered and are not known to have ended, and the hosts on
    /// which they were started.
    pub fn living_workers(&self) -> impl Iterator<Item = (TaskId, &str)> {
        let lives =
            |stage: &WorkerStage| !matches!(stage, WorkerStage::Starting | WorkerStage::Done);
        self.workers
            .iter()
            .filter(move |(_, worker)| lives(&worker.stage))
            .map(|(task, worker)| (*task, worker.host.as_str()))
            .chain(self.unheard.iter().map(|(task, host)| (*task, host.as_str())))
    }

    /// Returns the workers that were started or came by themselves, and are gone.
    pub fn gone_workers(&self) -> impl Iterator<Item = TaskId> {
        let started = (0..self.next_task).map(TaskId);
        let known =
            |task: &TaskId| self.workers.contains_key(task) || self.unheard.contains_key(task);
        started.chain(self.self_started.iter().copied()).filter(move |task| !known(task))
    }
}

/// Serialization of a map with pairs as keys, as a list: JSON keys are strings.
pub(super) mod pair_map_as_list {
    use std::collections::BTreeMap;

    use farandole_world::TaskId;
    use serde::{Deserialize as _, Deserializer, Serializer};

    type PairMap = BTreeMap<(TaskId, TaskId), u32>;

    pub(in super::super) fn serialize<S: Serializer>(
        pairs: &PairMap,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(pairs)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<PairMap, D::Error> {
        Vec::<((TaskId, TaskId), u32)>::deserialize(from).map(|all| all.into_iter().collect())
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of the state machine in the journal, and their replay when the registrar restarts.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId};
use serde::{Deserialize, Serialize};

use super::{ElasticMembership, ElasticPhase, ElasticRules, JOB_DONE_REASON, WorkerStage};
use crate::decisions::{AgentPresence, MembershipDecision, MembershipInput, RegistrationRefusal};

/// The input of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum StepKind {
    /// An agent registers.
    Registers {
        /// Its task.
        task: TaskId,
        /// The session of its process.
        session: u64,
        /// Its host.
        place: HostHash,
    },
    /// A worker asks for a world.
    Asks {
        /// Its task.
        task: TaskId,
        /// The generation that it leaves.
        after: Generation,
        /// The members of that generation that it lost.
        suspects: BTreeSet<TaskId>,
    },
    /// Any other input.
    Happens(MembershipInput),
    /// The registrar has restarted.
    Resumes,
}

impl StepKind {
    /// Returns whether a journal records the step in any case. Frequent or repeatable steps are
    /// recorded only if they changed something.
    fn is_always_journaled(&self) -> bool {
        match self {
            Self::Registers { .. } | Self::Asks { .. } => false,
            Self::Happens(input) => !matches!(
                input,
                MembershipInput::Beat { .. }
                    | MembershipInput::Disconnected { .. }
                    | MembershipInput::Abort { .. }
                    | MembershipInput::Tick
            ),
            Self::Resumes => true,
        }
    }
}

/// A step that changed something.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JournalStep {
    /// The job time of the step.
    pub at: Duration,
    /// Its input.
    pub what: StepKind,
    /// The tasks that the step gave up because of their silence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses: Vec<(TaskId, String)>,
}

impl ElasticMembership {
    /// Takes a step, and returns its outcome and its journal record; `None` as the record if the
    /// step changed nothing that a journal must record. Times of heartbeats are not in a journal. A
    /// step in which only time has passed changes only its own report of losses.
    pub fn take_journaled_step(
        &mut self,
        now: Duration,
        what: StepKind,
    ) -> (Option<JournalStep>, Result<Vec<MembershipDecision>, RegistrationRefusal>) {
        if let StepKind::Happens(MembershipInput::Beat { .. }) = what {
            return (None, self.take_step(now, what));
        }
        let outcome = self.take_step(now, what.clone());
        let losses = std::mem::take(&mut self.losses);
        let changed = std::mem::take(&mut self.changed) || what.is_always_journaled();
        let decided = outcome.as_ref().is_ok_and(|decisions| !decisions.is_empty());
        let step = (decided || changed).then_some(JournalStep { at: now, what, losses });
        (step, outcome)
    }

    /// Takes a step.
    pub fn take_step(
        &mut self,
        now: Duration,
        what: StepKind,
    ) -> Result<Vec<MembershipDecision>, RegistrationRefusal> {
        match what {
            StepKind::Registers { task, session, place } => {
                self.register_worker(now, task, session, place)
            }
            StepKind::Asks { task, after, suspects } => {
                self.request_world(now, task, after, suspects)
            }
            StepKind::Happens(input) => Ok(self.observe_input(now, input)),
            StepKind::Resumes => Ok(self.resume_after_outage(now)),
        }
    }

    /// Replays a journal step. Its decisions were carried out before the restart and are dropped.
    pub fn replay_step(&mut self, step: JournalStep) {
        self.repeated = Some(step.losses);
        // An input that was refused before the restart is refused again.
        drop(self.take_step(step.at, step.what));
        self.repeated = None;
        self.losses.clear();
        self.changed = false;
    }

    /// Continues after an outage in which no agent was heard: all agents get the usual time to show
    /// that they live. It is unknown whether workers that were about to start have started. Other
    /// workers are started in their place when a new list of hosts is given, because the hosts may
    /// have changed.
    fn resume_after_outage(&mut self, now: Duration) -> Vec<MembershipDecision> {
        self.hosts.mark_outdated();
        self.returning_until = now + self.rules.liveness.heartbeat_timeout;
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
        self.settle_membership(now)
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
        let started = (0..self.next).map(TaskId);
        let known =
            |task: &TaskId| self.workers.contains_key(task) || self.unheard.contains_key(task);
        started.chain(self.came.iter().copied()).filter(move |task| !known(task))
    }
}

/// Serialization of a map with pairs as keys, as a list: JSON keys are strings.
pub(super) mod pair_map_as_list {
    use std::collections::BTreeMap;

    use farandole_world::TaskId;
    use serde::{Deserialize as _, Deserializer, Serializer};

    type Pairs = BTreeMap<(TaskId, TaskId), u32>;

    pub(in super::super) fn serialize<S: Serializer>(
        pairs: &Pairs,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(pairs)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Pairs, D::Error> {
        Vec::<((TaskId, TaskId), u32)>::deserialize(from).map(|all| all.into_iter().collect())
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state machine of the membership: for a fixed number of tasks, or for workers that come and
//! go.
//!
//! The effects of its steps are queued in order. They are carried out later, under another lock, so
//! heartbeats do not wait for a journal that is being written.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_membership::{
    ElasticMembership, ElasticStepInput, ExitReport, FixedMembership, JournalStep,
    MembershipDecision, MembershipInput, RegistrationRefusal,
};
use farandole_world::{Generation, HostHash, TaskId};

/// The machine, and the effects of its steps.
pub(super) struct MembershipMachine {
    kind: MembershipKind,
    pending_effects: Vec<PendingEffect>,
}

enum MembershipKind {
    Fixed(Box<FixedMembership>),
    /// `is_journaled`: whether a journal records the steps of the machine.
    Elastic {
        machine: Box<ElasticMembership>,
        is_journaled: bool,
    },
}

/// An effect of a step. Effects are carried out in the order of the queue.
pub(super) enum PendingEffect {
    /// The journal must contain the step before its decisions can be seen.
    AppendStep(JournalStep),
    /// The driver gets the event of a worker's end.
    ReportExit { task: TaskId, generation: Generation, exit: ExitReport },
    /// The decisions are carried out.
    ApplyDecisions(Vec<MembershipDecision>),
}

impl MembershipMachine {
    pub(super) fn new_fixed(machine: FixedMembership) -> Self {
        Self { kind: MembershipKind::Fixed(Box::new(machine)), pending_effects: Vec::new() }
    }

    pub(super) fn new_elastic(machine: ElasticMembership, is_journaled: bool) -> Self {
        Self {
            kind: MembershipKind::Elastic { machine: Box::new(machine), is_journaled },
            pending_effects: Vec::new(),
        }
    }

    pub(super) fn is_elastic(&self) -> bool {
        matches!(self.kind, MembershipKind::Elastic { .. })
    }

    /// Returns the machine, if the job is elastic.
    pub(super) fn elastic_machine(&self) -> Option<&ElasticMembership> {
        match &self.kind {
            MembershipKind::Fixed(_) => None,
            MembershipKind::Elastic { machine, .. } => Some(machine),
        }
    }

    pub(super) fn generation(&self) -> Generation {
        match &self.kind {
            MembershipKind::Fixed(members) => members.generation(),
            MembershipKind::Elastic { machine: members, .. } => members.generation(),
        }
    }

    /// Returns whether this session of a task waits or runs. Returns true for all workers of
    /// elastic jobs: an unknown one cannot register again.
    pub(super) fn knows_session(&self, task: TaskId, session: u64) -> bool {
        match &self.kind {
            MembershipKind::Fixed(members) => members.knows_session(task, session),
            // A worker of an elastic job has one life: if it is dropped, another one replaces it.
            MembershipKind::Elastic { .. } => true,
        }
    }

    /// Returns the tasks that are still missing, ascending.
    pub(super) fn missing_tasks(&self) -> Vec<TaskId> {
        match &self.kind {
            MembershipKind::Fixed(members) => members.missing_tasks().collect(),
            MembershipKind::Elastic { machine: members, .. } => members.missing_workers().collect(),
        }
    }

    /// Takes the effects that must be carried out now.
    pub(super) fn take_pending_effects(&mut self) -> Vec<PendingEffect> {
        std::mem::take(&mut self.pending_effects)
    }

    /// Queues the event of a worker's end for the driver.
    pub(super) fn queue_exit_report(
        &mut self,
        task: TaskId,
        generation: Generation,
        exit: ExitReport,
    ) {
        self.pending_effects.push(PendingEffect::ReportExit { task, generation, exit });
    }

    pub(super) fn register_task(
        &mut self,
        now: Duration,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<Generation, RegistrationRefusal> {
        if let MembershipKind::Fixed(members) = &mut self.kind {
            let (generation, decisions) =
                members.register_task(now, task, attempt, session, host)?;
            self.queue_decisions(decisions);
            return Ok(generation);
        }
        // The worker begins without a world.
        self.take_elastic_step(
            now,
            ElasticStepInput::AgentRegistration { task, session, host_hash: host },
        )
        .map(|()| Generation(0))
    }

    pub(super) fn request_world(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<(), RegistrationRefusal> {
        match self.kind {
            MembershipKind::Fixed(_) => Err(RegistrationRefusal::NotWanted { task }),
            MembershipKind::Elastic { .. } => self
                .take_elastic_step(now, ElasticStepInput::WorldRequest { task, after, suspects }),
        }
    }

    pub(super) fn apply_membership_input(&mut self, now: Duration, input: MembershipInput) {
        if let MembershipKind::Fixed(members) = &mut self.kind {
            let decisions = members.apply_membership_input(now, input);
            return self.queue_decisions(decisions);
        }
        // Only registrations and requests are refused, so there is no error.
        drop(self.take_elastic_step(now, ElasticStepInput::Input(input)));
    }

    /// Continues after an outage of the registrar.
    pub(super) fn resume_after_outage(&mut self, now: Duration) {
        // This step is never refused.
        drop(self.take_elastic_step(now, ElasticStepInput::Restart));
    }

    fn take_elastic_step(
        &mut self,
        now: Duration,
        input: ElasticStepInput,
    ) -> Result<(), RegistrationRefusal> {
        let outcome = match &mut self.kind {
            MembershipKind::Fixed(_) => return Ok(()),
            MembershipKind::Elastic { machine, is_journaled: false } => {
                machine.take_step(now, input)
            }
            MembershipKind::Elastic { machine, is_journaled: true } => {
                let (step, outcome) = machine.take_journaled_step(now, input);
                self.pending_effects.extend(step.map(PendingEffect::AppendStep));
                outcome
            }
        };
        outcome.map(|decisions| self.queue_decisions(decisions))
    }

    fn queue_decisions(&mut self, decisions: Vec<MembershipDecision>) {
        if !decisions.is_empty() {
            self.pending_effects.push(PendingEffect::ApplyDecisions(decisions));
        }
    }
}

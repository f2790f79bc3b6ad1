// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state machine of the membership: for a fixed number of tasks, or for workers that come and
//! go.
//!
//! The effects of its steps are queued in order. They are carried out later, under another lock, so
//! heartbeats do not wait for a journal that is being written.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId};

use crate::exit::Exit;
use crate::membership::elastic::{Elastic, Step, What};
use crate::membership::{Decision, Input, Membership, Refusal};

/// The machine, and the effects of its steps.
pub(super) struct Members {
    kind: Kind,
    due: Vec<Due>,
}

enum Kind {
    Fixed(Box<Membership>),
    /// Whether a journal tells its steps.
    Elastic(Box<Elastic>, bool),
}

/// The actions to carry out, in this order.
pub(super) enum Due {
    /// The journal must hold this before the decision can be seen.
    Note(Step),
    /// The driver hears of a worker's end.
    Ended { task: TaskId, generation: Generation, exit: Exit },
    /// The decisions take effect.
    Decided(Vec<Decision>),
}

impl Members {
    pub(super) fn fixed(machine: Membership) -> Self {
        Self { kind: Kind::Fixed(Box::new(machine)), due: Vec::new() }
    }

    pub(super) fn elastic(machine: Elastic, noted: bool) -> Self {
        Self { kind: Kind::Elastic(Box::new(machine), noted), due: Vec::new() }
    }

    pub(super) fn is_elastic(&self) -> bool {
        matches!(self.kind, Kind::Elastic(..))
    }

    /// Returns the machine of an elastic job.
    pub(super) fn machine(&self) -> Option<&Elastic> {
        match &self.kind {
            Kind::Fixed(_) => None,
            Kind::Elastic(machine, _) => Some(machine),
        }
    }

    pub(super) fn generation(&self) -> Generation {
        match &self.kind {
            Kind::Fixed(members) => members.generation(),
            Kind::Elastic(members, _) => members.generation(),
        }
    }

    /// Returns whether a start of a task waits or runs. Workers of elastic jobs that are unknown
    /// stay so.
    pub(super) fn knows(&self, task: TaskId, session: u64) -> bool {
        match &self.kind {
            Kind::Fixed(members) => members.knows(task, session),
            Kind::Elastic(..) => true,
        }
    }

    /// Tasks that are still waited for, ascending.
    pub(super) fn missing(&self) -> Vec<TaskId> {
        match &self.kind {
            Kind::Fixed(members) => members.missing().collect(),
            Kind::Elastic(members, _) => members.missing().collect(),
        }
    }

    /// Returns the actions to carry out now.
    pub(super) fn take_due(&mut self) -> Vec<Due> {
        std::mem::take(&mut self.due)
    }

    /// Reports a worker's end to the driver.
    pub(super) fn ended(&mut self, task: TaskId, generation: Generation, exit: Exit) {
        self.due.push(Due::Ended { task, generation, exit });
    }

    pub(super) fn register(
        &mut self,
        now: Duration,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<Generation, Refusal> {
        if let Kind::Fixed(members) = &mut self.kind {
            let (generation, decisions) = members.register(now, task, attempt, session, host)?;
            self.decided(decisions);
            return Ok(generation);
        }
        // Its worker begins without a world.
        self.step(now, What::Registers { task, session, place: host }).map(|()| Generation(0))
    }

    pub(super) fn ready(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<(), Refusal> {
        match self.kind {
            Kind::Fixed(_) => Err(Refusal::NotWanted { task }),
            Kind::Elastic(..) => self.step(now, What::Asks { task, after, suspects }),
        }
    }

    pub(super) fn observe(&mut self, now: Duration, input: Input) {
        if let Kind::Fixed(members) = &mut self.kind {
            let decisions = members.observe(now, input);
            return self.decided(decisions);
        }
        // Events that merely happen are never refused.
        drop(self.step(now, What::Happens(input)));
    }

    /// Continues after an outage.
    pub(super) fn resume(&mut self, now: Duration) {
        // This is never refused.
        drop(self.step(now, What::Resumes));
    }

    fn step(&mut self, now: Duration, what: What) -> Result<(), Refusal> {
        let outcome = match &mut self.kind {
            Kind::Fixed(_) => return Ok(()),
            Kind::Elastic(machine, false) => machine.take(now, what),
            Kind::Elastic(machine, true) => {
                let (step, outcome) = machine.noted(now, what);
                self.due.extend(step.map(Due::Note));
                outcome
            }
        };
        outcome.map(|decisions| self.decided(decisions))
    }

    fn decided(&mut self, decisions: Vec<Decision>) {
        if !decisions.is_empty() {
            self.due.push(Due::Decided(decisions));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state machine of the membership: for a fixed number of tasks, or for workers that come and go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId};

use crate::journal::{Journal, Record};
use crate::membership::elastic::{Elastic, What};
use crate::membership::{Decision, Input, Membership, Refusal};

pub(super) enum Members {
    Fixed(Box<Membership>),
    /// With a journal, if it is to outlive this process.
    Elastic(Box<Elastic>, Option<Arc<Journal>>),
}

impl Members {
    pub(super) fn is_elastic(&self) -> bool {
        matches!(self, Self::Elastic(..))
    }

    pub(super) fn generation(&self) -> Generation {
        match self {
            Self::Fixed(members) => members.generation(),
            Self::Elastic(members, _) => members.generation(),
        }
    }

    /// Whether a start of a task waits or runs. Workers of elastic jobs that are unknown stay so.
    pub(super) fn knows(&self, task: TaskId, session: u64) -> bool {
        match self {
            Self::Fixed(members) => members.knows(task, session),
            Self::Elastic(..) => true,
        }
    }

    /// Tasks that are still waited for, ascending.
    pub(super) fn missing(&self) -> Vec<TaskId> {
        match self {
            Self::Fixed(members) => members.missing().collect(),
            Self::Elastic(members, _) => members.missing().collect(),
        }
    }

    pub(super) fn register(
        &mut self,
        now: Duration,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<(Generation, Vec<Decision>), Refusal> {
        match self {
            Self::Fixed(members) => members.register(now, task, attempt, session, host),
            // Its worker begins without a world.
            Self::Elastic(members, journal) => {
                let what = What::Registers { task, session, place: host };
                step(members, journal.as_deref(), now, what).map(|decisions| (Generation(0), decisions))
            }
        }
    }

    pub(super) fn ready(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<Vec<Decision>, Refusal> {
        match self {
            Self::Fixed(_) => Err(Refusal::NotWanted { task }),
            Self::Elastic(members, journal) => {
                step(members, journal.as_deref(), now, What::Asks { task, after, suspects })
            }
        }
    }

    pub(super) fn observe(&mut self, now: Duration, input: Input) -> Vec<Decision> {
        match self {
            Self::Fixed(members) => members.observe(now, input),
            Self::Elastic(members, journal) => {
                // What merely happens is never refused.
                step(members, journal.as_deref(), now, What::Happens(input)).unwrap_or_default()
            }
        }
    }
}

/// Does a step, and notes it before anybody sees what follows.
pub(super) fn step(
    members: &mut Elastic,
    journal: Option<&Journal>,
    now: Duration,
    what: What,
) -> Result<Vec<Decision>, Refusal> {
    let Some(journal) = journal else { return members.take(now, what) };
    let (step, outcome) = members.noted(now, what);
    if let Some(step) = step {
        journal.note(&Record::Step(step));
    }
    outcome
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state on which calls wait.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use farandole_world::{Generation, Rank, TaskId, World};

use crate::convert;
use crate::exit::Verdict;

/// A world as published.
pub(super) struct Published {
    pub(super) world: World,
    pub(super) encoded: Bytes,
    pub(super) ranks: HashMap<TaskId, Rank>,
}

impl Published {
    pub(super) fn new(world: World) -> Self {
        let tasks = world.seats.iter().map(|seat| seat.task);
        let ranks = tasks.zip((0u32..).map(Rank)).collect();
        Self { encoded: convert::encode_world(&world), ranks, world }
    }
}

/// The signal that calls wait for.
#[derive(Clone, Default)]
pub(super) struct Board {
    pub(super) world: Option<Arc<Published>>,
    pub(super) over: Option<(Generation, Arc<Verdict>)>,
    pub(super) finished: Option<Generation>,
    pub(super) aborted: Option<Arc<Verdict>>,
    /// The last registration of each task: earlier starts of it get no rank any more.
    pub(super) holders: HashMap<TaskId, u64>,
    /// Elastic jobs: workers that are out, and why; those that may go; and what members of a world
    /// should know.
    pub(super) ends: HashMap<TaskId, Arc<Verdict>>,
    pub(super) dismissed: HashMap<TaskId, Arc<str>>,
    pub(super) change: Option<Change>,
    pub(super) closed: bool,
}

/// Hosts came or went: members of a world should ask for the next one at their next chance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) generation: Generation,
    pub(super) removed: bool,
    pub(super) added: bool,
    /// Seconds since the epoch.
    pub(super) at: f64,
}

impl Board {
    /// Returns the reason why `generation` is over, if it is.
    pub(super) fn verdict(&self, generation: Generation) -> Option<Verdict> {
        if let Some((over, verdict)) = &self.over
            && generation == *over
        {
            return Some(Verdict::clone(verdict));
        }
        if let Some(verdict) = &self.aborted {
            return Some(Verdict::clone(verdict));
        }
        let current =
            self.world.as_ref().map_or(Generation(0), |published| published.world.generation);
        (generation.0 > 0 && generation < current).then(|| Verdict {
            reason: format!("generation {generation} was followed by generation {current}"),
            cause: None,
            retry: true,
        })
    }

    /// Returns the reason why a worker has to end, if it has.
    pub(super) fn end(&self, task: TaskId) -> Option<Verdict> {
        self.ends.get(&task).map(|verdict| Verdict::clone(verdict))
    }

    /// Returns the reason why a worker that waits for a world may go, if it may.
    pub(super) fn dismissal(&self, task: TaskId) -> Option<Arc<str>> {
        self.dismissed.get(&task).cloned()
    }

    /// Returns whether a task is in a world after `after`.
    pub(super) fn is_seated(&self, task: TaskId, after: Generation) -> bool {
        self.world.as_ref().is_some_and(|published| {
            published.world.generation > after && published.ranks.contains_key(&task)
        })
    }

    /// Returns the reason why nothing will be assigned any more, if nothing will.
    pub(super) fn aborted(&self) -> Option<Verdict> {
        self.aborted.as_ref().map(|verdict| Verdict::clone(verdict))
    }

    /// Returns whether another start of the task has taken the place of this one.
    pub(super) fn is_replaced(&self, task: TaskId, session: u64) -> bool {
        self.holders.get(&task).is_some_and(|holder| *holder != session)
    }

    /// Returns whether every worker of a generation ended well.
    pub(super) fn is_finished(&self, generation: Generation) -> bool {
        self.finished == Some(generation)
    }

    pub(super) fn rank(&self, task: TaskId) -> Option<Rank> {
        self.world.as_ref().and_then(|published| published.ranks.get(&task).copied())
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The published state that waiting calls watch.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use farandole_membership::GenerationVerdict;
use farandole_world::{Generation, Rank, TaskId, World};

use crate::wire_conversions;

/// A published world.
pub(super) struct PublishedWorld {
    pub(super) world: World,
    pub(super) encoded: Bytes,
    pub(super) ranks: HashMap<TaskId, Rank>,
}

impl PublishedWorld {
    pub(super) fn new(world: World) -> Self {
        let tasks = world.seats.iter().map(|seat| seat.task);
        let ranks = tasks.zip((0u32..).map(Rank)).collect();
        Self { encoded: wire_conversions::encode_world(&world), ranks, world }
    }
}

/// The state whose changes wake waiting calls.
#[derive(Clone, Default)]
pub(super) struct WorldAnnouncements {
    pub(super) world: Option<Arc<PublishedWorld>>,
    pub(super) ended_generation: Option<(Generation, Arc<GenerationVerdict>)>,
    pub(super) finished: Option<Generation>,
    pub(super) aborted: Option<Arc<GenerationVerdict>>,
    /// Session of each task's last registration: earlier starts of the task get no rank any more.
    pub(super) holders: HashMap<TaskId, u64>,
    /// Elastic jobs: workers that must end, and why; then workers that may go, and the last change
    /// of hosts for the members of a world.
    pub(super) ends: HashMap<TaskId, Arc<GenerationVerdict>>,
    pub(super) dismissed: HashMap<TaskId, Arc<str>>,
    pub(super) change: Option<AnnouncedHostChange>,
    /// Whether the user interrupted the job: agents send SIGINT to their workers.
    pub(super) interrupted: bool,
    pub(super) closed: bool,
}

/// A change of hosts: members of a world should ask for the next one at their next opportunity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AnnouncedHostChange {
    pub(super) generation: Generation,
    pub(super) removed: bool,
    pub(super) added: bool,
    /// Seconds since the epoch.
    pub(super) at: f64,
}

impl WorldAnnouncements {
    /// Returns the reason why `generation` is over, if it is over.
    pub(super) fn generation_verdict(&self, generation: Generation) -> Option<GenerationVerdict> {
        if let Some((over, verdict)) = &self.ended_generation
            && generation == *over
        {
            return Some(GenerationVerdict::clone(verdict));
        }
        if let Some(verdict) = &self.aborted {
            return Some(GenerationVerdict::clone(verdict));
        }
        let current =
            self.world.as_ref().map_or(Generation(0), |published| published.world.generation);
        (generation.0 > 0 && generation < current).then(|| GenerationVerdict {
            reason: format!("generation {generation} was followed by generation {current}"),
            cause: None,
            retry: true,
        })
    }

    /// Returns the reason why a worker must end, if it must.
    pub(super) fn worker_end_verdict(&self, task: TaskId) -> Option<GenerationVerdict> {
        self.ends.get(&task).map(|verdict| GenerationVerdict::clone(verdict))
    }

    /// Returns the reason why a worker that waits for a world may go, if it may.
    pub(super) fn dismissal_reason(&self, task: TaskId) -> Option<Arc<str>> {
        self.dismissed.get(&task).cloned()
    }

    /// Returns whether a task is in a world after `after`.
    pub(super) fn has_rank_after(&self, task: TaskId, after: Generation) -> bool {
        self.world.as_ref().is_some_and(|published| {
            published.world.generation > after && published.ranks.contains_key(&task)
        })
    }

    /// Returns the reason why no world will be assigned any more, if the job is over.
    pub(super) fn abort_verdict(&self) -> Option<GenerationVerdict> {
        self.aborted.as_ref().map(|verdict| GenerationVerdict::clone(verdict))
    }

    /// Returns whether another start of the task has replaced this one.
    pub(super) fn is_session_replaced(&self, task: TaskId, session: u64) -> bool {
        self.holders.get(&task).is_some_and(|holder| *holder != session)
    }

    /// Returns whether every worker of a generation ended successfully.
    pub(super) fn is_finished(&self, generation: Generation) -> bool {
        self.finished == Some(generation)
    }

    pub(super) fn task_rank(&self, task: TaskId) -> Option<Rank> {
        self.world.as_ref().and_then(|published| published.ranks.get(&task).copied())
    }
}

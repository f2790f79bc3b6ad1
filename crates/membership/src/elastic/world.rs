// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The present world of an elastic job, from its assignment to the next.

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{Rank, TaskId, TaskPlacement};
use serde::{Deserialize, Serialize};

use crate::exit::{ExitKind, ExitReport};

/// The reason why a worker was lost unexpectedly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LossCause {
    /// It failed by itself.
    #[serde(rename = "Own")]
    OwnFailure(String),
    /// It failed because a collective lost a peer: another worker failed first.
    Peer(String),
    /// A signal ended it, its agent or host was lost, or it could not be started.
    Lost(String),
}

/// A world and its state since its assignment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CurrentWorld {
    /// The members by rank, including members that are gone.
    pub(super) order: Vec<TaskId>,
    ranks: BTreeMap<TaskId, Rank>,
    /// The members by rank, with their hosts.
    #[serde(rename = "places")]
    pub(super) placements: Vec<TaskPlacement>,
    /// The time at which the world broke, and the reason.
    pub(super) broken: Option<(Duration, String)>,
    /// Members that failed, in the order of time.
    pub(super) failures: Vec<MemberFailure>,
    /// Whether the function had returned on some rank of the previous world. Then this world
    /// consists of the remaining members, and no worker joins them.
    pub(super) finishing: bool,
    /// Whether members were notified that the world is broken.
    #[serde(rename = "told_broken")]
    break_announced: bool,
    /// Whether members were notified that some of them must leave, and that new workers wait.
    #[serde(rename = "told")]
    announced_host_changes: (bool, bool),
}

/// A member that failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MemberFailure {
    task: TaskId,
    sentence: String,
    #[serde(rename = "why")]
    cause: LossCause,
}

impl LossCause {
    /// Returns the cause of an exit with a code other than 0.
    pub(super) fn from_exit(exit: &ExitReport) -> Self {
        let sentence = exit.kind.to_string();
        match &exit.kind {
            // First: a process that reports a lost peer exits with a code, but is not the cause.
            _ if exit.peer_error => Self::Peer(sentence),
            ExitKind::Code(_) => Self::OwnFailure(sentence),
            // A signal comes from outside of the program, so another start may succeed.
            ExitKind::Signal(_) | ExitKind::NotStarted(_) => Self::Lost(sentence),
        }
    }

    pub(super) fn as_sentence(&self) -> &str {
        match self {
            Self::OwnFailure(sentence) | Self::Peer(sentence) | Self::Lost(sentence) => sentence,
        }
    }
}

impl CurrentWorld {
    pub(super) fn new(order: Vec<TaskId>, placements: Vec<TaskPlacement>, finishing: bool) -> Self {
        Self {
            ranks: order.iter().copied().zip((0u32..).map(Rank)).collect(),
            order,
            placements,
            broken: None,
            failures: Vec::new(),
            finishing,
            break_announced: false,
            announced_host_changes: (false, false),
        }
    }

    pub(super) fn task_rank(&self, task: TaskId) -> Option<Rank> {
        self.ranks.get(&task).copied()
    }

    /// Marks the world as broken; the first reason counts.
    pub(super) fn mark_world_broken(&mut self, now: Duration, reason: String) {
        // Later reasons are consequences of the first.
        self.broken.get_or_insert((now, reason));
    }

    /// Records a member's failure.
    pub(super) fn record_member_failure(
        &mut self,
        now: Duration,
        task: TaskId,
        sentence: String,
        cause: &LossCause,
    ) {
        self.mark_world_broken(now, sentence.clone());
        self.failures.push(MemberFailure { task, sentence, cause: cause.clone() });
    }

    /// Returns the reason why a world without survivors has no successor: all members failed by
    /// themselves, or some had returned already.
    pub(super) fn hopeless_reason(&self, done: bool) -> Option<(TaskId, String)> {
        let lost = self.failures.iter().any(|failure| matches!(failure.cause, LossCause::Lost(_)));
        let own =
            self.failures.iter().find(|failure| matches!(failure.cause, LossCause::OwnFailure(_)));
        let first = own.or(self.failures.first())?;
        (done || !lost).then(|| (first.task, first.sentence.clone()))
    }

    /// Returns the reason why the world is broken, but only once.
    pub(super) fn take_break_announcement(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.break_announced, true) {
            return None;
        }
        self.broken.as_ref().map(|(_, reason)| reason.clone())
    }

    /// Returns whether the members were notified that the world cannot continue.
    pub(super) fn is_break_announced(&self) -> bool {
        self.break_announced
    }

    /// Makes all announcements due again, because every process that received them may be gone.
    pub(super) fn reset_announcements(&mut self) {
        (self.break_announced, self.announced_host_changes) = (false, (false, false));
    }

    /// Returns two flags: whether members were notified that some of them must leave, and that new
    /// workers wait.
    pub(super) fn announced_changes(&self) -> (bool, bool) {
        self.announced_host_changes
    }

    /// Records the announced change, and returns whether it is new to the members.
    pub(super) fn record_announced_changes(&mut self, removed: bool, added: bool) -> bool {
        // A flag that goes back to false needs no interruption of the members.
        let is_new = (removed && !self.announced_host_changes.0)
            || (added && !self.announced_host_changes.1);
        self.announced_host_changes = (removed, added);
        is_new
    }
}

#[cfg(test)]
impl CurrentWorld {
    /// Returns whether members were notified to ask for another world.
    pub(super) fn is_change_announced(&self) -> bool {
        self.broken.is_none() && self.announced_host_changes != (false, false)
    }
}

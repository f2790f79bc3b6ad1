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
    Own(String),
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
    pub(super) places: Vec<TaskPlacement>,
    /// The time at which the world broke, and the reason.
    pub(super) broken: Option<(Duration, String)>,
    /// Members that failed, in the order of time.
    pub(super) failures: Vec<MemberFailure>,
    /// Whether the function had returned on some rank of the previous world. Then this world
    /// consists of the remaining members, and no worker joins them.
    pub(super) finishing: bool,
    told_broken: bool,
    told: (bool, bool),
}

/// A member that failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MemberFailure {
    task: TaskId,
    sentence: String,
    why: LossCause,
}

impl LossCause {
    /// Returns the cause of an exit with a code other than 0.
    pub(super) fn from_exit(exit: &ExitReport) -> Self {
        let sentence = exit.how.to_string();
        match &exit.how {
            _ if exit.peer_error => Self::Peer(sentence),
            ExitKind::Code(_) => Self::Own(sentence),
            ExitKind::Signal(_) | ExitKind::NotStarted(_) => Self::Lost(sentence),
        }
    }

    pub(super) fn as_sentence(&self) -> &str {
        match self {
            Self::Own(sentence) | Self::Peer(sentence) | Self::Lost(sentence) => sentence,
        }
    }
}

impl CurrentWorld {
    pub(super) fn new(order: Vec<TaskId>, places: Vec<TaskPlacement>, finishing: bool) -> Self {
        Self {
            ranks: order.iter().copied().zip((0u32..).map(Rank)).collect(),
            order,
            places,
            broken: None,
            failures: Vec::new(),
            finishing,
            told_broken: false,
            told: (false, false),
        }
    }

    pub(super) fn task_rank(&self, task: TaskId) -> Option<Rank> {
        self.ranks.get(&task).copied()
    }

    /// Marks the world as broken; the first reason counts.
    pub(super) fn mark_broken(&mut self, now: Duration, reason: String) {
        self.broken.get_or_insert((now, reason));
    }

    /// Records a member's failure.
    pub(super) fn record_failure(
        &mut self,
        now: Duration,
        task: TaskId,
        sentence: String,
        why: &LossCause,
    ) {
        self.mark_broken(now, sentence.clone());
        self.failures.push(MemberFailure { task, sentence, why: why.clone() });
    }

    /// Returns the reason why a world without survivors has no successor: all members failed by
    /// themselves, or some had returned already.
    pub(super) fn hopeless_reason(&self, done: bool) -> Option<(TaskId, String)> {
        let lost = self.failures.iter().any(|failure| matches!(failure.why, LossCause::Lost(_)));
        let own = self.failures.iter().find(|failure| matches!(failure.why, LossCause::Own(_)));
        let first = own.or(self.failures.first())?;
        (done || !lost).then(|| (first.task, first.sentence.clone()))
    }

    /// Returns the reason why the world is broken, but only once.
    pub(super) fn take_break_announcement(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.told_broken, true) {
            return None;
        }
        self.broken.as_ref().map(|(_, reason)| reason.clone())
    }

    /// Returns whether the members were notified that the world cannot continue.
    pub(super) fn is_break_announced(&self) -> bool {
        self.told_broken
    }

    /// Makes all announcements due again, because every process that received them may be gone.
    pub(super) fn reset_announcements(&mut self) {
        (self.told_broken, self.told) = (false, (false, false));
    }

    /// Returns two flags: whether members were notified that some of them must leave, and that new
    /// workers wait.
    pub(super) fn announced_changes(&self) -> (bool, bool) {
        self.told
    }

    /// Records the announced change, and returns whether it is new to the members.
    pub(super) fn announce_changes(&mut self, removed: bool, added: bool) -> bool {
        let news = (removed && !self.told.0) || (added && !self.told.1);
        self.told = (removed, added);
        news
    }
}

#[cfg(test)]
impl CurrentWorld {
    /// Returns whether members were notified to ask for another world.
    pub(super) fn is_change_announced(&self) -> bool {
        self.broken.is_none() && self.told != (false, false)
    }
}

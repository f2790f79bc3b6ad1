// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The present world of an elastic job, from its assignment to the next.

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{Rank, TaskId, TaskPlace};
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, How};

/// The reason why a worker is gone that should not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Why {
    /// It failed by itself.
    Own(String),
    /// A collective had lost a peer: another worker failed first.
    Peer(String),
    /// A signal ended it, its agent or host was lost, or it could not be started.
    Lost(String),
}

/// A world and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Present {
    /// Its members by rank, gone ones included.
    pub(super) order: Vec<TaskId>,
    ranks: BTreeMap<TaskId, Rank>,
    /// The same with their hosts.
    pub(super) places: Vec<TaskPlace>,
    /// Since when it cannot continue, and why.
    pub(super) broken: Option<(Duration, String)>,
    /// Members that failed, in order of time.
    pub(super) failures: Vec<Failure>,
    /// The function has returned on some rank of an earlier world: these are the others, and no
    /// worker joins them.
    pub(super) finishing: bool,
    told_broken: bool,
    told: (bool, bool),
}

/// A member that failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Failure {
    task: TaskId,
    sentence: String,
    why: Why,
}

impl Why {
    /// Returns the meaning of an exit with another code than 0.
    pub(super) fn of(exit: &Exit) -> Self {
        let sentence = exit.how.to_string();
        match &exit.how {
            _ if exit.peer_error => Self::Peer(sentence),
            How::Code(_) => Self::Own(sentence),
            How::Signal(_) | How::NotStarted(_) => Self::Lost(sentence),
        }
    }

    pub(super) fn sentence(&self) -> &str {
        match self {
            Self::Own(sentence) | Self::Peer(sentence) | Self::Lost(sentence) => sentence,
        }
    }
}

impl Present {
    pub(super) fn new(order: Vec<TaskId>, places: Vec<TaskPlace>, finishing: bool) -> Self {
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

    pub(super) fn rank(&self, task: TaskId) -> Option<Rank> {
        self.ranks.get(&task).copied()
    }

    /// Says that the world cannot continue; the first reason counts.
    pub(super) fn break_up(&mut self, now: Duration, reason: String) {
        self.broken.get_or_insert((now, reason));
    }

    /// Notes a member's failure.
    pub(super) fn failed(&mut self, now: Duration, task: TaskId, sentence: String, why: &Why) {
        self.break_up(now, sentence.clone());
        self.failures.push(Failure { task, sentence, why: why.clone() });
    }

    /// Returns the reason why a world without survivors has no successor: all failed by themselves,
    /// or some had returned already.
    pub(super) fn hopeless(&self, done: bool) -> Option<(TaskId, String)> {
        let lost = self.failures.iter().any(|failure| matches!(failure.why, Why::Lost(_)));
        let own = self.failures.iter().find(|failure| matches!(failure.why, Why::Own(_)));
        let first = own.or(self.failures.first())?;
        (done || !lost).then(|| (first.task, first.sentence.clone()))
    }

    /// Returns the reason why the world is broken, once.
    pub(super) fn tell_broken(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.told_broken, true) {
            return None;
        }
        self.broken.as_ref().map(|(_, reason)| reason.clone())
    }

    /// Returns whether its members know that it cannot continue.
    pub(super) fn is_known_to_be_broken(&self) -> bool {
        self.told_broken
    }

    /// Repeats all announcements, because no process that has heard them may be left.
    pub(super) fn forget_told(&mut self) {
        (self.told_broken, self.told) = (false, (false, false));
    }

    /// Returns whether members were told that some are to go, and that others wait.
    pub(super) fn has_told(&self) -> (bool, bool) {
        self.told
    }

    /// Returns whether this is news for the members.
    pub(super) fn tell(&mut self, removed: bool, added: bool) -> bool {
        let news = (removed && !self.told.0) || (added && !self.told.1);
        self.told = (removed, added);
        news
    }
}

#[cfg(test)]
impl Present {
    /// Returns whether members were told to ask for another world.
    pub(super) fn is_told(&self) -> bool {
        self.broken.is_none() && self.told != (false, false)
    }
}

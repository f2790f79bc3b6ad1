// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A running generation: exits, losses, and the decision which failure came first.

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{Generation, Rank, TaskId, World};

use super::{Decision, Options, Presence, Registration};
use crate::exit::{Exit, Verdict};

/// A task of the generation.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) attempt: u64,
    pub(super) session: u64,
    pub(super) presence: Presence,
    rank: Rank,
    end: Option<End>,
}

#[derive(Clone, Debug)]
struct End {
    at: Duration,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Exited(Exit),
    Lost(String),
}

/// A generation between its assignment and the next.
#[derive(Clone, Debug)]
pub(super) struct Running {
    world: World,
    members: BTreeMap<TaskId, Member>,
    verdict: Option<Verdict>,
}

impl Running {
    pub(super) fn new(
        now: Duration,
        world: World,
        waiting: BTreeMap<TaskId, Registration>,
    ) -> Self {
        let ranks: BTreeMap<TaskId, Rank> =
            (0u32..).map(Rank).zip(&world.seats).map(|(rank, seat)| (seat.task, rank)).collect();
        let members = waiting
            .into_iter()
            .map(|(task, waiting)| {
                let presence = Presence { seen: now, ..waiting.presence };
                let rank = ranks.get(&task).copied().unwrap_or_default();
                let Registration { attempt, session, .. } = waiting;
                (task, Member { attempt, session, presence, rank, end: None })
            })
            .collect();
        Self { world, members, verdict: None }
    }

    pub(super) fn generation(&self) -> Generation {
        self.world.generation
    }

    pub(super) fn member(&mut self, task: TaskId) -> Option<&mut Member> {
        self.members.get_mut(&task)
    }

    pub(super) fn has(&self, task: TaskId, session: u64) -> bool {
        self.members.get(&task).is_some_and(|member| member.session == session)
    }

    /// Returns the members, by task and session.
    #[cfg(test)]
    pub(super) fn members(&self) -> impl Iterator<Item = (TaskId, u64)> + '_ {
        self.members.iter().map(|(task, member)| (*task, member.session))
    }

    /// Notes an exit; only the first of a task counts.
    pub(super) fn exited(&mut self, now: Duration, task: TaskId, exit: Exit) {
        if let Some(member) = self.members.get_mut(&task)
            && member.end.is_none()
        {
            member.end = Some(End { at: now, what: What::Exited(exit) });
        }
    }

    /// Passes the verdict, unless there is one or all tasks ended well.
    pub(super) fn stop(&mut self, verdict: Verdict) -> Option<Decision> {
        if self.verdict.is_some() || self.is_finished() {
            return None;
        }
        self.verdict = Some(verdict.clone());
        Some(Decision::Stop { generation: self.generation(), verdict })
    }

    /// Returns whether all tasks ended well by themselves.
    pub(super) fn is_finished(&self) -> bool {
        let well = |end: &End| matches!(&end.what, What::Exited(exit) if exit.how.is_success());
        self.verdict.is_none()
            && self.members.values().all(|member| member.end.as_ref().is_some_and(well))
    }

    /// Looks for lost agents, and for a failure whose grace is over.
    pub(super) fn settle(&mut self, now: Duration, options: &Options) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for (task, member) in &mut self.members {
            if member.end.is_none()
                && let Some(reason) = member.presence.gone(now, &options.liveness)
            {
                member.end = Some(End { at: now, what: What::Lost(reason.clone()) });
                decisions.push(Decision::Lost { task: *task, reason });
            }
        }
        if self.verdict.is_none()
            && let Some(verdict) = self.judge(now, options)
        {
            decisions.extend(self.stop(verdict));
        }
        decisions
    }

    /// Returns the verdict, once enough is known: all tasks have ended, or the grace after the
    /// first failure is over. While there are only peers' errors, the report of their cause is
    /// still on its way, so these wait longer.
    fn judge(&self, now: Duration, options: &Options) -> Option<Verdict> {
        let (task, member, end) = self.first_failure()?;
        let earliest = self.failures().map(|(_, _, end)| end.at).min()?;
        let grace = if end.is_own() {
            options.failure_grace
        } else {
            options.liveness.heartbeat_timeout + options.failure_grace
        };
        let everybody = self.members.values().all(|member| member.end.is_some());
        if !everybody && now.saturating_sub(earliest) < grace {
            return None;
        }
        let host = self
            .world
            .seats
            .get(member.rank.index())
            .map(|seat| seat.host.0.as_str())
            .unwrap_or_default();
        let reason = format!("rank {} on {host} {}", member.rank, end.sentence());
        Some(Verdict { reason, cause: Some(task), retry: matches!(end.what, What::Lost(_)) })
    }

    /// Returns the failure to blame: a task's own before a peer's error, then the earliest.
    fn first_failure(&self) -> Option<(TaskId, &Member, &End)> {
        self.failures().min_by_key(|(task, _, end)| (!end.is_own(), end.at, *task))
    }

    fn failures(&self) -> impl Iterator<Item = (TaskId, &Member, &End)> {
        self.members.iter().filter_map(|(task, member)| {
            member.end.as_ref().filter(|end| end.is_failure()).map(|end| (*task, member, end))
        })
    }
}

impl End {
    fn is_failure(&self) -> bool {
        match &self.what {
            What::Exited(exit) => !exit.how.is_success() && !exit.stopped,
            What::Lost(_) => true,
        }
    }

    fn is_own(&self) -> bool {
        match &self.what {
            What::Exited(exit) => !exit.peer_error,
            What::Lost(_) => true,
        }
    }

    fn sentence(&self) -> String {
        match &self.what {
            What::Exited(exit) => exit.how.to_string(),
            What::Lost(reason) => format!("was lost: {reason}"),
        }
    }
}

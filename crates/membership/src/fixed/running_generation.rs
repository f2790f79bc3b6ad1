// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A running generation: exits, losses, and the decision which failure came first.

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{Generation, Rank, TaskId, World};

use super::registration::{MembershipOptions, TaskRegistration};
use crate::exit::{ExitReport, GenerationVerdict};
use crate::inputs_and_decisions::{AgentPresence, MembershipDecision};

/// A task of the generation.
#[derive(Clone, Debug)]
pub(super) struct GenerationMember {
    pub(super) attempt: u64,
    pub(super) session: u64,
    pub(super) presence: AgentPresence,
    rank: Rank,
    end: Option<MemberEnd>,
}

#[derive(Clone, Debug)]
struct MemberEnd {
    at: Duration,
    observation: MemberObservation,
}

#[derive(Clone, Debug)]
enum MemberObservation {
    Exited(ExitReport),
    Lost(String),
}

/// A generation between its assignment and the next.
#[derive(Clone, Debug)]
pub(super) struct RunningGeneration {
    world: World,
    members: BTreeMap<TaskId, GenerationMember>,
    verdict: Option<GenerationVerdict>,
}

impl RunningGeneration {
    pub(super) fn new(
        now: Duration,
        world: World,
        waiting: BTreeMap<TaskId, TaskRegistration>,
    ) -> Self {
        let ranks: BTreeMap<TaskId, Rank> =
            (0u32..).map(Rank).zip(&world.seats).map(|(rank, seat)| (seat.task, rank)).collect();
        let members = waiting
            .into_iter()
            .map(|(task, waiting)| {
                // The wait for all tasks may have been long; each agent begins with the full
                // timeout.
                let presence = AgentPresence { seen: now, ..waiting.presence };
                let rank = ranks.get(&task).copied().unwrap_or_default();
                let TaskRegistration { attempt, session, .. } = waiting;
                (task, GenerationMember { attempt, session, presence, rank, end: None })
            })
            .collect();
        Self { world, members, verdict: None }
    }

    pub(super) fn generation(&self) -> Generation {
        self.world.generation
    }

    pub(super) fn member_mut(&mut self, task: TaskId) -> Option<&mut GenerationMember> {
        self.members.get_mut(&task)
    }

    pub(super) fn has_session(&self, task: TaskId, session: u64) -> bool {
        self.members.get(&task).is_some_and(|member| member.session == session)
    }

    /// Returns the members, by task and session.
    #[cfg(test)]
    pub(super) fn member_sessions(&self) -> impl Iterator<Item = (TaskId, u64)> + '_ {
        self.members.iter().map(|(task, member)| (*task, member.session))
    }

    /// Records an exit; only a task's first exit counts.
    pub(super) fn record_exit(&mut self, now: Duration, task: TaskId, exit: ExitReport) {
        if let Some(member) = self.members.get_mut(&task)
            // The report of an agent may be repeated, and a loss may be followed by a late report.
            && member.end.is_none()
        {
            member.end = Some(MemberEnd { at: now, observation: MemberObservation::Exited(exit) });
        }
    }

    /// Stops the generation with this verdict, unless it has a verdict or all tasks ended
    /// successfully.
    pub(super) fn stop_generation(
        &mut self,
        verdict: GenerationVerdict,
    ) -> Option<MembershipDecision> {
        if self.verdict.is_some() || self.is_finished() {
            return None;
        }
        self.verdict = Some(verdict.clone());
        Some(MembershipDecision::Stop { generation: self.generation(), verdict })
    }

    /// Returns whether all tasks ended successfully by themselves.
    pub(super) fn is_finished(&self) -> bool {
        let well = |end: &MemberEnd| matches!(&end.observation, MemberObservation::Exited(exit) if exit.kind.is_success());
        self.verdict.is_none()
            && self.members.values().all(|member| member.end.as_ref().is_some_and(well))
    }

    /// Checks for lost agents, and for a failure whose grace period is over.
    pub(super) fn settle_losses(
        &mut self,
        now: Duration,
        options: &MembershipOptions,
    ) -> Vec<MembershipDecision> {
        let mut decisions = Vec::new();
        for (task, member) in &mut self.members {
            if member.end.is_none()
                && let Some(reason) = member.presence.gone_reason(now, &options.liveness)
            {
                member.end = Some(MemberEnd {
                    at: now,
                    observation: MemberObservation::Lost(reason.clone()),
                });
                decisions.push(MembershipDecision::Lost { task: *task, reason });
            }
        }
        if self.verdict.is_none()
            && let Some(verdict) = self.decide_verdict(now, options)
        {
            decisions.extend(self.stop_generation(verdict));
        }
        decisions
    }

    /// Returns the verdict once enough is known: all tasks have ended, or the grace period after
    /// the first failure is over. If only peers' errors are known, the report of their cause is
    /// still on its way, so the wait is longer.
    fn decide_verdict(
        &self,
        now: Duration,
        options: &MembershipOptions,
    ) -> Option<GenerationVerdict> {
        let (task, member, end) = self.first_failure()?;
        let earliest = self.member_failures().map(|(_, _, end)| end.at).min()?;
        // A worker that fails makes its peers fail, and their reports may arrive first.
        let grace = if end.is_own_failure() {
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
        let reason = format!("rank {} on {host} {}", member.rank, end.as_sentence());
        Some(GenerationVerdict {
            reason,
            cause: Some(task),
            // A lost executor can be replaced. A program that failed would fail again.
            retry: matches!(end.observation, MemberObservation::Lost(_)),
        })
    }

    /// Returns the failure to blame: a task's own failure before a peer's error, then the earliest.
    fn first_failure(&self) -> Option<(TaskId, &GenerationMember, &MemberEnd)> {
        // The number of the task makes the verdict the same in every run.
        self.member_failures().min_by_key(|(task, _, end)| (!end.is_own_failure(), end.at, *task))
    }

    fn member_failures(&self) -> impl Iterator<Item = (TaskId, &GenerationMember, &MemberEnd)> {
        self.members.iter().filter_map(|(task, member)| {
            member.end.as_ref().filter(|end| end.is_failure()).map(|end| (*task, member, end))
        })
    }
}

impl MemberEnd {
    fn is_failure(&self) -> bool {
        match &self.observation {
            // A worker that was stopped follows from a failure elsewhere.
            MemberObservation::Exited(exit) => !exit.kind.is_success() && !exit.stopped,
            MemberObservation::Lost(_) => true,
        }
    }

    fn is_own_failure(&self) -> bool {
        match &self.observation {
            MemberObservation::Exited(exit) => !exit.peer_error,
            MemberObservation::Lost(_) => true,
        }
    }

    fn as_sentence(&self) -> String {
        match &self.observation {
            MemberObservation::Exited(exit) => exit.kind.to_string(),
            MemberObservation::Lost(reason) => format!("was lost: {reason}"),
        }
    }
}

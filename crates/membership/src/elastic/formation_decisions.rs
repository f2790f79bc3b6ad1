// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Formation decisions: when a world is formed, which workers are in it, and when the job is done.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use farandole_world::{
    Generation, TaskId, TaskPlacement, assign_ranks_as_listed, format_counted_noun,
};

use super::world::{CurrentWorld, LossCause};
use super::{
    ElasticMembership, ElasticPhase, FIRST_WORLD_SETTLE_TIME, JOB_DONE_REASON, MAX_MUTUAL_LOSSES,
    WorkerStage, rank_order,
};
use crate::exit::GenerationVerdict;
use crate::inputs_and_decisions::{AgentPresence, MembershipDecision};

impl ElasticMembership {
    /// Returns whether the function has returned on some rank.
    pub(super) fn has_returned_rank(&self, present: &CurrentWorld) -> bool {
        present.finishing
            || present.order.iter().any(|task| self.worker_stage(*task) == Some(&WorkerStage::Done))
    }

    /// Returns the members of the present world that are not done, not gone and not leaving, by
    /// rank.
    pub(super) fn surviving_members(&self, present: &CurrentWorld) -> Vec<TaskId> {
        let there = |task: &TaskId| {
            self.worker_stage(*task)
                .is_some_and(|stage| !matches!(stage, WorkerStage::Done | WorkerStage::Leaving))
        };
        present.order.iter().copied().filter(there).collect()
    }

    /// Returns the ready workers that are in no world, in the order of their start.
    pub(super) fn ready_newcomers(&self) -> Vec<TaskId> {
        let member = |task: &TaskId| {
            self.present.as_ref().is_some_and(|present| present.task_rank(*task).is_some())
        };
        self.workers
            .iter()
            .filter(|(task, worker)| {
                matches!(worker.stage, WorkerStage::Ready { .. }) && !member(task)
            })
            .map(|(task, _)| *task)
            .collect()
    }

    /// Returns whether a request of this worker for a world may cause a decision at once.
    pub(super) fn may_cause_decision(&self, task: TaskId) -> bool {
        // A dismissed worker must get its answer at once, and not at the next tick.
        if self.workers.get(&task).is_none_or(|worker| worker.dismissed.is_some()) {
            return true;
        }
        let Some(present) = &self.present else {
            return self.ready_newcomers().len() >= self.rules.first as usize;
        };
        let works = |task: &TaskId| self.worker_stage(*task) == Some(&WorkerStage::Working);
        !present.is_break_announced() || !present.order.iter().any(works)
    }

    /// Finishes the job, aborts it as hopeless, or forms a world; decides nothing if nothing is
    /// certain yet.
    pub(super) fn decide_next_world(
        &mut self,
        now: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        let Some(present) = &self.present else {
            return self.form_fresh_world(now, self.began, decisions);
        };
        let survivors = self.surviving_members(present);
        let done = self.has_returned_rank(present);
        let unbroken = present.broken.is_none();
        // A member that failed after others have returned has not done its work.
        if done && survivors.is_empty() && present.failures.is_empty() {
            self.phase = ElasticPhase::Finished { generation: self.generation };
            let ending =
                self.workers.iter().filter(|(_, worker)| worker.stage != WorkerStage::Done);
            decisions.extend(ending.map(|(task, _)| MembershipDecision::End {
                task: *task,
                reason: JOB_DONE_REASON.to_owned(),
            }));
            self.disband_workers();
            decisions.push(MembershipDecision::Finished { generation: self.generation });
            return;
        }
        if unbroken
            || survivors.iter().any(|task| self.worker_stage(*task) == Some(&WorkerStage::Working))
        {
            return;
        }
        if survivors.is_empty()
            && let Some((task, reason)) = present.hopeless_reason(done)
        {
            return self.abort_job(reason, Some(task), decisions);
        }
        let broken_at = present.broken.as_ref().map_or(now, |broken| broken.0);
        if survivors.is_empty() && !done {
            return self.form_fresh_world(now, broken_at, decisions);
        }
        let calm = present.failures.is_empty();
        let mut members = survivors.clone();
        if !done {
            let room = (self.rules.max_workers as usize).saturating_sub(members.len());
            members.extend(self.ready_newcomers().into_iter().take(room));
        }
        // After a rank has returned, the others must finish, however few they are (EL-1).
        if members.len() >= self.rules.min_workers as usize || done {
            // A failed member explains mutual losses, so only calm worlds count against a pair.
            if calm && let Some(task) = self.find_unreachable_survivor(&survivors) {
                let reason = "cannot be reached by its peers".to_owned();
                decisions.push(MembershipDecision::End { task, reason: reason.clone() });
                return self.remove_lost_worker(now, task, LossCause::Lost(reason), decisions);
            }
            return self.assign_world(now, &survivors, members, decisions);
        }
        self.abort_after_timeout(now, broken_at, members.len(), decisions);
    }

    /// Forms a world whose members have been in no other world.
    pub(super) fn form_fresh_world(
        &mut self,
        now: Duration,
        since: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        let mut ready = self.ready_newcomers();
        ready.truncate(self.rules.max_workers as usize);
        let late = now.saturating_sub(since) >= self.rules.timeout;
        if ready.len() >= self.rules.first as usize {
            self.changed |= self.enough_since.is_none();
            let enough = *self.enough_since.get_or_insert(now);
            // Then no other worker can come, so waiting would gain nothing.
            let full = ready.len() == self.rules.max_workers as usize
                || self.missing_workers().next().is_none();
            if full || now.saturating_sub(enough) >= FIRST_WORLD_SETTLE_TIME {
                self.assign_world(now, &[], ready, decisions);
            }
        } else if late && ready.len() >= self.rules.min_workers as usize {
            self.assign_world(now, &[], ready, decisions);
        } else {
            self.changed |= self.enough_since.take().is_some();
            self.abort_after_timeout(now, since, ready.len(), decisions);
        }
    }

    pub(super) fn abort_after_timeout(
        &mut self,
        now: Duration,
        since: Duration,
        ready: usize,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        if now.saturating_sub(since) < self.rules.timeout {
            return;
        }
        let min_workers = self.rules.min_workers;
        let last = self
            .last_loss
            .as_ref()
            .map_or_else(String::new, |loss| format!("; the last loss: {loss}"));
        let reason = format!(
            "timed out after {:.1?} waiting for a world of at least {}: {ready} ready, slots now: \
             {}{last}",
            self.rules.timeout,
            format_counted_noun(min_workers.into(), "worker"),
            self.hosts.describe_slots(now),
        );
        self.abort_job(reason, None, decisions);
    }

    /// Finds two survivors that have lost each other `MAX_MUTUAL_LOSSES` times while no other
    /// worker failed, and returns the one with the higher rank.
    pub(super) fn find_unreachable_survivor(&mut self, survivors: &[TaskId]) -> Option<TaskId> {
        let ranks: BTreeMap<TaskId, usize> =
            survivors.iter().enumerate().map(|(rank, task)| (*task, rank)).collect();
        let mut pairs = BTreeSet::new();
        for (one, rank) in &ranks {
            let Some(WorkerStage::Ready { suspects, .. }) = self.worker_stage(*one) else {
                continue;
            };
            for (other, others) in suspects.iter().filter_map(|task| ranks.get_key_value(task)) {
                match rank.cmp(others) {
                    Ordering::Less => pairs.insert((*one, *other)),
                    Ordering::Greater => pairs.insert((*other, *one)),
                    Ordering::Equal => false,
                };
            }
        }
        // The journal must contain the step even if it decides nothing: a replay counts the same
        // losses.
        self.changed |= self.quarrels.keys().ne(&pairs) || !pairs.is_empty();
        self.quarrels.retain(|pair, _| pairs.contains(pair));
        for pair in pairs {
            *self.quarrels.entry(pair).or_default() += 1;
        }
        // The higher rank goes, because rank 0 must stay (EL-3).
        let (_, out) = *self.quarrels.iter().find(|(_, times)| **times > MAX_MUTUAL_LOSSES)?.0;
        self.quarrels.retain(|(one, other), _| *one != out && *other != out);
        Some(out)
    }

    pub(super) fn assign_world(
        &mut self,
        now: Duration,
        survivors: &[TaskId],
        members: Vec<TaskId>,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        if let Some(limit) = self.rules.reset_limit
            // The first world is no reset.
            && self.generation.0 > u64::from(limit)
        {
            let reason = format!(
                "Farandole was shut down because the number of resets during the elastic job \
                 exceeded the limit: {limit}"
            );
            return self.abort_job(reason, None, decisions);
        }
        let finishing =
            self.present.as_ref().is_some_and(|present| self.has_returned_rank(present));
        let old: &[TaskId] = self.present.as_ref().map_or(&[], |present| &present.order);
        let order = rank_order::order_ranks(old, survivors, &members[survivors.len()..], |task| {
            self.workers.get(&task).and_then(|worker| worker.host_hash.clone())
        });
        let placement = |task: &TaskId| {
            let host = self.workers.get(task)?.host_hash.clone()?;
            Some(TaskPlacement { task: *task, host })
        };
        let placements: Vec<TaskPlacement> = order.iter().filter_map(placement).collect();
        let next = Generation(self.generation.0 + 1);
        let Ok(world) = assign_ranks_as_listed(next, &placements) else { return };
        for task in &order {
            if let Some(worker) = self.workers.get_mut(task) {
                worker.stage = WorkerStage::Working;
                // The worker asked for this world, which shows that it lives.
                worker.presence = AgentPresence { seen: now, ..worker.presence };
            }
        }
        self.generation = next;
        self.enough_since = None;
        // Workers that were done in the previous world have ended.
        self.workers.retain(|_, worker| worker.stage != WorkerStage::Done);
        self.present = Some(CurrentWorld::new(order, placements, finishing));
        decisions.push(MembershipDecision::Assigned { world });
    }

    /// Announces to the members of the present world that another one should follow.
    pub(super) fn announce_world_change(&mut self, decisions: &mut Vec<MembershipDecision>) {
        let Some(present) = &self.present else { return };
        if present.broken.is_some() {
            if let Some(present) = &mut self.present
                && let Some(reason) = present.take_break_announcement()
            {
                let verdict = GenerationVerdict { reason, cause: None, retry: true };
                decisions.push(MembershipDecision::Broken { generation: self.generation, verdict });
            }
            return;
        }
        if self.has_returned_rank(present) {
            return;
        }
        let going =
            |task: &TaskId| self.workers.get(task).is_some_and(|worker| worker.dismissed.is_some());
        let removed = present.order.iter().any(going);
        let staying = present.order.iter().filter(|task| !going(task)).count();
        let added = staying < self.rules.max_workers as usize && !self.ready_newcomers().is_empty();
        let generation = self.generation;
        let Some(present) = &mut self.present else { return };
        self.changed |= present.announced_changes() != (removed, added);
        if present.record_announced_changes(removed, added) {
            decisions.push(MembershipDecision::Changed { generation, removed, added });
        }
    }
}

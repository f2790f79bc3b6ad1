// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decides when a world is formed, which workers are in it, and when the job is done.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use farandole_world::{Generation, TaskId, TaskPlace, assign_as_listed};

use super::world::{Present, Why};
use super::{DONE, Decision, Elastic, Phase, Presence, QUARRELS, SETTLING, Stage, seats};
use crate::exit::Verdict;

impl Elastic {
    /// Returns whether the function has returned on some rank.
    pub(super) fn has_done(&self, present: &Present) -> bool {
        present.finishing
            || present.order.iter().any(|task| self.stage(*task) == Some(&Stage::Done))
    }

    /// Returns the members of the present world that are neither done nor gone nor about to go, by
    /// rank.
    pub(super) fn survivors(&self, present: &Present) -> Vec<TaskId> {
        let there = |task: &TaskId| {
            self.stage(*task).is_some_and(|stage| !matches!(stage, Stage::Done | Stage::Leaving))
        };
        present.order.iter().copied().filter(there).collect()
    }

    /// Ready workers that are in no world, in the order of their start.
    pub(super) fn newcomers(&self) -> Vec<TaskId> {
        let member = |task: &TaskId| {
            self.present.as_ref().is_some_and(|present| present.rank(*task).is_some())
        };
        self.workers
            .iter()
            .filter(|(task, worker)| matches!(worker.stage, Stage::Ready { .. }) && !member(task))
            .map(|(task, _)| *task)
            .collect()
    }

    /// Returns whether anything may follow at once when this worker asks for a world.
    pub(super) fn may_follow(&self, task: TaskId) -> bool {
        if self.workers.get(&task).is_none_or(|worker| worker.dismissed.is_some()) {
            return true;
        }
        let Some(present) = &self.present else {
            return self.newcomers().len() >= self.rules.first as usize;
        };
        let works = |task: &TaskId| self.stage(*task) == Some(&Stage::Working);
        !present.is_known_to_be_broken() || !present.order.iter().any(works)
    }

    /// The job is done, or hopeless, or a world can be formed; or nothing can be said yet.
    pub(super) fn conclude(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let Some(present) = &self.present else {
            return self.fresh_world(now, self.began, decisions);
        };
        let survivors = self.survivors(present);
        let done = self.has_done(present);
        let unbroken = present.broken.is_none();
        if done && survivors.is_empty() && present.failures.is_empty() {
            self.phase = Phase::Finished { generation: self.generation };
            let ending = self.workers.iter().filter(|(_, worker)| worker.stage != Stage::Done);
            decisions.extend(
                ending.map(|(task, _)| Decision::End { task: *task, reason: DONE.to_owned() }),
            );
            self.disband();
            decisions.push(Decision::Finished { generation: self.generation });
            return;
        }
        if unbroken || survivors.iter().any(|task| self.stage(*task) == Some(&Stage::Working)) {
            return;
        }
        if survivors.is_empty()
            && let Some((task, reason)) = present.hopeless(done)
        {
            return self.abort(reason, Some(task), decisions);
        }
        let broken_at = present.broken.as_ref().map_or(now, |broken| broken.0);
        if survivors.is_empty() && !done {
            return self.fresh_world(now, broken_at, decisions);
        }
        let calm = present.failures.is_empty();
        let mut members = survivors.clone();
        if !done {
            let room = (self.rules.most as usize).saturating_sub(members.len());
            members.extend(self.newcomers().into_iter().take(room));
        }
        if members.len() >= self.rules.least as usize || done {
            if calm && let Some(task) = self.quarrel(&survivors) {
                let reason = "cannot be reached by its peers".to_owned();
                decisions.push(Decision::End { task, reason: reason.clone() });
                return self.lose(now, task, Why::Lost(reason), decisions);
            }
            return self.assign(now, &survivors, members, decisions);
        }
        self.wait_or_give_up(now, broken_at, members.len(), decisions);
    }

    /// A world whose members have not been in another one.
    pub(super) fn fresh_world(
        &mut self,
        now: Duration,
        since: Duration,
        decisions: &mut Vec<Decision>,
    ) {
        let mut ready = self.newcomers();
        ready.truncate(self.rules.most as usize);
        let late = now.saturating_sub(since) >= self.rules.timeout;
        if ready.len() >= self.rules.first as usize {
            self.changed |= self.enough_since.is_none();
            let enough = *self.enough_since.get_or_insert(now);
            let full = ready.len() == self.rules.most as usize || self.missing().next().is_none();
            if full || now.saturating_sub(enough) >= SETTLING {
                self.assign(now, &[], ready, decisions);
            }
        } else if late && ready.len() >= self.rules.least as usize {
            self.assign(now, &[], ready, decisions);
        } else {
            self.changed |= self.enough_since.take().is_some();
            self.wait_or_give_up(now, since, ready.len(), decisions);
        }
    }

    pub(super) fn wait_or_give_up(
        &mut self,
        now: Duration,
        since: Duration,
        ready: usize,
        decisions: &mut Vec<Decision>,
    ) {
        if now.saturating_sub(since) < self.rules.timeout {
            return;
        }
        let least = self.rules.least;
        let last = self
            .last_loss
            .as_ref()
            .map_or_else(String::new, |loss| format!("; the last loss: {loss}"));
        let reason = format!(
            "timed out after {:.1?} waiting for a world of at least {least} workers: {ready} \
             ready, slots now: {}{last}",
            self.rules.timeout,
            self.hosts.describe(now),
        );
        self.abort(reason, None, decisions);
    }

    /// Two survivors that keep losing each other while no other fails: the one of the higher rank,
    /// once that has happened often enough.
    pub(super) fn quarrel(&mut self, survivors: &[TaskId]) -> Option<TaskId> {
        let ranks: BTreeMap<TaskId, usize> =
            survivors.iter().enumerate().map(|(rank, task)| (*task, rank)).collect();
        let mut pairs = BTreeSet::new();
        for (one, rank) in &ranks {
            let Some(Stage::Ready { suspects, .. }) = self.stage(*one) else { continue };
            for (other, others) in suspects.iter().filter_map(|task| ranks.get_key_value(task)) {
                match rank.cmp(others) {
                    Ordering::Less => pairs.insert((*one, *other)),
                    Ordering::Greater => pairs.insert((*other, *one)),
                    Ordering::Equal => false,
                };
            }
        }
        self.changed |= self.quarrels.keys().ne(&pairs) || !pairs.is_empty();
        self.quarrels.retain(|pair, _| pairs.contains(pair));
        for pair in pairs {
            *self.quarrels.entry(pair).or_default() += 1;
        }
        let (_, out) = *self.quarrels.iter().find(|(_, times)| **times > QUARRELS)?.0;
        self.quarrels.retain(|(one, other), _| *one != out && *other != out);
        Some(out)
    }

    pub(super) fn assign(
        &mut self,
        now: Duration,
        survivors: &[TaskId],
        members: Vec<TaskId>,
        decisions: &mut Vec<Decision>,
    ) {
        if let Some(limit) = self.rules.reset_limit
            && self.generation.0 > u64::from(limit)
        {
            let reason = format!(
                "Farandole was shut down because the number of resets during the elastic job \
                 exceeded the limit: {limit}"
            );
            return self.abort(reason, None, decisions);
        }
        let finishing = self.present.as_ref().is_some_and(|present| self.has_done(present));
        let old: &[TaskId] = self.present.as_ref().map_or(&[], |present| &present.order);
        let order = seats::order(old, survivors, &members[survivors.len()..], |task| {
            self.workers.get(&task).and_then(|worker| worker.place.clone())
        });
        let place = |task: &TaskId| {
            let host = self.workers.get(task)?.place.clone()?;
            Some(TaskPlace { task: *task, host })
        };
        let places: Vec<TaskPlace> = order.iter().filter_map(place).collect();
        let next = Generation(self.generation.0 + 1);
        let Ok(world) = assign_as_listed(next, &places) else { return };
        for task in &order {
            if let Some(worker) = self.workers.get_mut(task) {
                worker.stage = Stage::Working;
                worker.presence = Presence { seen: now, ..worker.presence };
            }
        }
        self.generation = next;
        self.enough_since = None;
        // Those that were done in the world before have ended.
        self.workers.retain(|_, worker| worker.stage != Stage::Done);
        self.present = Some(Present::new(order, places, finishing));
        decisions.push(Decision::Assigned { world });
    }

    /// Tells the members of a world at work when another one should follow.
    pub(super) fn tell_changes(&mut self, decisions: &mut Vec<Decision>) {
        let Some(present) = &self.present else { return };
        if present.broken.is_some() {
            if let Some(present) = &mut self.present
                && let Some(reason) = present.tell_broken()
            {
                let verdict = Verdict { reason, cause: None, retry: true };
                decisions.push(Decision::Broken { generation: self.generation, verdict });
            }
            return;
        }
        if self.has_done(present) {
            return;
        }
        let going =
            |task: &TaskId| self.workers.get(task).is_some_and(|worker| worker.dismissed.is_some());
        let removed = present.order.iter().any(going);
        let staying = present.order.iter().filter(|task| !going(task)).count();
        let added = staying < self.rules.most as usize && !self.newcomers().is_empty();
        let generation = self.generation;
        let Some(present) = &mut self.present else { return };
        self.changed |= present.has_told() != (removed, added);
        if present.tell(removed, added) {
            decisions.push(Decision::Changed { generation, removed, added });
        }
    }
}

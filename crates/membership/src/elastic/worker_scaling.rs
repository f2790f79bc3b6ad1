// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Scaling decisions: which workers are started and which must leave, from the number of slots.

use std::time::Duration;

use farandole_world::TaskId;

use super::{ElasticMembership, ElasticWorker, LEAVE_TIMEOUT, WorkerStage};
use crate::inputs_and_decisions::MembershipDecision;

impl ElasticWorker {
    /// Returns whether the worker stays if its host has a slot.
    fn can_stay(&self) -> bool {
        // A worker that was only dismissed for its slot, and still works, stays if the slot comes
        // back.
        let is_revocable = self.lacks_slot && self.stage == WorkerStage::Working;
        (self.dismissed.is_none() || is_revocable) && self.stage != WorkerStage::Done
    }
}

impl ElasticMembership {
    /// Starts workers on free slots, and dismisses workers without a slot.
    pub(super) fn start_and_dismiss_workers(
        &mut self,
        now: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        if !self.hosts.are_hosts_known() {
            return;
        }
        let rank =
            |task: &TaskId| self.present.as_ref().and_then(|present| present.task_rank(*task));
        // Workers that were dismissed for lack of a slot leave first, then workers without a rank,
        // then the workers with the highest ranks.
        let mut candidates: Vec<(TaskId, &ElasticWorker)> = self
            .workers
            .iter()
            .filter(|(_, worker)| worker.can_stay())
            .map(|(task, worker)| (*task, worker))
            .collect();
        candidates.sort_by_cached_key(|(task, worker)| {
            let rank = rank(task);
            // If the highest ranks leave, all others keep their ranks (EL-3).
            (worker.dismissed.is_some(), rank.is_none(), rank, *task)
        });
        let mut living: Vec<(TaskId, &str)> =
            candidates.iter().map(|(task, worker)| (*task, worker.host.as_str())).collect();
        let surplus = self.hosts.surplus_workers(&living);
        living.retain(|(task, _)| !surplus.contains_key(task));
        let kept: Vec<TaskId> = living.iter().map(|(task, _)| *task).collect();
        let wanted = (self.rules.max_workers.saturating_add(self.rules.spares) as usize)
            .saturating_sub(living.len());
        let vacant: Vec<String> = self.hosts.vacant_slots(now, &living).take(wanted).collect();
        // A discovery that missed a host for a moment must not cost its workers.
        for task in kept {
            if let Some(worker) = self.workers.get_mut(&task) {
                self.changed |= worker.dismissed.take().is_some();
                worker.lacks_slot = false;
            }
        }
        for (task, reason) in surplus {
            self.dismiss_worker(now, task, reason);
            if let Some(worker) = self.workers.get_mut(&task) {
                worker.lacks_slot = true;
            }
        }
        // A new worker would find no work, because no worker joins a world that is finishing.
        if self.present.as_ref().is_some_and(|present| self.has_returned_rank(present)) {
            return;
        }
        for host in vacant {
            let task = TaskId(self.next_task);
            self.next_task += 1;
            self.workers.insert(task, ElasticWorker::new_starting(host.clone(), now));
            decisions.push(MembershipDecision::Start { task, host });
        }
    }

    /// Dismisses a worker, which leaves at its next opportunity.
    pub(super) fn dismiss_worker(&mut self, now: Duration, task: TaskId, reason: String) {
        if let Some(worker) =
            self.workers.get_mut(&task).filter(|worker| worker.stage != WorkerStage::Done)
        {
            self.changed |= worker.dismissed.is_none();
            // The first dismissal counts, or repeated ones would move the time limit.
            worker.dismissed.get_or_insert((now, reason));
        }
    }

    /// Lets dismissed workers go if they are not at work. Ends a worker that takes longer than
    /// `LEAVE_TIMEOUT`.
    pub(super) fn release_dismissed_workers(
        &mut self,
        now: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        let mut ended = Vec::new();
        for (task, worker) in &mut self.workers {
            let Some((since, reason)) = &worker.dismissed else { continue };
            let late = now.saturating_sub(*since) >= LEAVE_TIMEOUT;
            match worker.stage {
                WorkerStage::Ready { .. } => {
                    worker.stage = WorkerStage::Leaving;
                    decisions.push(MembershipDecision::Dismissed {
                        task: *task,
                        reason: reason.clone(),
                    });
                }
                // Such a worker is in no world, so its end costs no other worker anything.
                WorkerStage::Starting | WorkerStage::Importing => {
                    ended.push((*task, reason.clone()))
                }
                WorkerStage::Working | WorkerStage::Leaving if late => {
                    ended.push((*task, reason.clone()))
                }
                _ => {}
            }
        }
        for (task, reason) in ended {
            self.remove_blameless_worker(now, task);
            decisions.push(MembershipDecision::End { task, reason });
        }
    }
}

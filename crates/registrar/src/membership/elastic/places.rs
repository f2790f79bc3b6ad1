// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decides which workers are started and which must leave, from the number of slots.

use std::time::Duration;

use farandole_world::TaskId;

use super::{Decision, Elastic, LEAVING, Stage, Worker};

impl Elastic {
    /// Starts workers on free slots, and dismisses workers without a slot.
    pub(super) fn plan(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        if !self.hosts.are_known() {
            return;
        }
        let rank = |task: &TaskId| self.present.as_ref().and_then(|present| present.rank(*task));
        // Those without a rank go first, then the highest.
        let mut living: Vec<(TaskId, &str)> = self
            .workers
            .iter()
            .filter(|(_, worker)| worker.dismissed.is_none() && worker.stage != Stage::Done)
            .map(|(task, worker)| (*task, worker.host.as_str()))
            .collect();
        living.sort_by_cached_key(|(task, _)| {
            let rank = rank(task);
            (rank.is_none(), rank, *task)
        });
        let surplus = self.hosts.surplus(&living);
        living.retain(|(task, _)| !surplus.contains_key(task));
        let wanted = (self.rules.most.saturating_add(self.rules.spares) as usize)
            .saturating_sub(living.len());
        let vacant: Vec<String> = self.hosts.vacancies(now, &living).take(wanted).collect();
        for (task, reason) in surplus {
            self.dismiss(now, task, reason);
        }
        if self.present.as_ref().is_some_and(|present| self.has_done(present)) {
            return;
        }
        for host in vacant {
            let task = TaskId(self.next);
            self.next += 1;
            self.workers.insert(task, Worker::started(host.clone(), now));
            decisions.push(Decision::Start { task, host });
        }
    }

    /// Dismisses a worker at the next chance.
    pub(super) fn dismiss(&mut self, now: Duration, task: TaskId, reason: String) {
        if let Some(worker) =
            self.workers.get_mut(&task).filter(|worker| worker.stage != Stage::Done)
        {
            self.changed |= worker.dismissed.is_none();
            worker.dismissed.get_or_insert((now, reason));
        }
    }

    /// Dismissed workers that are not at work may go now; those that take too long are ended.
    pub(super) fn dismiss_ready(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let mut ended = Vec::new();
        for (task, worker) in &mut self.workers {
            let Some((since, reason)) = &worker.dismissed else { continue };
            let late = now.saturating_sub(*since) >= LEAVING;
            match worker.stage {
                Stage::Ready { .. } => {
                    worker.stage = Stage::Leaving;
                    decisions.push(Decision::Dismissed { task: *task, reason: reason.clone() });
                }
                Stage::Starting | Stage::Importing => ended.push((*task, reason.clone())),
                Stage::Working | Stage::Leaving if late => ended.push((*task, reason.clone())),
                _ => {}
            }
        }
        for (task, reason) in ended {
            self.leave(now, task);
            decisions.push(Decision::End { task, reason });
        }
    }
}

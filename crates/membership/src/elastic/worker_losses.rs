// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Workers that end, are silent, or are lost by their peers.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::TaskId;

use super::world::LossCause;
use super::{ElasticMembership, ElasticWorker, SUSPECT_GRACE_PERIOD, WorkerStage};
use crate::exit::ExitReport;
use crate::inputs_and_decisions::MembershipDecision;

impl ElasticMembership {
    /// Records the end of a worker, by itself or because its agent was ordered to end it.
    pub(super) fn record_exit(
        &mut self,
        now: Duration,
        task: TaskId,
        exit: &ExitReport,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        self.unheard.remove(&task);
        let Some(worker) = self.workers.get_mut(&task) else { return };
        let member = self.present.as_ref().is_some_and(|present| present.task_rank(task).is_some());
        if worker.stage == WorkerStage::Done {
            return;
        }
        // The job wanted this end, so its exit code says nothing about the host.
        if worker.stage == WorkerStage::Leaving || worker.dismissed.is_some() || exit.stopped {
            self.remove_blameless_worker(now, task);
        } else if !exit.kind.is_success() {
            self.remove_lost_worker(now, task, LossCause::from_exit(exit), decisions);
        } else if member && worker.stage == WorkerStage::Working {
            worker.stage = WorkerStage::Done;
        } else if matches!(worker.stage, WorkerStage::Starting | WorkerStage::Importing) {
            // Count it as a failure: a program that never asks for a world would be started again
            // for ever.
            self.remove_lost_worker(
                now,
                task,
                LossCause::OwnFailure("ended before it called init()".to_owned()),
                decisions,
            );
        } else {
            self.remove_blameless_worker(now, task);
        }
    }

    /// Removes a worker that is gone without a failure.
    pub(super) fn remove_blameless_worker(&mut self, now: Duration, task: TaskId) {
        self.workers.remove(&task);
        if let Some(present) = &mut self.present
            && let Some(rank) = present.task_rank(task)
        {
            present.mark_world_broken(now, format!("rank {rank} left"));
        }
    }

    /// Removes a lost worker and blames its host, unless the worker was dismissed.
    pub(super) fn remove_lost_worker(
        &mut self,
        now: Duration,
        task: TaskId,
        cause: LossCause,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        let Some(worker) = self.workers.get(&task) else { return };
        if worker.dismissed.is_some() {
            // Its host is probably about to be removed, and may have ended it before it could
            // leave.
            return self.remove_blameless_worker(now, task);
        }
        let reason = cause.as_sentence().to_owned();
        let began = worker.stage != WorkerStage::Starting && worker.stage != WorkerStage::Importing;
        let rank = self.present.as_ref().and_then(|present| present.task_rank(task));
        let host = worker.host.clone();
        let named = match rank {
            Some(rank) => format!("rank {rank} on {} {reason}", worker.host_for_messages()),
            None => format!("worker {task} on {} {reason}", worker.host_for_messages()),
        };
        self.workers.remove(&task);
        self.hosts.record_host_failure(now, &host);
        self.last_loss = Some(named.clone());
        decisions.push(MembershipDecision::Lost { task, reason: reason.clone() });
        if let (Some(present), Some(_)) = (&mut self.present, rank) {
            present.record_member_failure(now, task, named, &cause);
        } else if self.present.is_none() && !began && matches!(cause, LossCause::OwnFailure(_)) {
            // A program that fails before its first `init`, for example in an import, fails on
            // every host.
            self.abort_job(named, Some(task), decisions);
        }
    }

    /// Returns the workers that have been silent for too long, and a reason with the time.
    fn silent_workers(&self, now: Duration) -> Vec<(TaskId, String)> {
        let rules = &self.rules;
        let reason = |worker: &ElasticWorker| match worker.stage {
            // The agent of a worker that has ended sends no more heartbeats.
            WorkerStage::Done => None,
            WorkerStage::Starting => (now.saturating_sub(worker.presence.seen)
                >= rules.start_timeout)
                .then(|| format!("did not register within {:.1?}", rules.start_timeout)),
            _ => worker
                .presence
                .gone_reason(now, &rules.liveness)
                .map(|reason| format!("was lost: {reason}")),
        };
        self.workers.iter().filter_map(|(task, worker)| Some((*task, reason(worker)?))).collect()
    }

    /// Gives silent workers up. In a replayed step, gives up the workers that were silent in the
    /// original step.
    pub(super) fn drop_silent_workers(
        &mut self,
        now: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        // Heartbeats are not in the journal, so a replay cannot decide itself who was silent.
        let gone = self.repeated.take().unwrap_or_else(|| self.silent_workers(now));
        for (task, reason) in &gone {
            // The process may still run, and must not come back.
            decisions.push(MembershipDecision::End { task: *task, reason: reason.clone() });
            self.remove_lost_worker(now, *task, LossCause::Lost(reason.clone()), decisions);
        }
        self.losses = gone;
    }

    /// Removes members that others have lost and that do not ask for the next world themselves.
    pub(super) fn expel_suspected_members(
        &mut self,
        now: Duration,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        if now < self.returning_until {
            // Relayed links broke with the earlier registrar, so a member that its peers have lost
            // may be alive.
            return;
        }
        let Some(present) = &self.present else { return };
        let mut expelled = BTreeSet::new();
        for member in &present.order {
            let Some(WorkerStage::Ready { after, since, suspects }) =
                self.workers.get(member).map(|worker| &worker.stage)
            else {
                continue;
            };
            if *after == self.generation && now.saturating_sub(*since) >= SUSPECT_GRACE_PERIOD {
                // A suspect that asks for the next world lives, whatever its peers say.
                let silent = |task: &&TaskId| {
                    present.task_rank(**task).is_some()
                        && self
                            .workers
                            .get(task)
                            .is_some_and(|worker| worker.stage == WorkerStage::Working)
                };
                expelled.extend(suspects.iter().filter(silent).copied());
            }
        }
        for task in expelled {
            let reason = "fell silent: its peers lost it".to_owned();
            decisions.push(MembershipDecision::End { task, reason: reason.clone() });
            self.remove_lost_worker(now, task, LossCause::Lost(reason), decisions);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Workers that end, fall silent, or are lost by their peers.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::TaskId;

use super::world::Why;
use super::{Decision, Elastic, SUSPECTED, Stage, Worker};
use crate::exit::Exit;

impl Elastic {
    /// A worker has ended by itself, or because its agent was told to end it.
    pub(super) fn exited(
        &mut self,
        now: Duration,
        task: TaskId,
        exit: &Exit,
        decisions: &mut Vec<Decision>,
    ) {
        self.unheard.remove(&task);
        let Some(worker) = self.workers.get_mut(&task) else { return };
        let member = self.present.as_ref().is_some_and(|present| present.rank(task).is_some());
        if worker.stage == Stage::Done {
            return;
        }
        if worker.stage == Stage::Leaving || worker.dismissed.is_some() || exit.stopped {
            self.leave(now, task);
        } else if !exit.how.is_success() {
            self.lose(now, task, Why::of(exit), decisions);
        } else if member && worker.stage == Stage::Working {
            worker.stage = Stage::Done;
        } else if matches!(worker.stage, Stage::Starting | Stage::Importing) {
            // A program that never asks for a world would be started again for ever.
            self.lose(now, task, Why::Own("ended before it called init()".to_owned()), decisions);
        } else {
            self.leave(now, task);
        }
    }

    /// A worker is gone without a failure.
    pub(super) fn leave(&mut self, now: Duration, task: TaskId) {
        self.workers.remove(&task);
        if let Some(present) = &mut self.present
            && let Some(rank) = present.rank(task)
        {
            present.break_up(now, format!("rank {rank} left"));
        }
    }

    /// A worker is gone, and its host is to blame, unless the worker was to go anyway.
    pub(super) fn lose(
        &mut self,
        now: Duration,
        task: TaskId,
        why: Why,
        decisions: &mut Vec<Decision>,
    ) {
        let Some(worker) = self.workers.get(&task) else { return };
        if worker.dismissed.is_some() {
            return self.leave(now, task);
        }
        let reason = why.sentence().to_owned();
        let began = worker.stage != Stage::Starting && worker.stage != Stage::Importing;
        let rank = self.present.as_ref().and_then(|present| present.rank(task));
        let host = worker.host.clone();
        let named = match rank {
            Some(rank) => format!("rank {rank} on {} {reason}", worker.named()),
            None => format!("worker {task} on {} {reason}", worker.named()),
        };
        self.workers.remove(&task);
        self.hosts.failed(now, &host);
        self.last_loss = Some(named.clone());
        decisions.push(Decision::Lost { task, reason: reason.clone() });
        if let (Some(present), Some(_)) = (&mut self.present, rank) {
            present.failed(now, task, named, &why);
        } else if self.present.is_none() && !began && matches!(why, Why::Own(_)) {
            self.abort(named, Some(task), decisions);
        }
    }

    /// Workers that have not been heard of for too long, and how long that is.
    fn silent(&self, now: Duration) -> Vec<(TaskId, String)> {
        let rules = &self.rules;
        let reason = |worker: &Worker| match worker.stage {
            Stage::Done => None,
            Stage::Starting => (now.saturating_sub(worker.presence.seen) >= rules.start_timeout)
                .then(|| format!("did not register within {:.1?}", rules.start_timeout)),
            _ => worker
                .presence
                .gone(now, &rules.liveness)
                .map(|reason| format!("was lost: {reason}")),
        };
        self.workers.iter().filter_map(|(task, worker)| Some((*task, reason(worker)?))).collect()
    }

    /// Gives up those that are silent; in a step that is repeated, those that were so in its time.
    pub(super) fn look_for_losses(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let gone = self.repeated.take().unwrap_or_else(|| self.silent(now));
        for (task, reason) in &gone {
            // Whatever it still is: it must not come back.
            decisions.push(Decision::End { task: *task, reason: reason.clone() });
            self.lose(now, *task, Why::Lost(reason.clone()), decisions);
        }
        self.losses = gone;
    }

    /// Members that others have lost, and that do not ask for the next world themselves, are out.
    pub(super) fn look_for_suspects(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        if now < self.returning_until {
            // Links by way of the registrar broke with it: a member that its peers have lost may be
            // alive.
            return;
        }
        let Some(present) = &self.present else { return };
        let mut expelled = BTreeSet::new();
        for member in &present.order {
            let Some(Stage::Ready { after, since, suspects }) =
                self.workers.get(member).map(|worker| &worker.stage)
            else {
                continue;
            };
            if *after == self.generation && now.saturating_sub(*since) >= SUSPECTED {
                let silent = |task: &&TaskId| {
                    present.rank(**task).is_some()
                        && self
                            .workers
                            .get(task)
                            .is_some_and(|worker| worker.stage == Stage::Working)
                };
                expelled.extend(suspects.iter().filter(silent).copied());
            }
        }
        for task in expelled {
            let reason = "fell silent: its peers lost it".to_owned();
            decisions.push(Decision::End { task, reason: reason.clone() });
            self.lose(now, task, Why::Lost(reason), decisions);
        }
    }
}

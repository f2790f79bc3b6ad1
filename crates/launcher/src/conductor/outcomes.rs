// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The outcomes of a job's workers, and of the job.

use farandole_registrar::{ExitKind, GenerationVerdict};
use farandole_world::{Rank, TaskId};

use super::{Conductor, JobEnd, ReportedExit, StopLevel};
use crate::agent::WorkerOutcome;
use crate::error::{Error, Result};
use crate::report::JobReport;

impl Conductor {
    /// Returns the outcome of the job: of a job of a fixed size the outcome of each task, of an
    /// elastic job the outcomes of its last world by rank, or of its failure.
    ///
    /// # Errors
    /// `Host` and `Hosts` if hosts could not be used or were lost; `Registrar`, `Spawn`, `System`
    /// if an agent had no worker.
    pub(crate) fn into_report(mut self) -> Result<JobReport> {
        let interrupted = self.stop_level > StopLevel::Continue;
        if self.rules.elastic {
            return Ok(JobReport { outcomes: self.elastic_outcomes(), interrupted });
        }
        let tasks: Vec<u32> = self.tasks.keys().copied().collect();
        let outcomes: Vec<WorkerOutcome> = tasks
            .into_iter()
            .filter_map(|task| {
                let reported_by_agent = self.task_mut(task).outcome.take();
                reported_by_agent.or_else(|| self.reported_outcome(task))
            })
            .collect();
        let mut errors = self.errors;
        if errors.is_empty() && outcomes.iter().all(WorkerOutcome::is_success) {
            // If hosts fall silent together, no agent is left to report why the job ended.
            errors = self.silent_host_errors;
        }
        match Error::combine_host_errors(errors) {
            Some(error) if !interrupted => Err(error),
            _ => Ok(JobReport { outcomes, interrupted }),
        }
    }

    /// Returns the outcome of an ended worker, like the one that its agent sends.
    pub(super) fn reported_outcome(&mut self, task: u32) -> Option<WorkerOutcome> {
        let size = self.world.as_ref().map(farandole_world::World::size);
        let interrupted = self.stop_level > StopLevel::Continue;
        let state = self.tasks.get_mut(&task)?;
        let ReportedExit { rank, exit, .. } = state.exit.as_ref()?;
        let outcome = WorkerOutcome {
            rank: Some(*rank),
            size,
            exit_kind: Some(exit.kind.clone()),
            stderr_tail: exit.stderr_tail.clone(),
            result: state.result.take(),
            aborted: false,
            reason: None,
            retry: false,
        };
        let has_failed = !exit.kind.is_success();
        Some(match &self.end {
            Some(JobEnd::Failed(verdict, _)) if has_failed || exit.stopped => {
                let aborted = exit.stopped || verdict.cause != Some(TaskId(task));
                let reason = Some(verdict.reason.clone());
                WorkerOutcome { aborted, reason, retry: aborted && verdict.retry, ..outcome }
            }
            _ if has_failed => {
                let reason = Some(format!("rank {rank} {}", exit.kind));
                WorkerOutcome { aborted: exit.stopped || interrupted, reason, ..outcome }
            }
            _ => outcome,
        })
    }

    /// Returns the known outcomes by task.
    fn take_outcomes(&mut self) -> Vec<WorkerOutcome> {
        self.tasks.values_mut().filter_map(|task| task.outcome.take()).collect()
    }

    fn elastic_outcomes(&mut self) -> Vec<WorkerOutcome> {
        match self.end.take() {
            Some(JobEnd::Finished) => self.member_outcomes(),
            Some(JobEnd::Failed(verdict, rank)) => self.failure_outcomes(&verdict, rank),
            None => {
                let reason = "interrupted".to_owned();
                let verdict = GenerationVerdict { reason, cause: None, retry: false };
                self.failure_outcomes(&verdict, None)
            }
        }
    }

    /// Returns the end of every member of the last world, by rank.
    fn member_outcomes(&mut self) -> Vec<WorkerOutcome> {
        let Some(world) = self.world.take() else { return Vec::new() };
        let size = Some(world.size());
        (0u32..)
            .zip(&world.seats)
            .map(|(rank, seat)| {
                let state = self.task_mut(seat.task.0);
                let outcome = state.outcome.take().unwrap_or_else(|| WorkerOutcome {
                    // The connection to the worker's agent broke after the worker had succeeded.
                    exit_kind: Some(ExitKind::Code(0)),
                    ..WorkerOutcome::outcome_without_worker(String::new())
                });
                let result = outcome.result.or_else(|| state.result.take());
                let (rank, aborted) = (Some(Rank(rank)), false);
                WorkerOutcome { rank, size, result, aborted, reason: None, ..outcome }
            })
            .collect()
    }

    fn failure_outcomes(
        &mut self,
        verdict: &GenerationVerdict,
        rank: Option<Rank>,
    ) -> Vec<WorkerOutcome> {
        let reason = Some(verdict.reason.clone());
        let cause = verdict.cause.map(|task| task.0).or(self.failed_before_world);
        let known = |task: u32| {
            let reported = self.task_mut(task).outcome.take();
            // The end of a worker that was stopped is not the cause.
            reported.or_else(|| self.reported_outcome(task).filter(|outcome| !outcome.aborted))
        };
        // A worker may succeed after its connection broke, and the job has failed nevertheless.
        let first = match cause.and_then(known) {
            Some(outcome) if !outcome.exit_kind.as_ref().is_some_and(ExitKind::is_success) => {
                WorkerOutcome { rank, reason: reason.clone(), aborted: false, ..outcome }
            }
            _ => WorkerOutcome::outcome_without_worker(verdict.reason.clone()),
        };
        let others = self.take_outcomes().into_iter();
        let others = others.map(|outcome| WorkerOutcome {
            aborted: true,
            reason: reason.clone(),
            ..outcome
        });
        [first].into_iter().chain(others).collect()
    }
}

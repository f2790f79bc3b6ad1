// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The outcomes of an elastic job's workers, and of the job.

use std::collections::{BTreeMap, BTreeSet};

use farandole_registrar::{ExitKind, ExitReport, GenerationVerdict};
use farandole_world::{Rank, World};

use crate::agent::WorkerOutcome;
use crate::report::JobReport;

/// The end of the job.
#[derive(Debug)]
enum ElasticJobEnd {
    Finished,
    Failed(GenerationVerdict, Option<Rank>),
}

/// All reported ends of workers, and the end of the job.
#[derive(Debug, Default)]
pub(super) struct ElasticJobOutcomes {
    world: Option<World>,
    outcomes: BTreeMap<u32, WorkerOutcome>,
    results: BTreeMap<u32, Vec<u8>>,
    ended: BTreeSet<u32>,
    /// The worker that failed by itself before a world was formed.
    failed_before_world: Option<u32>,
    end: Option<ElasticJobEnd>,
}

impl ElasticJobOutcomes {
    pub(super) fn set_world(&mut self, world: World) {
        self.world = Some(world);
    }

    /// Records a worker's end as the registrar reported it.
    pub(super) fn record_exit(&mut self, task: u32, exit: &ExitReport) {
        self.ended.insert(task);
        // A signal or a peer's error is a consequence; the user wants the first cause.
        let own = matches!(exit.kind, ExitKind::Code(code) if code != 0)
            && !exit.peer_error
            && !exit.stopped;
        if own && self.world.is_none() {
            self.failed_before_world.get_or_insert(task);
        }
    }

    /// Records a result that came through the registrar.
    pub(super) fn record_result(&mut self, task: u32, data: Vec<u8>) {
        self.results.insert(task, data);
    }

    /// Records a worker's end as its agent reported it.
    pub(super) fn record_outcome(&mut self, task: u32, outcome: WorkerOutcome) {
        self.ended.insert(task);
        self.outcomes.insert(task, outcome);
    }

    pub(super) fn has_ended(&self, task: u32) -> bool {
        self.ended.contains(&task)
    }

    pub(super) fn mark_finished(&mut self) {
        self.end.get_or_insert(ElasticJobEnd::Finished);
    }

    /// Records a failure of the whole job; the first one counts.
    pub(super) fn mark_aborted(&mut self, verdict: GenerationVerdict, rank: Option<Rank>) {
        self.end.get_or_insert(ElasticJobEnd::Failed(verdict, rank));
    }

    /// Returns the result of the job: the ends of the last world's members by rank, or a failure.
    pub(super) fn into_report(mut self, interrupted: bool) -> JobReport {
        let outcomes = match self.end.take() {
            Some(ElasticJobEnd::Finished) => self.member_outcomes(|outcome| WorkerOutcome {
                aborted: false,
                reason: None,
                ..outcome
            }),
            Some(ElasticJobEnd::Failed(verdict, rank)) => self.failure_outcomes(&verdict, rank),
            None => self.failure_outcomes(
                &GenerationVerdict { reason: "interrupted".to_owned(), cause: None, retry: false },
                None,
            ),
        };
        JobReport { outcomes, interrupted }
    }

    /// Returns the known end of every member of the last world, by rank.
    fn member_outcomes(
        &mut self,
        change: impl Fn(WorkerOutcome) -> WorkerOutcome,
    ) -> Vec<WorkerOutcome> {
        let Some(world) = self.world.take() else { return Vec::new() };
        let size = world.size();
        (0u32..)
            .zip(&world.seats)
            .map(|(rank, seat)| {
                let task = seat.task.0;
                let mut outcome = self.outcomes.remove(&task).unwrap_or_else(|| WorkerOutcome {
                    // The connection to the worker's agent broke after the worker had succeeded.
                    exit_kind: Some(ExitKind::Code(0)),
                    ..WorkerOutcome::without_worker(String::new())
                });
                if outcome.result.is_none() {
                    outcome.result = self.results.remove(&task);
                }
                change(WorkerOutcome { rank: Some(Rank(rank)), size: Some(size), ..outcome })
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
        let first = cause.and_then(|task| self.outcomes.remove(&task));
        let first = match first {
            Some(outcome) => {
                WorkerOutcome { rank, reason: reason.clone(), aborted: false, ..outcome }
            }
            None => WorkerOutcome::without_worker(verdict.reason.clone()),
        };
        let others = std::mem::take(&mut self.outcomes).into_values();
        let others = others.map(|outcome| WorkerOutcome {
            aborted: true,
            reason: reason.clone(),
            ..outcome
        });
        [first].into_iter().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, TaskId, TaskPlacement, assign_ranks_as_listed};

    use super::*;

    fn outcome(code: i32) -> WorkerOutcome {
        WorkerOutcome {
            exit_kind: Some(ExitKind::Code(code)),
            aborted: false,
            reason: None,
            ..WorkerOutcome::without_worker(String::new())
        }
    }

    fn exit(kind: ExitKind) -> ExitReport {
        ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() }
    }

    /// Returns the outcomes of a world with these tasks, by rank.
    fn tally(tasks: &[u32]) -> ElasticJobOutcomes {
        let place =
            |task: &u32| TaskPlacement { task: TaskId(*task), host: HostHash("a".to_owned()) };
        let places: Vec<TaskPlacement> = tasks.iter().map(place).collect();
        let mut tally = ElasticJobOutcomes::default();
        tally.set_world(assign_ranks_as_listed(Generation(1), &places).unwrap());
        tally
    }

    fn verdict(cause: Option<u32>) -> GenerationVerdict {
        GenerationVerdict { reason: "why".to_owned(), cause: cause.map(TaskId), retry: false }
    }

    #[test]
    fn a_job_that_finished_has_the_ends_of_its_last_world_by_rank() {
        let mut tally = tally(&[7, 2]);
        tally.record_outcome(5, outcome(1));
        // The agent of rank 0 was ended with the job, after its worker had succeeded.
        tally.record_outcome(7, WorkerOutcome { aborted: true, ..outcome(0) });
        // The connection to rank 1 broke: its result came through the registrar.
        tally.record_result(2, vec![9]);
        tally.mark_finished();
        let report = tally.into_report(false);
        assert_eq!((report.exit_code(), report.failure_reason()), (0, None));
        let found: Vec<_> = report
            .outcomes
            .iter()
            .map(|one| (one.rank.unwrap().0, one.size, one.result.clone()))
            .collect();
        assert_eq!(found, [(0, Some(2), None), (1, Some(2), Some(vec![9]))]);
    }

    #[test]
    fn a_failed_job_has_the_exit_code_of_its_cause_and_the_verdicts_words() {
        let mut tally = tally(&[7, 2]);
        tally.record_outcome(7, outcome(0));
        tally.record_outcome(2, outcome(3));
        tally.mark_aborted(verdict(Some(2)), Some(Rank(1)));
        tally.mark_aborted(verdict(None), None);
        let report = tally.into_report(false);
        assert_eq!((report.exit_code(), report.failure_reason()), (3, Some("why")));
        assert_eq!(report.first_failure().unwrap().rank, Some(Rank(1)));
    }

    #[test]
    fn a_worker_that_failed_before_there_was_a_world_is_the_cause() {
        let mut tally = ElasticJobOutcomes::default();
        tally.record_exit(0, &exit(ExitKind::Signal(9)));
        tally.record_exit(1, &exit(ExitKind::Code(4)));
        tally.record_outcome(1, outcome(4));
        tally.mark_aborted(verdict(None), None);
        assert_eq!(tally.into_report(false).exit_code(), 4);
    }

    #[test]
    fn a_job_without_a_failed_worker_is_still_a_failure() {
        let mut late = ElasticJobOutcomes::default();
        late.mark_aborted(verdict(None), None);
        let report = late.into_report(false);
        assert_eq!((report.exit_code(), report.failure_reason()), (1, Some("why")));
        let report = ElasticJobOutcomes::default().into_report(true);
        assert_eq!((report.exit_code(), report.failure_reason()), (1, Some("interrupted")));
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The outcomes of an elastic job's workers, and of the job.

use std::collections::{BTreeMap, BTreeSet};

use farandole_registrar::{Exit, How, Verdict};
use farandole_world::{Rank, World};

use crate::agent::Outcome;
use crate::report::Report;

/// The outcome of the job.
#[derive(Debug)]
enum End {
    Finished,
    Failed(Verdict, Option<Rank>),
}

/// Everything that was heard of ends.
#[derive(Debug, Default)]
pub(super) struct Tally {
    world: Option<World>,
    outcomes: BTreeMap<u32, Outcome>,
    results: BTreeMap<u32, Vec<u8>>,
    ended: BTreeSet<u32>,
    /// The worker that failed by itself before there was a world.
    broken: Option<u32>,
    end: Option<End>,
}

impl Tally {
    pub(super) fn assigned(&mut self, world: World) {
        self.world = Some(world);
    }

    /// Takes in a worker's end as the registrar heard of it.
    pub(super) fn exited(&mut self, task: u32, exit: &Exit) {
        self.ended.insert(task);
        let own =
            matches!(exit.how, How::Code(code) if code != 0) && !exit.peer_error && !exit.stopped;
        if own && self.world.is_none() {
            self.broken.get_or_insert(task);
        }
    }

    /// Takes in a result that came by the registrar.
    pub(super) fn returned(&mut self, task: u32, data: Vec<u8>) {
        self.results.insert(task, data);
    }

    /// Takes in a worker's end as its agent told it.
    pub(super) fn ended(&mut self, task: u32, outcome: Outcome) {
        self.ended.insert(task);
        self.outcomes.insert(task, outcome);
    }

    pub(super) fn has_ended(&self, task: u32) -> bool {
        self.ended.contains(&task)
    }

    pub(super) fn finished(&mut self) {
        self.end.get_or_insert(End::Finished);
    }

    /// Takes in a failure of the whole job; the first one counts.
    pub(super) fn aborted(&mut self, verdict: Verdict, rank: Option<Rank>) {
        self.end.get_or_insert(End::Failed(verdict, rank));
    }

    /// Returns the result of the job: the ends of the last world's members by rank, or a failure.
    pub(super) fn report(mut self, interrupted: bool) -> Report {
        let outcomes = match self.end.take() {
            Some(End::Finished) => {
                self.members(|outcome| Outcome { aborted: false, reason: None, ..outcome })
            }
            Some(End::Failed(verdict, rank)) => self.failure(&verdict, rank),
            None => self.failure(
                &Verdict { reason: "interrupted".to_owned(), cause: None, retry: false },
                None,
            ),
        };
        Report { outcomes, interrupted }
    }

    /// Returns the known end of every member of the last world, by rank.
    fn members(&mut self, change: impl Fn(Outcome) -> Outcome) -> Vec<Outcome> {
        let Some(world) = self.world.take() else { return Vec::new() };
        let size = world.size();
        (0u32..)
            .zip(&world.seats)
            .map(|(rank, seat)| {
                let task = seat.task.0;
                let mut outcome = self.outcomes.remove(&task).unwrap_or_else(|| Outcome {
                    // Its connection broke once it had ended well.
                    how: Some(How::Code(0)),
                    ..Outcome::without_worker(String::new())
                });
                if outcome.result.is_none() {
                    outcome.result = self.results.remove(&task);
                }
                change(Outcome { rank: Some(Rank(rank)), size: Some(size), ..outcome })
            })
            .collect()
    }

    fn failure(&mut self, verdict: &Verdict, rank: Option<Rank>) -> Vec<Outcome> {
        let reason = Some(verdict.reason.clone());
        let cause = verdict.cause.map(|task| task.0).or(self.broken);
        let first = cause.and_then(|task| self.outcomes.remove(&task));
        let first = match first {
            Some(outcome) => Outcome { rank, reason: reason.clone(), aborted: false, ..outcome },
            None => Outcome::without_worker(verdict.reason.clone()),
        };
        let others = std::mem::take(&mut self.outcomes).into_values();
        let others =
            others.map(|outcome| Outcome { aborted: true, reason: reason.clone(), ..outcome });
        [first].into_iter().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, TaskId, TaskPlace, assign_as_listed};

    use super::*;

    fn outcome(code: i32) -> Outcome {
        Outcome {
            how: Some(How::Code(code)),
            aborted: false,
            reason: None,
            ..Outcome::without_worker(String::new())
        }
    }

    fn exit(how: How) -> Exit {
        Exit { how, peer_error: false, stopped: false, stderr_tail: Vec::new() }
    }

    /// Returns a tally of a world of these tasks, by rank.
    fn tally(tasks: &[u32]) -> Tally {
        let place = |task: &u32| TaskPlace { task: TaskId(*task), host: HostHash("a".to_owned()) };
        let places: Vec<TaskPlace> = tasks.iter().map(place).collect();
        let mut tally = Tally::default();
        tally.assigned(assign_as_listed(Generation(1), &places).unwrap());
        tally
    }

    fn verdict(cause: Option<u32>) -> Verdict {
        Verdict { reason: "why".to_owned(), cause: cause.map(TaskId), retry: false }
    }

    #[test]
    fn a_job_that_finished_has_the_ends_of_its_last_world_by_rank() {
        let mut tally = tally(&[7, 2]);
        tally.ended(5, outcome(1));
        // The agent of rank 0 was ended with the job, once its worker had ended well.
        tally.ended(7, Outcome { aborted: true, ..outcome(0) });
        // The connection to rank 1 broke: its result came by the registrar.
        tally.returned(2, vec![9]);
        tally.finished();
        let report = tally.report(false);
        assert_eq!((report.exit_code(), report.reason()), (0, None));
        let told: Vec<_> = report
            .outcomes
            .iter()
            .map(|one| (one.rank.unwrap().0, one.size, one.result.clone()))
            .collect();
        assert_eq!(told, [(0, Some(2), None), (1, Some(2), Some(vec![9]))]);
    }

    #[test]
    fn a_failed_job_has_the_exit_code_of_its_cause_and_the_verdicts_words() {
        let mut tally = tally(&[7, 2]);
        tally.ended(7, outcome(0));
        tally.ended(2, outcome(3));
        tally.aborted(verdict(Some(2)), Some(Rank(1)));
        tally.aborted(verdict(None), None);
        let report = tally.report(false);
        assert_eq!((report.exit_code(), report.reason()), (3, Some("why")));
        assert_eq!(report.first_failure().unwrap().rank, Some(Rank(1)));
    }

    #[test]
    fn a_worker_that_failed_before_there_was_a_world_is_the_cause() {
        let mut tally = Tally::default();
        tally.exited(0, &exit(How::Signal(9)));
        tally.exited(1, &exit(How::Code(4)));
        tally.ended(1, outcome(4));
        tally.aborted(verdict(None), None);
        assert_eq!(tally.report(false).exit_code(), 4);
    }

    #[test]
    fn a_job_without_a_failed_worker_is_still_a_failure() {
        let mut late = Tally::default();
        late.aborted(verdict(None), None);
        let report = late.report(false);
        assert_eq!((report.exit_code(), report.reason()), (1, Some("why")));
        let report = Tally::default().report(true);
        assert_eq!((report.exit_code(), report.reason()), (1, Some("interrupted")));
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What is known of the ends of an elastic job's workers, and what the job comes to.

use std::collections::{BTreeMap, BTreeSet};

use farandole_registrar::{Exit, How, Verdict};
use farandole_world::{Rank, World};

use crate::agent::Outcome;
use crate::report::Report;

/// How the job ended.
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
        let own = matches!(exit.how, How::Code(code) if code != 0) && !exit.peer_error && !exit.stopped;
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

    /// What the job comes to: the ends of the last world's members by rank, or a failure.
    pub(super) fn report(mut self, interrupted: bool) -> Report {
        let outcomes = match self.end.take() {
            Some(End::Finished) => {
                self.members(|outcome| Outcome { aborted: false, reason: None, ..outcome })
            }
            Some(End::Failed(verdict, rank)) => self.failure(&verdict, rank),
            None => {
                self.failure(&Verdict { reason: "interrupted".to_owned(), cause: None, retry: false }, None)
            }
        };
        Report { outcomes, interrupted }
    }

    /// What is known of every member of the last world, by rank.
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
        let others = others.map(|outcome| Outcome { aborted: true, reason: reason.clone(), ..outcome });
        [first].into_iter().chain(others).collect()
    }
}

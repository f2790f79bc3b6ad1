// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Registrars that die in simulated jobs, and start again from their journals.

use std::time::Duration;

use farandole_world::TaskId;

use super::{Happens, Run};
use crate::membership::elastic::{Elastic, Stage, Step, What};
use crate::membership::{Decision, Input, Presence, Refusal};

/// A journal: a state, and the steps after it.
pub(super) struct Kept {
    state: Elastic,
    steps: Vec<Step>,
}

/// Returns the machine without the times of the last signs of life, which no journal has.
fn calm(machine: &Elastic) -> Elastic {
    let mut calm = machine.clone();
    for worker in calm.workers.values_mut() {
        worker.presence = Presence::at(Duration::ZERO);
    }
    calm
}

impl Kept {
    pub(super) fn new(state: Elastic) -> Self {
        Self { state, steps: Vec::new() }
    }
}

impl Run {
    /// Does a step; there is none without a registrar.
    pub(super) fn take(&mut self, what: What) -> Option<Result<Vec<Decision>, Refusal>> {
        let now = self.time();
        match &mut self.journal {
            _ if self.away.is_some() => None,
            None => Some(self.machine.take(now, what)),
            Some(journal) => {
                let (step, outcome) = self.machine.noted(now, what);
                journal.steps.extend(step);
                Some(outcome)
            }
        }
    }

    pub(super) fn dies(&mut self) {
        self.dying = false;
        if self.away.is_none() {
            self.away = Some(self.now);
            self.soon(100, 10_000, Happens::Rises);
        }
    }

    pub(super) fn rises(&mut self) {
        let (Some(since), Some(mut journal)) = (self.away.take(), self.journal.take()) else {
            return;
        };
        self.outages += self.now - since;
        self.restarts += 1;
        let mut again = journal.state.clone();
        for step in journal.steps.drain(..) {
            let text = serde_json::to_string(&step).unwrap();
            again.repeat(serde_json::from_str(&text).unwrap());
        }
        if calm(&again) != calm(&self.machine) {
            self.fail(&format!("ES-7: the journal makes another machine: {again:#?}"));
        }
        self.machine = serde_json::from_str(&serde_json::to_string(&again).unwrap()).unwrap();
        journal.state = self.machine.clone();
        self.journal = Some(journal);
        if let Some(Ok(decisions)) = self.take(What::Resumes) {
            self.apply(decisions);
        }
        self.observe(Input::Hosts(self.hosts.clone().into_iter().collect()));
        // Workers that were given up get a dismissal.
        let given_up: Vec<u32> = self.machine.gone().map(|task| task.0).collect();
        for task in given_up {
            if self.processes.get(&task).is_some_and(|process| !process.returned) {
                self.gone(task);
            }
        }
    }

    /// The answer to a worker that asks for the world that it was given while the registrar died.
    pub(super) fn hears_again(&mut self, task: u32, after: u64) {
        let works = self
            .machine
            .workers
            .get(&TaskId(task))
            .is_some_and(|worker| worker.stage == Stage::Working);
        if let Some(world) =
            self.machine.world().filter(|world| works && world.generation.0 > after)
        {
            let ranks = world.seats.iter().map(|seat| seat.task.0).collect();
            self.soon(1, 100, Happens::Hears { task, generation: world.generation.0, ranks });
        }
    }
}

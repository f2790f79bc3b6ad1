// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Registrars that die in simulated jobs, and restart from their journals.

use std::time::Duration;

use farandole_world::TaskId;

use super::{ElasticSimulation, SimulatedElasticEvent};
use crate::elastic::{ElasticMembership, ElasticStepInput, JournalStep, WorkerStage};
use crate::inputs_and_decisions::{
    AgentPresence, MembershipDecision, MembershipInput, RegistrationRefusal,
};

/// A state, and the steps after it.
pub(super) struct SimulatedJournal {
    state: ElasticMembership,
    steps: Vec<JournalStep>,
}

/// Returns the machine without the times of the last heartbeats, which are in no journal.
fn without_presence(machine: &ElasticMembership) -> ElasticMembership {
    let mut calm = machine.clone();
    for worker in calm.workers.values_mut() {
        worker.presence = AgentPresence::seen_at(Duration::ZERO);
    }
    calm
}

impl SimulatedJournal {
    pub(super) fn new(state: ElasticMembership) -> Self {
        Self { state, steps: Vec::new() }
    }
}

impl ElasticSimulation {
    /// Takes a step; `None` while there is no registrar.
    pub(super) fn take_step(
        &mut self,
        what: ElasticStepInput,
    ) -> Option<Result<Vec<MembershipDecision>, RegistrationRefusal>> {
        let now = self.job_time();
        match &mut self.journal {
            _ if self.away.is_some() => None,
            None => Some(self.machine.take_step(now, what)),
            Some(journal) => {
                let (step, outcome) = self.machine.take_journaled_step(now, what);
                journal.steps.extend(step);
                Some(outcome)
            }
        }
    }

    pub(super) fn kill_registrar(&mut self) {
        self.dying = false;
        if self.away.is_none() {
            self.away = Some(self.now);
            self.schedule_between(100, 10_000, SimulatedElasticEvent::Rises);
        }
    }

    pub(super) fn restart_registrar(&mut self) {
        let (Some(since), Some(mut journal)) = (self.away.take(), self.journal.take()) else {
            return;
        };
        self.outages += self.now - since;
        self.restarts += 1;
        let mut again = journal.state.clone();
        for step in journal.steps.drain(..) {
            let text = serde_json::to_string(&step).unwrap();
            again.replay_step(serde_json::from_str(&text).unwrap());
        }
        if without_presence(&again) != without_presence(&self.machine) {
            self.fail_simulation(&format!("ES-7: the journal makes another machine: {again:#?}"));
        }
        self.machine = serde_json::from_str(&serde_json::to_string(&again).unwrap()).unwrap();
        journal.state = self.machine.clone();
        self.journal = Some(journal);
        if let Some(Ok(decisions)) = self.take_step(ElasticStepInput::Restart) {
            self.apply_decisions(decisions);
        }
        self.apply_membership_input(MembershipInput::Hosts(
            self.hosts.clone().into_iter().collect(),
        ));
        // Workers that were given up are dismissed.
        let given_up: Vec<u32> = self.machine.gone_workers().map(|task| task.0).collect();
        for task in given_up {
            if self.processes.get(&task).is_some_and(|process| !process.returned) {
                self.kill_process(task);
            }
        }
    }

    /// Sends a worker again the world that it was given while the registrar died.
    pub(super) fn resend_world(&mut self, task: u32, after: u64) {
        let works = self
            .machine
            .workers
            .get(&TaskId(task))
            .is_some_and(|worker| worker.stage == WorkerStage::Working);
        if let Some(world) =
            self.machine.current_world().filter(|world| works && world.generation.0 > after)
        {
            let ranks = world.seats.iter().map(|seat| seat.task.0).collect();
            self.schedule_between(
                1,
                100,
                SimulatedElasticEvent::Hears { task, generation: world.generation.0, ranks },
            );
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Simulation of whole elastic jobs: hosts come and go; workers are killed, stopped, and fail;
//! their messages are late, repeated or lost. One seed gives one history. A failure names its seed,
//! and `FARANDOLE_SIMULATION_FIRST` with `FARANDOLE_SIMULATION_SEEDS=1` repeats it.
//!
//! - `ES-1`: a world has as many workers as the rules allow, each running and waiting for it.
//! - `ES-2`: no running worker of an earlier world still works in it when the next one is formed.
//! - `ES-3`: rank 0 was in the previous world, if any member of that world is in this one; members
//!   keep their ranks.
//! - `ES-4`: if a job finishes, its last world returned on every rank.
//! - `ES-5`: a host has no more workers than slots, and the job has no more workers than allowed.
//! - `ES-6`: once faults end, the job ends.
//! - `ES-7`: replaying the steps of a journal gives the machine that the registrar had when it
//!   died. Answers that it had not sent are sent after the restart; the other six invariants check
//!   this.

mod restarts;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::restarts::SimulatedJournal;
use super::*;
use crate::exit::{ExitKind, ExitReport};

/// Times in milliseconds at which faults end, and at which the job must be over.
const FAULTS_END_MS: u64 = 120_000;
const SIMULATION_END_MS: u64 = 600_000;
const HEARTBEAT_INTERVAL_MS: u64 = 1_000;
const TICK_INTERVAL_MS: u64 = 50;
const FINISHED_OUTCOME: &str = "finished";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedElasticEvent {
    Tick,
    /// Its agent registers.
    Registers(u32),
    /// It calls `init`, for the first time or again.
    Asks(u32),
    /// It repeats its request because it got no answer.
    AsksAgain(u32),
    /// It receives its world.
    Hears {
        task: u32,
        generation: u64,
        ranks: Vec<u32>,
    },
    /// It checks its peers, sends a heartbeat, and works.
    Works(u32),
    /// The registrar receives the report of its end.
    Reports {
        task: u32,
        code: Option<i32>,
    },
    Killed(u32),
    Stopped {
        task: u32,
        until: u64,
    },
    Hosts(Vec<(String, u32)>),
    /// The registrar is killed, at once or during the next step that decides something.
    Dies {
        within: bool,
    },
    /// The registrar restarts.
    Rises,
}

#[derive(Clone, Debug, Default)]
struct SimulatedProcess {
    host: String,
    /// The world it is in, by rank.
    world: Vec<u32>,
    generation: u64,
    asking: bool,
    /// Whether it knows that it must ask for another world.
    turning: bool,
    began: u64,
    asked_at: u64,
    stopped_until: u64,
    dead: bool,
    dismissed: bool,
    returned: bool,
}

struct ElasticSimulation {
    seed: u64,
    now: u64,
    chance: StdRng,
    machine: ElasticMembership,
    rules: ElasticRules,
    queue: BinaryHeap<Reverse<(u64, u64, SimulatedElasticEvent)>>,
    order: u64,
    processes: BTreeMap<u32, SimulatedProcess>,
    hosts: BTreeMap<String, u32>,
    /// Milliseconds of undisturbed work in one world after which the function returns.
    work: u64,
    last: Vec<u32>,
    over: Option<String>,
    /// The journal from which a dead registrar is restored; present in half of the jobs.
    journal: Option<SimulatedJournal>,
    dying: bool,
    /// The time since which there is no registrar.
    away: Option<u64>,
    /// Total time without a registrar.
    outages: u64,
    restarts: u64,
}

impl ElasticSimulation {
    fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let min_workers = chance.random_range(1..=3);
        let first = chance.random_range(min_workers..=4);
        let max_workers = chance.random_range(first..=6);
        let rules = ElasticRules {
            first,
            min_workers,
            max_workers,
            spares: chance.random_range(0..=2),
            timeout: Duration::from_secs(60),
            reset_limit: None,
            cooldown: (Duration::from_secs(1), Duration::from_secs(10)),
            start_timeout: Duration::from_secs(20),
            liveness: LivenessLimits {
                heartbeat_timeout: Duration::from_secs(5),
                disconnect_grace: Duration::from_secs(1),
            },
        };
        let mut run = Self {
            seed,
            now: 0,
            machine: ElasticMembership::new(rules.clone()),
            rules,
            queue: BinaryHeap::new(),
            order: 0,
            processes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            work: chance.random_range(5_000..40_000),
            last: Vec::new(),
            over: None,
            journal: None,
            dying: false,
            away: None,
            outages: 0,
            restarts: 0,
            chance,
        };
        if run.chance.random_bool(0.5) {
            run.journal = Some(SimulatedJournal::new(run.machine.clone()));
            let mut at = 0;
            while at < FAULTS_END_MS {
                at += run.chance.random_range(1_000..60_000);
                let within = run.chance.random_bool(0.7);
                run.schedule_at(at, SimulatedElasticEvent::Dies { within });
            }
        }
        run.schedule_at(0, SimulatedElasticEvent::Tick);
        let mut at = 0;
        while at < FAULTS_END_MS {
            let hosts = run.random_hosts(at == 0);
            run.schedule_at(at, SimulatedElasticEvent::Hosts(hosts));
            at += run.chance.random_range(2_000..60_000);
        }
        let hosts = run.random_hosts(true);
        run.schedule_at(FAULTS_END_MS, SimulatedElasticEvent::Hosts(hosts));
        run
    }

    /// Returns random hosts; with `enough`, they have slots for the smallest world.
    fn random_hosts(&mut self, enough: bool) -> Vec<(String, u32)> {
        let mut hosts: Vec<(String, u32)> = Vec::new();
        for name in ["a", "b", "c"] {
            if self.chance.random_bool(0.7) {
                hosts.push((name.to_owned(), self.chance.random_range(1..=3)));
            }
        }
        if enough && hosts.iter().map(|(_, slots)| slots).sum::<u32>() < self.rules.first {
            hosts.push(("d".to_owned(), self.rules.first));
        }
        hosts
    }

    fn schedule_at(&mut self, at: u64, what: SimulatedElasticEvent) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, what)));
    }

    fn schedule_between(&mut self, earliest: u64, latest: u64, what: SimulatedElasticEvent) {
        let at = self.now + self.chance.random_range(earliest..=latest);
        self.schedule_at(at, what);
    }

    fn job_time(&self) -> Duration {
        Duration::from_millis(self.now - self.outages)
    }

    fn fail_simulation(&self, what: &str) -> ! {
        let living: Vec<_> = self.processes.iter().filter(|(_, process)| !process.dead).collect();
        panic!("seed {}, {} ms: {what}\n{living:?}\n{:#?}", self.seed, self.now, self.machine)
    }

    /// Returns whether the job finished, how many worlds it had, and how often the registrar died.
    fn run(mut self) -> (bool, u64, u64) {
        while let Some(Reverse((at, _, what))) = self.queue.pop() {
            if let Some(over) = &self.over {
                return (over == FINISHED_OUTCOME, self.machine.generation().0, self.restarts);
            }
            self.now = at;
            if at > SIMULATION_END_MS {
                self.fail_simulation("ES-6: the job does not come to its end");
            }
            self.handle_event(what);
        }
        self.fail_simulation("nothing happens any more")
    }

    fn apply_membership_input(&mut self, input: MembershipInput) {
        if let Some(Ok(decisions)) = self.take_step(ElasticStepInput::Input(input)) {
            self.apply_decisions(decisions);
        }
    }

    fn handle_event(&mut self, what: SimulatedElasticEvent) {
        match what {
            SimulatedElasticEvent::Tick => {
                self.apply_membership_input(MembershipInput::Tick);
                self.schedule_at(self.now + TICK_INTERVAL_MS, SimulatedElasticEvent::Tick);
            }
            SimulatedElasticEvent::Hosts(hosts) => {
                self.hosts = hosts.iter().cloned().collect();
                self.apply_membership_input(MembershipInput::Hosts(hosts));
            }
            SimulatedElasticEvent::Registers(task) => {
                let Some(process) = self.processes.get(&task).filter(|process| !process.dead)
                else {
                    return;
                };
                let host = HostHash(process.host.clone());
                let what = ElasticStepInput::AgentRegistration {
                    task: TaskId(task),
                    session: u64::from(task),
                    host_hash: host,
                };
                match self.take_step(what) {
                    None => self.schedule_between(100, 400, SimulatedElasticEvent::Registers(task)),
                    Some(Ok(decisions)) => {
                        self.apply_decisions(decisions);
                        self.schedule_between(50, 5_000, SimulatedElasticEvent::Asks(task));
                        self.schedule_at(self.now, SimulatedElasticEvent::Works(task));
                    }
                    Some(Err(_)) => self.kill_process(task),
                }
            }
            SimulatedElasticEvent::Asks(task) => self.ask_for_world(task),
            SimulatedElasticEvent::AsksAgain(task) => {
                if self.processes.get(&task).is_some_and(|process| process.asking) {
                    self.ask_for_world(task);
                }
            }
            SimulatedElasticEvent::Hears { task, generation, ranks } => {
                let Some(process) = self.processes.get_mut(&task).filter(|process| !process.dead)
                else {
                    return;
                };
                if generation > process.generation {
                    (process.generation, process.world) = (generation, ranks);
                    (process.began, process.asking) = (self.now, false);
                }
            }
            SimulatedElasticEvent::Works(task) => self.step_worker(task),
            SimulatedElasticEvent::Reports { task, code } if self.away.is_some() => {
                self.schedule_between(100, 400, SimulatedElasticEvent::Reports { task, code });
            }
            SimulatedElasticEvent::Dies { within: true } => self.dying = true,
            SimulatedElasticEvent::Dies { within: false } => self.kill_registrar(),
            SimulatedElasticEvent::Rises => self.restart_registrar(),
            SimulatedElasticEvent::Reports { task, code } => {
                let kind = code.map_or(ExitKind::Signal(9), ExitKind::Code);
                let exit =
                    ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() };
                self.apply_membership_input(MembershipInput::Exited {
                    task: TaskId(task),
                    generation: Generation(0),
                    exit,
                });
            }
            SimulatedElasticEvent::Killed(task) => {
                if self
                    .processes
                    .get(&task)
                    .is_some_and(|process| !process.dead && !process.returned)
                {
                    self.kill_process(task);
                    self.schedule_between(
                        1,
                        100,
                        SimulatedElasticEvent::Reports { task, code: None },
                    );
                }
            }
            SimulatedElasticEvent::Stopped { task, until } => {
                if let Some(process) = self.processes.get_mut(&task) {
                    process.stopped_until = until;
                }
            }
        }
    }

    fn kill_process(&mut self, task: u32) {
        if let Some(process) = self.processes.get_mut(&task) {
            process.dead = true;
        }
    }

    fn ask_for_world(&mut self, task: u32) {
        let Some(process) = self.processes.get_mut(&task) else { return };
        if process.dead || process.returned {
            return;
        }
        if process.stopped_until > self.now {
            let at = process.stopped_until;
            return self.schedule_at(at, SimulatedElasticEvent::Asks(task));
        }
        (process.asking, process.turning) = (true, false);
        process.asked_at = self.now;
        let (generation, world) = (process.generation, process.world.clone());
        let suspects = world
            .iter()
            .filter(|peer| **peer != task && self.is_silent(**peer))
            .map(|peer| TaskId(*peer))
            .collect();
        match self.take_step(ElasticStepInput::WorldRequest {
            task: TaskId(task),
            after: Generation(generation),
            suspects,
        }) {
            None => {}
            Some(Ok(decisions)) => {
                self.apply_decisions(decisions);
                self.resend_world(task, generation);
            }
            Some(Err(RegistrationRefusal::Dismissed { .. })) => self.leave_job(task),
            Some(Err(_)) => self.kill_process(task),
        }
        // Answers may be lost, so the worker repeats its request until it gets one.
        let waits =
            self.processes.get(&task).is_some_and(|process| process.asking && !process.dead);
        if waits {
            self.schedule_between(200, 400, SimulatedElasticEvent::AsksAgain(task));
        }
    }

    /// Returns whether a peer's engine would report this task as silent.
    fn is_silent(&self, task: u32) -> bool {
        let Some(process) = self.processes.get(&task) else { return true };
        (process.dead && !process.returned) || process.stopped_until > self.now
    }

    fn leave_job(&mut self, task: u32) {
        if let Some(process) = self.processes.get_mut(&task).filter(|process| !process.dead) {
            (process.dead, process.dismissed, process.asking) = (true, true, false);
            self.schedule_between(1, 200, SimulatedElasticEvent::Reports { task, code: Some(0) });
        }
    }

    fn step_worker(&mut self, task: u32) {
        let Some(process) = self.processes.get(&task).cloned() else { return };
        if process.dead {
            return;
        }
        let stopped = process.stopped_until > self.now;
        // The agent sends heartbeats even while its worker is stopped.
        self.apply_membership_input(MembershipInput::Heartbeat {
            task: TaskId(task),
            session: u64::from(task),
        });
        if process.returned {
            return;
        }
        self.schedule_between(
            HEARTBEAT_INTERVAL_MS / 2,
            HEARTBEAT_INTERVAL_MS,
            SimulatedElasticEvent::Works(task),
        );
        if stopped {
            return;
        }
        if self.now < FAULTS_END_MS {
            if self.chance.random_bool(0.01) {
                self.schedule_between(0, 500, SimulatedElasticEvent::Killed(task));
            } else if self.chance.random_bool(0.005) {
                let until = self.now + self.chance.random_range(1_000..20_000);
                return self.schedule_at(self.now, SimulatedElasticEvent::Stopped { task, until });
            } else if self.chance.random_bool(0.002) {
                self.kill_process(task);
                return self.schedule_between(
                    1,
                    100,
                    SimulatedElasticEvent::Reports { task, code: Some(1) },
                );
            }
        }
        if process.asking || process.turning || process.world.is_empty() {
            return;
        }
        // `init` returns once all members are present.
        let apart = self.now - process.began > 500
            && process.world.iter().any(|peer| {
                self.processes.get(peer).is_none_or(|peer| {
                    (peer.dead && !peer.returned)
                        || peer.stopped_until > self.now + 5_000
                        || peer.generation != process.generation
                        || peer.asking
                })
            });
        let is_announced = self.away.is_none()
            && self.machine.present.as_ref().is_some_and(CurrentWorld::is_change_announced)
            && self.machine.generation().0 == process.generation;
        if apart || is_announced {
            // Prevents a second request if the next check comes before the first one.
            if let Some(process) = self.processes.get_mut(&task) {
                process.turning = true;
            }
            self.schedule_between(1, 2_000, SimulatedElasticEvent::Asks(task));
        } else if self.now - process.began >= self.work && self.now > FAULTS_END_MS / 2 {
            if let Some(process) = self.processes.get_mut(&task) {
                process.returned = true;
            }
            self.schedule_between(1, 500, SimulatedElasticEvent::Reports { task, code: Some(0) });
        }
    }

    fn apply_decisions(&mut self, decisions: Vec<MembershipDecision>) {
        if self.dying && !decisions.is_empty() {
            // The decisions are in the journal, but no worker gets them.
            self.kill_registrar();
            for decision in decisions {
                if let MembershipDecision::Assigned { world } = decision {
                    self.check_assigned_world(&world, false);
                }
            }
            return;
        }
        for decision in decisions {
            match decision {
                MembershipDecision::Start { task, host } => self.start_process(task.0, host),
                MembershipDecision::End { task, .. } => self.kill_process(task.0),
                MembershipDecision::Dismissed { task, .. } => self.leave_job(task.0),
                MembershipDecision::Assigned { world } => self.check_assigned_world(&world, true),
                MembershipDecision::Finished { .. } => {
                    let well = |task: &u32| {
                        let process = &self.processes[task];
                        process.returned
                            || process.dismissed
                            || process.dead && !self.machine.workers.contains_key(&TaskId(*task))
                    };
                    // The last world may consist of the remaining members of a world that has
                    // returned on other ranks, and they may have been dismissed.
                    let returned = self.processes.values().any(|process| process.returned);
                    if !self.last.iter().all(well) || !returned {
                        self.fail_simulation("ES-4: not every rank of the last world returned");
                    }
                    self.over = Some(FINISHED_OUTCOME.to_owned());
                }
                MembershipDecision::Aborted { reason } => self.over = Some(reason),
                _ => {}
            }
        }
    }

    fn start_process(&mut self, task: u32, host: String) {
        let wanted = |task: &u32| {
            self.machine.workers.get(&TaskId(*task)).is_some_and(|worker| {
                worker.dismissed.is_none() && worker.stage != WorkerStage::Done
            })
        };
        let living: Vec<&SimulatedProcess> = self
            .processes
            .iter()
            .filter(|(task, _)| wanted(task))
            .map(|(_, process)| process)
            .collect();
        let there = living.iter().filter(|process| process.host == host).count();
        if there >= self.hosts.get(&host).copied().unwrap_or(0) as usize {
            self.fail_simulation("ES-5: a host has more workers than slots");
        }
        if living.len() >= (self.rules.max_workers + self.rules.spares) as usize {
            self.fail_simulation("ES-5: more workers than the job may have");
        }
        self.processes.insert(task, SimulatedProcess { host, ..SimulatedProcess::default() });
        if self.now < FAULTS_END_MS && self.chance.random_bool(0.05) {
            let reason = "no route to host".to_owned();
            self.kill_process(task);
            // The driver reports this a moment later.
            return self.apply_membership_input(MembershipInput::NotStarted {
                task: TaskId(task),
                reason,
            });
        }
        self.schedule_between(10, 3_000, SimulatedElasticEvent::Registers(task));
    }

    fn check_assigned_world(&mut self, world: &farandole_world::World, is_announced: bool) {
        let order: Vec<u32> = world.seats.iter().map(|seat| seat.task.0).collect();
        let before = std::mem::replace(&mut self.last, order.clone());
        let returned = self.processes.values().any(|process| process.returned);
        let size = u32::try_from(order.len()).unwrap();
        if size > self.rules.max_workers || (size < self.rules.min_workers && !returned) {
            self.fail_simulation("ES-1: a world of a wrong size");
        }
        if order.iter().any(|task| !self.processes[task].asking) {
            self.fail_simulation("ES-1: a member does not wait for a world");
        }
        for (task, process) in &self.processes {
            let works =
                !process.dead && !process.returned && !process.asking && !process.world.is_empty();
            let suspended = self.machine.workers.contains_key(&TaskId(*task));
            if works && suspended && process.generation < world.generation.0 {
                self.fail_simulation("ES-2: a member of an earlier world still works there");
            }
        }
        let stays: Vec<usize> =
            (0..before.len()).filter(|rank| order.contains(&before[*rank])).collect();
        if let Some(lowest) = stays.first() {
            if !before.contains(&order[0]) {
                self.fail_simulation("ES-3: rank 0 is new");
            }
            for rank in &stays {
                if *rank < order.len() && order[*rank] != before[*rank] && rank != lowest {
                    self.fail_simulation("ES-3: a member lost its rank");
                }
            }
        }
        for task in order.iter().filter(|_| is_announced) {
            let hears = SimulatedElasticEvent::Hears {
                task: *task,
                generation: world.generation.0,
                ranks: order.clone(),
            };
            self.schedule_between(1, 100, hears);
        }
    }
}

fn setting_from_env(name: &str, default: u64) -> u64 {
    farandole_config::environment_variable(name)
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

#[test]
fn jobs_whose_workers_come_and_go_come_to_their_end() {
    let first = setting_from_env("FARANDOLE_SIMULATION_FIRST", 0);
    let seeds = setting_from_env("FARANDOLE_SIMULATION_SEEDS", 300);
    let outcomes: Vec<(bool, u64, u64)> =
        (first..first + seeds).map(|seed| ElasticSimulation::new(seed).run()).collect();
    let finished = outcomes.iter().filter(|(finished, ..)| *finished).count();
    let worlds: u64 = outcomes.iter().map(|(_, worlds, _)| worlds).sum();
    let restarts: u64 = outcomes.iter().map(|(.., restarts)| restarts).sum();
    println!(
        "{seeds} jobs: {finished} finished, {worlds} worlds, {restarts} restarts of the registrar"
    );
    // The other jobs end because a script fails by itself on every rank, or because hosts stay
    // away.
    assert!(seeds < 100 || finished * 2 > outcomes.len(), "only {finished} of {seeds} finished");
    assert!(seeds < 100 || worlds > 5 * seeds, "only {worlds} worlds in {seeds} jobs");
    assert!(seeds < 100 || restarts > seeds, "only {restarts} restarts in {seeds} jobs");
}

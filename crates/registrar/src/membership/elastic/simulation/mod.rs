// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole elastic jobs in simulated time: hosts come and go, workers are killed, stopped and fail,
//! what they say is late, repeated or lost. One seed is one history: a failure names it, and
//! `FARANDOLE_SIMULATION_FIRST` with `FARANDOLE_SIMULATION_SEEDS=1` plays it again.
//!
//! - `ES-1`: a world has as many workers as the rules allow, each running and waiting for it.
//! - `ES-2`: no running worker of an earlier world still works in it when the next one is formed.
//! - `ES-3`: rank 0 was in the world before, if any member of that world is in this one; members
//!   keep their ranks.
//! - `ES-4`: a job that finishes is one whose last world returned on every rank.
//! - `ES-5`: a host has no more workers than slots, and the job no more than it may have.
//! - `ES-6`: once faults end, the job comes to its end.
//! - `ES-7`: repeating the steps of a journal makes the machine that the registrar had when it
//!   died; answers that it had not sent by then are sent after it has started again (by the other
//!   six).

mod restarts;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::restarts::Kept;
use super::*;
use crate::exit::{Exit, How};

/// Times at which faults end, and at which everything must be over. In milliseconds.
const HEALED: u64 = 120_000;
const END: u64 = 600_000;
const BEAT: u64 = 1_000;
const TICK: u64 = 50;
const FINISHED: &str = "finished";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Tick,
    /// Its agent reaches the registrar.
    Registers(u32),
    /// It calls `init`, for the first time or again.
    Asks(u32),
    /// It has not heard the answer.
    AsksAgain(u32),
    /// It hears of its world.
    Hears {
        task: u32,
        generation: u64,
        ranks: Vec<u32>,
    },
    /// It looks at its peers, beats, and works.
    Works(u32),
    /// The registrar hears of its end.
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
    /// The registrar is killed, at once or in the middle of the next step that decides something.
    Dies {
        within: bool,
    },
    /// It has started again.
    Rises,
}

#[derive(Clone, Debug, Default)]
struct Process {
    host: String,
    /// The world it is in, by rank.
    world: Vec<u32>,
    generation: u64,
    asking: bool,
    /// It has seen that it has to ask.
    turning: bool,
    began: u64,
    asked_at: u64,
    stopped_until: u64,
    dead: bool,
    dismissed: bool,
    returned: bool,
}

struct Run {
    seed: u64,
    now: u64,
    chance: StdRng,
    machine: Elastic,
    rules: Rules,
    queue: BinaryHeap<Reverse<(u64, u64, Happens)>>,
    order: u64,
    processes: BTreeMap<u32, Process>,
    hosts: BTreeMap<String, u32>,
    /// Milliseconds of undisturbed work in one world after which the function returns.
    work: u64,
    last: Vec<u32>,
    over: Option<String>,
    /// The state from which a dead registrar is made again, in half of the jobs.
    journal: Option<Kept>,
    dying: bool,
    /// Since when there is none.
    away: Option<u64>,
    /// Time for which there was none.
    outages: u64,
    restarts: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let least = chance.random_range(1..=3);
        let first = chance.random_range(least..=4);
        let most = chance.random_range(first..=6);
        let rules = Rules {
            first,
            least,
            most,
            spares: chance.random_range(0..=2),
            timeout: Duration::from_secs(60),
            reset_limit: None,
            cooldown: (Duration::from_secs(1), Duration::from_secs(10)),
            start_timeout: Duration::from_secs(20),
            liveness: Liveness {
                heartbeat_timeout: Duration::from_secs(5),
                disconnect_grace: Duration::from_secs(1),
            },
        };
        let mut run = Self {
            seed,
            now: 0,
            machine: Elastic::new(rules.clone()),
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
            run.journal = Some(Kept::new(run.machine.clone()));
            let mut at = 0;
            while at < HEALED {
                at += run.chance.random_range(1_000..60_000);
                let within = run.chance.random_bool(0.7);
                run.at(at, Happens::Dies { within });
            }
        }
        run.at(0, Happens::Tick);
        let mut at = 0;
        while at < HEALED {
            let hosts = run.random_hosts(at == 0);
            run.at(at, Happens::Hosts(hosts));
            at += run.chance.random_range(2_000..60_000);
        }
        let hosts = run.random_hosts(true);
        run.at(HEALED, Happens::Hosts(hosts));
        run
    }

    /// Enough for the least world where `enough`.
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

    fn at(&mut self, at: u64, what: Happens) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, what)));
    }

    fn soon(&mut self, least: u64, most: u64, what: Happens) {
        let at = self.now + self.chance.random_range(least..=most);
        self.at(at, what);
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.now - self.outages)
    }

    fn fail(&self, what: &str) -> ! {
        let living: Vec<_> = self.processes.iter().filter(|(_, process)| !process.dead).collect();
        panic!("seed {}, {} ms: {what}\n{living:?}\n{:#?}", self.seed, self.now, self.machine)
    }

    /// Returns whether the job finished, how many worlds it had, and how often the registrar died.
    fn run(mut self) -> (bool, u64, u64) {
        while let Some(Reverse((at, _, what))) = self.queue.pop() {
            if let Some(over) = &self.over {
                return (over == FINISHED, self.machine.generation().0, self.restarts);
            }
            self.now = at;
            if at > END {
                self.fail("ES-6: the job does not come to its end");
            }
            self.happens(what);
        }
        self.fail("nothing happens any more")
    }

    fn observe(&mut self, input: Input) {
        if let Some(Ok(decisions)) = self.take(What::Happens(input)) {
            self.apply(decisions);
        }
    }

    fn happens(&mut self, what: Happens) {
        match what {
            Happens::Tick => {
                self.observe(Input::Tick);
                self.at(self.now + TICK, Happens::Tick);
            }
            Happens::Hosts(hosts) => {
                self.hosts = hosts.iter().cloned().collect();
                self.observe(Input::Hosts(hosts));
            }
            Happens::Registers(task) => {
                let Some(process) = self.processes.get(&task).filter(|process| !process.dead)
                else {
                    return;
                };
                let host = HostHash(process.host.clone());
                let what =
                    What::Registers { task: TaskId(task), session: u64::from(task), place: host };
                match self.take(what) {
                    None => self.soon(100, 400, Happens::Registers(task)),
                    Some(Ok(decisions)) => {
                        self.apply(decisions);
                        self.soon(50, 5_000, Happens::Asks(task));
                        self.at(self.now, Happens::Works(task));
                    }
                    Some(Err(_)) => self.gone(task),
                }
            }
            Happens::Asks(task) => self.asks(task),
            Happens::AsksAgain(task) => {
                if self.processes.get(&task).is_some_and(|process| process.asking) {
                    self.asks(task);
                }
            }
            Happens::Hears { task, generation, ranks } => {
                let Some(process) = self.processes.get_mut(&task).filter(|process| !process.dead)
                else {
                    return;
                };
                if generation > process.generation {
                    (process.generation, process.world) = (generation, ranks);
                    (process.began, process.asking) = (self.now, false);
                }
            }
            Happens::Works(task) => self.works(task),
            Happens::Reports { task, code } if self.away.is_some() => {
                self.soon(100, 400, Happens::Reports { task, code });
            }
            Happens::Dies { within: true } => self.dying = true,
            Happens::Dies { within: false } => self.dies(),
            Happens::Rises => self.rises(),
            Happens::Reports { task, code } => {
                let how = code.map_or(How::Signal(9), How::Code);
                let exit = Exit { how, peer_error: false, stopped: false, stderr_tail: Vec::new() };
                self.observe(Input::Exited { task: TaskId(task), generation: Generation(0), exit });
            }
            Happens::Killed(task) => {
                if self
                    .processes
                    .get(&task)
                    .is_some_and(|process| !process.dead && !process.returned)
                {
                    self.gone(task);
                    self.soon(1, 100, Happens::Reports { task, code: None });
                }
            }
            Happens::Stopped { task, until } => {
                if let Some(process) = self.processes.get_mut(&task) {
                    process.stopped_until = until;
                }
            }
        }
    }

    fn gone(&mut self, task: u32) {
        if let Some(process) = self.processes.get_mut(&task) {
            process.dead = true;
        }
    }

    fn asks(&mut self, task: u32) {
        let Some(process) = self.processes.get_mut(&task) else { return };
        if process.dead || process.returned {
            return;
        }
        if process.stopped_until > self.now {
            let at = process.stopped_until;
            return self.at(at, Happens::Asks(task));
        }
        (process.asking, process.turning) = (true, false);
        process.asked_at = self.now;
        let (generation, world) = (process.generation, process.world.clone());
        let suspects = world
            .iter()
            .filter(|peer| **peer != task && self.is_silent(**peer))
            .map(|peer| TaskId(*peer))
            .collect();
        match self.take(What::Asks { task: TaskId(task), after: Generation(generation), suspects })
        {
            None => {}
            Some(Ok(decisions)) => {
                self.apply(decisions);
                self.hears_again(task, generation);
            }
            Some(Err(Refusal::Dismissed { .. })) => self.leaves(task),
            Some(Err(_)) => self.gone(task),
        }
        // Answers may be lost: it asks until it hears.
        let waits =
            self.processes.get(&task).is_some_and(|process| process.asking && !process.dead);
        if waits {
            self.soon(200, 400, Happens::AsksAgain(task));
        }
    }

    /// Returns the report that a peer's engine would make of it.
    fn is_silent(&self, task: u32) -> bool {
        let Some(process) = self.processes.get(&task) else { return true };
        (process.dead && !process.returned) || process.stopped_until > self.now
    }

    fn leaves(&mut self, task: u32) {
        if let Some(process) = self.processes.get_mut(&task).filter(|process| !process.dead) {
            (process.dead, process.dismissed, process.asking) = (true, true, false);
            self.soon(1, 200, Happens::Reports { task, code: Some(0) });
        }
    }

    fn works(&mut self, task: u32) {
        let Some(process) = self.processes.get(&task).cloned() else { return };
        if process.dead {
            return;
        }
        let stopped = process.stopped_until > self.now;
        // The agent beats even when its worker is stopped.
        self.observe(Input::Beat { task: TaskId(task), session: u64::from(task) });
        if process.returned {
            return;
        }
        self.soon(BEAT / 2, BEAT, Happens::Works(task));
        if stopped {
            return;
        }
        if self.now < HEALED {
            if self.chance.random_bool(0.01) {
                self.soon(0, 500, Happens::Killed(task));
            } else if self.chance.random_bool(0.005) {
                let until = self.now + self.chance.random_range(1_000..20_000);
                return self.at(self.now, Happens::Stopped { task, until });
            } else if self.chance.random_bool(0.002) {
                self.gone(task);
                return self.soon(1, 100, Happens::Reports { task, code: Some(1) });
            }
        }
        if process.asking || process.turning || process.world.is_empty() {
            return;
        }
        // `init` returns when all members are there.
        let apart = self.now - process.began > 500
            && process.world.iter().any(|peer| {
                self.processes.get(peer).is_none_or(|peer| {
                    (peer.dead && !peer.returned)
                        || peer.stopped_until > self.now + 5_000
                        || peer.generation != process.generation
                        || peer.asking
                })
            });
        let told = self.away.is_none()
            && self.machine.present.as_ref().is_some_and(Present::is_told)
            && self.machine.generation().0 == process.generation;
        if apart || told {
            // Not twice, if the next look comes before that.
            if let Some(process) = self.processes.get_mut(&task) {
                process.turning = true;
            }
            self.soon(1, 2_000, Happens::Asks(task));
        } else if self.now - process.began >= self.work && self.now > HEALED / 2 {
            if let Some(process) = self.processes.get_mut(&task) {
                process.returned = true;
            }
            self.soon(1, 500, Happens::Reports { task, code: Some(0) });
        }
    }

    fn apply(&mut self, decisions: Vec<Decision>) {
        if self.dying && !decisions.is_empty() {
            // Noted, but not sent to any worker.
            self.dies();
            for decision in decisions {
                if let Decision::Assigned { world } = decision {
                    self.assigned(&world, false);
                }
            }
            return;
        }
        for decision in decisions {
            match decision {
                Decision::Start { task, host } => self.start(task.0, host),
                Decision::End { task, .. } => self.gone(task.0),
                Decision::Dismissed { task, .. } => self.leaves(task.0),
                Decision::Assigned { world } => self.assigned(&world, true),
                Decision::Finished { .. } => {
                    let well = |task: &u32| {
                        let process = &self.processes[task];
                        process.returned
                            || process.dismissed
                            || process.dead && !self.machine.workers.contains_key(&TaskId(*task))
                    };
                    // The last world may be the rest of one that has returned, and may have been
                    // dismissed.
                    let returned = self.processes.values().any(|process| process.returned);
                    if !self.last.iter().all(well) || !returned {
                        self.fail("ES-4: not every rank of the last world returned");
                    }
                    self.over = Some(FINISHED.to_owned());
                }
                Decision::Aborted { reason } => self.over = Some(reason),
                _ => {}
            }
        }
    }

    fn start(&mut self, task: u32, host: String) {
        let wanted = |task: &u32| {
            self.machine
                .workers
                .get(&TaskId(*task))
                .is_some_and(|worker| worker.dismissed.is_none() && worker.stage != Stage::Done)
        };
        let living: Vec<&Process> = self
            .processes
            .iter()
            .filter(|(task, _)| wanted(task))
            .map(|(_, process)| process)
            .collect();
        let there = living.iter().filter(|process| process.host == host).count();
        if there >= self.hosts.get(&host).copied().unwrap_or(0) as usize {
            self.fail("ES-5: a host has more workers than slots");
        }
        if living.len() >= (self.rules.most + self.rules.spares) as usize {
            self.fail("ES-5: more workers than the job may have");
        }
        self.processes.insert(task, Process { host, ..Process::default() });
        if self.now < HEALED && self.chance.random_bool(0.05) {
            let reason = "no route to host".to_owned();
            self.gone(task);
            // The driver says so a moment later.
            return self.observe(Input::NotStarted { task: TaskId(task), reason });
        }
        self.soon(10, 3_000, Happens::Registers(task));
    }

    fn assigned(&mut self, world: &farandole_world::World, told: bool) {
        let order: Vec<u32> = world.seats.iter().map(|seat| seat.task.0).collect();
        let before = std::mem::replace(&mut self.last, order.clone());
        let returned = self.processes.values().any(|process| process.returned);
        let size = u32::try_from(order.len()).unwrap();
        if size > self.rules.most || (size < self.rules.least && !returned) {
            self.fail("ES-1: a world of a wrong size");
        }
        if order.iter().any(|task| !self.processes[task].asking) {
            self.fail("ES-1: a member does not wait for a world");
        }
        for (task, process) in &self.processes {
            let works =
                !process.dead && !process.returned && !process.asking && !process.world.is_empty();
            let suspended = self.machine.workers.contains_key(&TaskId(*task));
            if works && suspended && process.generation < world.generation.0 {
                self.fail("ES-2: a member of an earlier world still works there");
            }
        }
        let stays: Vec<usize> =
            (0..before.len()).filter(|rank| order.contains(&before[*rank])).collect();
        if let Some(lowest) = stays.first() {
            if !before.contains(&order[0]) {
                self.fail("ES-3: rank 0 is new");
            }
            for rank in &stays {
                if *rank < order.len() && order[*rank] != before[*rank] && rank != lowest {
                    self.fail("ES-3: a member lost its rank");
                }
            }
        }
        for task in order.iter().filter(|_| told) {
            let hears = Happens::Hears {
                task: *task,
                generation: world.generation.0,
                ranks: order.clone(),
            };
            self.soon(1, 100, hears);
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    farandole_config::environment(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn jobs_whose_workers_come_and_go_come_to_their_end() {
    let first = number("FARANDOLE_SIMULATION_FIRST", 0);
    let seeds = number("FARANDOLE_SIMULATION_SEEDS", 300);
    let outcomes: Vec<(bool, u64, u64)> =
        (first..first + seeds).map(|seed| Run::new(seed).run()).collect();
    let finished = outcomes.iter().filter(|(finished, ..)| *finished).count();
    let worlds: u64 = outcomes.iter().map(|(_, worlds, _)| worlds).sum();
    let restarts: u64 = outcomes.iter().map(|(.., restarts)| restarts).sum();
    println!(
        "{seeds} jobs: {finished} finished, {worlds} worlds, {restarts} restarts of the registrar"
    );
    // Scripts that fail by themselves everywhere, and hosts that stay away, end the others.
    assert!(seeds < 100 || finished * 2 > outcomes.len(), "only {finished} of {seeds} finished");
    assert!(seeds < 100 || worlds > 5 * seeds, "only {worlds} worlds in {seeds} jobs");
    assert!(seeds < 100 || restarts > seeds, "only {restarts} restarts in {seeds} jobs");
}

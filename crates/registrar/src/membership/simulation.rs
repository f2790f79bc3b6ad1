// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole jobs in simulated time, with agents that crash and start again, over a network that loses,
//! delays, repeats and parts. One seed is one history: a failure names it, and
//! `FARANDOLE_SIMULATION_FIRST` with `FARANDOLE_SIMULATION_SEEDS=1` plays it again.
//!
//! - `SI-1`: a generation that finishes is one whose every worker ended well, in it.
//! - `SI-2`: a verdict blames a task that failed, crashed or was cut off, never one that lost its
//!   peer; without `retry` only one that failed.
//! - `SI-3`: once the network heals and agents stay, the job comes to its end, and never by the
//!   limit of its start.
//! - `SI-4`: two generations never work at once, but for workers that have not yet heard, or cannot
//!   hear, of their end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::exit::How;

/// The time at which the network heals and agents stop crashing.
const HEALED: u64 = 60_000;
/// The time at which everything is over, whatever happened before.
const END: u64 = 240_000;
/// Time for which an agent waits for the others.
const START: u64 = 120_000;
/// Time for which the rest of a stage runs beside the stage that was started in its place.
const LINGERS: u64 = 2_000;
/// Time for which an agent of a barrier stage waits to be ended before it registers again.
const LEFT_ALONE: u64 = 4_000;
/// Interval at which an agent without an answer asks again, beats and looks around.
const STEP: u64 = 200;
const BEAT: u64 = 1_000;
/// The exit code of a worker that failed because a peer had.
const PEER: i32 = 2;
const OPTIONS: Options = Options {
    tasks: 0,
    liveness: Liveness {
        heartbeat_timeout: Duration::from_secs(5),
        disconnect_grace: Duration::from_secs(1),
    },
    failure_grace: Duration::from_millis(500),
    in_order: false,
};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    /// An agent looks around.
    Agent {
        task: u32,
        session: u64,
    },
    /// Something arrives at the registrar.
    Arrives {
        task: u32,
        session: u64,
        what: Said,
    },
    /// Something arrives at an agent.
    Hears {
        task: u32,
        session: u64,
        what: Told,
    },
    /// The agent's machine fails.
    Crash {
        task: u32,
    },
    /// Spark starts it again.
    Restart {
        task: u32,
    },
    /// Spark ends an agent of a stage that has failed.
    Ended {
        task: u32,
        session: u64,
    },
    /// An agent whose generation was broken up is still there.
    LeftAlone {
        task: u32,
        session: u64,
    },
    /// Nothing passes between this agent and the registrar until then.
    Part {
        task: u32,
        until: u64,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    Register { attempt: u64 },
    Beat,
    Closed,
    Exited { generation: u64, code: i32, peer: bool, stopped: bool },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Assigned { generation: u64 },
    Stop { generation: u64 },
    Refused,
    Registered,
}

#[derive(Clone, Debug)]
struct Agent {
    session: u64,
    attempt: u64,
    registered: bool,
    /// Generation, when its worker ends, and how.
    working: Option<(u64, u64, i32)>,
    /// An end that the registrar has not confirmed.
    ended: Option<Said>,
    done: bool,
    beaten: u64,
}

struct World {
    seed: u64,
    now: u64,
    chance: StdRng,
    job: Membership,
    queue: BinaryHeap<Reverse<(u64, u64, Happens)>>,
    order: u64,
    agents: BTreeMap<u32, Agent>,
    /// Sessions by task, as the registrar took them last.
    parted: BTreeMap<u32, u64>,
    sessions: u64,
    restarting: usize,
    /// Whether an agent that hears of another one's loss registers again, as in a gang without a
    /// barrier.
    rejoins: bool,
    faults: bool,
    assigned: u64,
    blamable: BTreeSet<u32>,
    failures: BTreeSet<u32>,
    good: BTreeMap<u64, BTreeSet<u32>>,
    verdicts: BTreeSet<u64>,
    over: Option<&'static str>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let tasks = chance.random_range(1..=6);
        let mut world = Self {
            seed,
            now: 0,
            rejoins: chance.random_bool(0.5),
            faults: chance.random_bool(0.8),
            chance,
            job: Membership::new(Options { tasks, ..OPTIONS }),
            queue: BinaryHeap::new(),
            order: 0,
            agents: BTreeMap::new(),
            parted: BTreeMap::new(),
            sessions: 0,
            restarting: 0,
            assigned: 0,
            blamable: BTreeSet::new(),
            failures: BTreeSet::new(),
            good: BTreeMap::new(),
            verdicts: BTreeSet::new(),
            over: None,
        };
        for task in 0..tasks {
            let at = world.chance.random_range(0..3_000);
            world.restarting += 1;
            world.at(at, Happens::Restart { task });
            if world.faults {
                for _ in 0..world.chance.random_range(0..3) {
                    let at = world.chance.random_range(0..HEALED);
                    let until = at + world.chance.random_range(100..12_000);
                    let fault = if world.chance.random_bool(0.5) {
                        Happens::Crash { task }
                    } else {
                        Happens::Part { task, until: until.min(HEALED) }
                    };
                    world.at(at, fault);
                }
            }
        }
        world.at(0, Happens::Tick);
        world
    }

    fn at(&mut self, at: u64, what: Happens) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, what)));
    }

    fn is_cut(&self, task: u32) -> bool {
        self.parted.get(&task).is_some_and(|until| *until > self.now)
    }

    /// Sends something over the network: late, twice, or never. Beats come on a stream, where loss
    /// is but delay.
    fn send(&mut self, task: u32, what: Happens) {
        let healed = !self.faults || self.now >= HEALED;
        let streams = matches!(what, Happens::Arrives { what: Said::Beat, .. });
        if self.is_cut(task) || (!healed && !streams && self.chance.random_bool(0.1)) {
            return;
        }
        let copies = if !healed && self.chance.random_bool(0.1) { 2 } else { 1 };
        for _ in 0..copies {
            let slow = !healed && self.chance.random_bool(0.05);
            let delay = self.chance.random_range(1..if slow { 400 } else { 60 });
            self.at(self.now + delay, what.clone());
        }
    }

    fn say(&mut self, task: u32, session: u64, what: Said) {
        self.send(task, Happens::Arrives { task, session, what });
    }

    fn tell(&mut self, task: u32, session: u64, what: Told) {
        self.send(task, Happens::Hears { task, session, what });
    }

    fn play(mut self) -> (&'static str, u64) {
        while let Some(Reverse((at, _, what))) = self.queue.pop() {
            assert!(at <= END, "SI-3: seed {}: not over at {END} ms: {:?}", self.seed, self.agents);
            self.now = at;
            self.happens(what);
            if let Some(over) = self.over {
                return (over, self.assigned);
            }
        }
        panic!("seed {}: nothing happens any more", self.seed);
    }

    fn happens(&mut self, what: Happens) {
        match what {
            Happens::Tick => {
                self.at(self.now + 50, Happens::Tick);
                let decisions = self.job.observe(at(self.now), Input::Tick);
                self.decided(decisions);
                if self.restarting == 0 && self.agents.values().all(|agent| agent.done) {
                    // Spark has nothing to start again: the driver says which task was lost.
                    self.over.get_or_insert("lost");
                } else if self.now > HEALED + START {
                    // Some wait for others that do not come.
                    self.over.get_or_insert("timed out");
                }
            }
            Happens::Restart { task } => {
                self.restarting -= 1;
                self.restart(task);
            }
            Happens::Ended { task, session } => {
                if self.agents.get(&task).is_some_and(|agent| agent.session == session) {
                    self.agents.remove(&task);
                    self.at(self.now + 20, Happens::Arrives { task, session, what: Said::Closed });
                }
            }
            Happens::LeftAlone { task, session } => {
                self.restarting -= 1;
                if self.agents.get(&task).is_some_and(|agent| agent.session == session) {
                    self.restart(task);
                }
            }
            Happens::Crash { task } => self.crash(task),
            Happens::Part { task, until } => {
                self.parted.insert(task, until);
                self.blamable.insert(task);
                // The registrar's end of the connection may learn at once, or by silence alone.
                if let Some(session) = self.agents.get(&task).map(|agent| agent.session)
                    && self.chance.random_bool(0.5)
                {
                    self.at(self.now + 1, Happens::Arrives { task, session, what: Said::Closed });
                }
            }
            Happens::Agent { task, session } => self.act(task, session),
            Happens::Arrives { task, session, what } => self.arrives(task, session, what),
            Happens::Hears { task, session, what } => self.hears(task, session, what),
        }
    }

    fn restart(&mut self, task: u32) {
        self.sessions += 1;
        let (session, attempt) = (self.sessions, self.sessions);
        let agent = Agent {
            session,
            attempt,
            registered: false,
            working: None,
            ended: None,
            done: false,
            beaten: 0,
        };
        self.agents.insert(task, agent);
        self.at(self.now, Happens::Agent { task, session });
    }

    fn crash(&mut self, task: u32) {
        let Some(agent) = self.agents.remove(&task) else { return };
        self.blamable.insert(task);
        if let Some((generation, ..)) = agent.working {
            self.disturb(task, generation);
        }
        if !self.is_cut(task) && self.chance.random_bool(0.8) {
            self.at(
                self.now + 5,
                Happens::Arrives { task, session: agent.session, what: Said::Closed },
            );
        }
        // A barrier stage starts again as a whole. Without one, only lost tasks start again.
        let tasks: Vec<u32> =
            if self.rejoins { vec![task] } else { (0..self.job.options.tasks).collect() };
        let later = self.now + self.chance.random_range(500..8_000);
        for task in tasks {
            // Spark ends the tasks of a stage together, but not at one moment, nor does it wait for
            // that: if there are slots, the rest of the old stage runs beside the new one, and ends
            // without a message.
            if let Some(session) = self.agents.get(&task).map(|agent| agent.session) {
                self.blamable.insert(task);
                let ended = self.now + self.chance.random_range(20..LINGERS);
                self.at(ended, Happens::Ended { task, session });
            }
            self.restarting += 1;
            let started = later + self.chance.random_range(0..LINGERS);
            self.at(started, Happens::Restart { task });
        }
    }

    /// The others' collectives lose their peer.
    fn disturb(&mut self, lost: u32, generation: u64) {
        for (task, agent) in &mut self.agents {
            if *task != lost
                && let Some((of, until, code)) = &mut agent.working
                && *of == generation
            {
                let soon = self.now + self.chance.random_range(50..2_000);
                if soon < *until {
                    (*until, *code) = (soon, PEER);
                }
            }
        }
    }

    /// The actions of an agent by itself.
    fn act(&mut self, task: u32, session: u64) {
        let now = self.now;
        let healed = self.parted.get(&task).is_some_and(|until| *until <= now);
        let Some(agent) = self.agents.get_mut(&task).filter(|agent| agent.session == session)
        else {
            return;
        };
        if agent.done {
            return;
        }
        if healed {
            // Its connection comes back, and the agent offers its task again.
            self.parted.remove(&task);
            agent.registered = false;
        }
        let mut says = Vec::new();
        if !agent.registered {
            says.push(Said::Register { attempt: agent.attempt });
        }
        if let Some((generation, until, code)) = agent.working
            && now >= until
        {
            agent.working = None;
            agent.ended =
                Some(Said::Exited { generation, code, peer: code == PEER, stopped: false });
            if code == 0 {
                self.good.entry(generation).or_default().insert(task);
            } else if code != PEER {
                self.blamable.insert(task);
                self.failures.insert(task);
                self.disturb(task, generation);
            }
        }
        let Some(agent) = self.agents.get_mut(&task) else { return };
        says.extend(agent.ended.clone());
        if now >= agent.beaten + BEAT {
            agent.beaten = now;
            says.push(Said::Beat);
        }
        for said in says {
            self.say(task, session, said);
        }
        self.at(now + STEP, Happens::Agent { task, session });
    }

    fn arrives(&mut self, task: u32, session: u64, what: Said) {
        let (time, name) = (at(self.now), TaskId(task));
        let decisions = match what {
            Said::Register { attempt } => {
                match self.job.register(
                    time,
                    name,
                    attempt,
                    session,
                    host(if task.is_multiple_of(2) { "a" } else { "b" }),
                ) {
                    Ok((_, decisions)) => {
                        self.tell(task, session, Told::Registered);
                        decisions
                    }
                    Err(_) => {
                        self.tell(task, session, Told::Refused);
                        Vec::new()
                    }
                }
            }
            Said::Beat => self.job.observe(time, Input::Beat { task: name, session }),
            Said::Closed => self.job.observe(time, Input::Disconnected { task: name, session }),
            Said::Exited { generation, code, peer, stopped } => {
                let exit = Exit {
                    how: How::Code(code),
                    peer_error: peer,
                    stopped,
                    stderr_tail: Vec::new(),
                };
                let input = Input::Exited { task: name, generation: Generation(generation), exit };
                let decisions = self.job.observe(time, input);
                // A failure is answered by the verdict; a success too, as one that is lost makes
                // all begin again.
                decisions
            }
        };
        self.decided(decisions);
        // What an agent awaits is answered as soon as it can be, and again whenever it asks.
        if let Some(running) = &self.job.running
            && running.members().any(|member| member == (name, session))
        {
            let generation = running.generation().0;
            let told = match self.verdicts.contains(&generation) {
                true => Told::Stop { generation },
                false => Told::Assigned { generation },
            };
            self.tell(task, session, told);
        }
    }

    fn hears(&mut self, task: u32, session: u64, what: Told) {
        let ends = self.now + self.chance.random_range(500..20_000);
        let code = i32::from(self.faults && self.now < HEALED && self.chance.random_bool(0.03));
        let Some(agent) = self.agents.get_mut(&task).filter(|agent| agent.session == session)
        else {
            return;
        };
        match what {
            Told::Registered => agent.registered = true,
            Told::Assigned { generation }
                if agent.working.is_none() && agent.ended.is_none() && !agent.done =>
            {
                agent.working = Some((generation, ends, code));
            }
            Told::Stop { generation } => {
                let mine = agent.working.is_some_and(|(of, ..)| of == generation)
                    || agent.working.is_none();
                if mine && !agent.done {
                    agent.working = None;
                    agent.ended = None;
                    agent.done = true;
                    if self.rejoins {
                        self.restart(task);
                    } else {
                        self.restarting += 1;
                        self.at(self.now + LEFT_ALONE, Happens::LeftAlone { task, session });
                    }
                }
            }
            // Another start of the task has taken its place, or the job is over.
            Told::Refused => agent.done = true,
            Told::Assigned { .. } => {}
        }
    }

    fn decided(&mut self, decisions: Vec<Decision>) {
        for decision in decisions {
            match decision {
                Decision::Assigned { world } => {
                    assert_eq!(world.generation.0, self.assigned + 1, "seed {}", self.seed);
                    let before = self.assigned;
                    assert!(
                        before == 0 || self.verdicts.contains(&before),
                        "SI-4: seed {}",
                        self.seed
                    );
                    self.assigned += 1;
                    self.failures.clear();
                }
                Decision::Stop { generation, verdict } => {
                    assert!(self.verdicts.insert(generation.0), "seed {}: two verdicts", self.seed);
                    if let Some(TaskId(task)) = verdict.cause {
                        assert!(
                            self.blamable.contains(&task),
                            "SI-2: seed {}: {verdict:?}",
                            self.seed
                        );
                    }
                    if !verdict.retry {
                        let blamed = verdict.cause.map(|task| task.0);
                        assert!(
                            blamed.is_some_and(|task| self.failures.contains(&task)),
                            "SI-2: seed {}: {verdict:?}, failed: {:?}",
                            self.seed,
                            self.failures
                        );
                        // The driver raises the worker's error, and nothing is run again.
                        self.over = Some("failed");
                    }
                }
                Decision::Finished { generation } => {
                    let good = self.good.get(&generation.0).map_or(0, BTreeSet::len);
                    assert_eq!(good, self.job.options.tasks as usize, "SI-1: seed {}", self.seed);
                    self.over = Some("finished");
                }
                _ => {}
            }
        }
    }
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn host(name: &str) -> HostHash {
    HostHash(name.into())
}

fn setting(name: &str, default: u64) -> u64 {
    farandole_config::environment(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn jobs_over_a_bad_network_come_to_their_end_and_blame_no_task_wrongly() {
    let first = setting("FARANDOLE_SIMULATION_FIRST", 0);
    let count = setting("FARANDOLE_SIMULATION_SEEDS", 300);
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    let mut generations = 0;
    for seed in first..first + count {
        let (end, assigned) = World::new(seed).play();
        *ends.entry(end).or_default() += 1;
        generations += assigned;
    }
    if count >= 100 {
        // Otherwise the histories were too tame to show anything.
        assert!(ends["finished"] > count / 2 && ends["failed"] > 0, "{ends:?}");
        assert!(!ends.contains_key("timed out"), "SI-3: {ends:?}");
        assert!(generations > count + count / 4, "{generations} generations of {count} jobs");
    }
}

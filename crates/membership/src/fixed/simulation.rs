// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Simulation of whole jobs: agents crash and restart, over a network that loses, delays and
//! repeats messages, and is cut. One seed gives one history. A failure names its seed, and
//! `FARANDOLE_SIMULATION_FIRST` with `FARANDOLE_SIMULATION_SEEDS=1` repeats it.
//!
//! - `SI-1`: if a generation finishes, every worker of it ended successfully in it.
//! - `SI-2`: a verdict blames a task that failed, crashed or was cut off, never a task that lost
//!   its peer; without `retry`, only a task that failed.
//! - `SI-3`: once the network heals and agents stay, the job ends, and never by its start timeout.
//! - `SI-4`: two generations never work at once, except for workers that have not received, or
//!   cannot receive, the order to end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::exit::{ExitKind, ExitReport};

/// The time at which the network heals and agents stop crashing.
const NETWORK_HEALED_MS: u64 = 60_000;
/// The time at which the job must be over in any case.
const SIMULATION_END_MS: u64 = 240_000;
/// Time for which an agent waits for the other agents.
const START_TIMEOUT_MS: u64 = 120_000;
/// Time for which the remaining tasks of a stage run beside the stage that replaces it.
const STAGE_OVERLAP_MS: u64 = 2_000;
/// Time for which an agent of a barrier stage waits for its end before it registers again.
const REREGISTER_DELAY_MS: u64 = 4_000;
/// Interval at which an agent without an answer repeats its call, sends a heartbeat, and checks its
/// state.
const AGENT_STEP_MS: u64 = 200;
const HEARTBEAT_INTERVAL_MS: u64 = 1_000;
/// Exit code of a worker that failed because a peer failed.
const PEER_FAILURE_CODE: i32 = 2;
const SIMULATION_OPTIONS: MembershipOptions = MembershipOptions {
    tasks: 0,
    liveness: LivenessLimits {
        heartbeat_timeout: Duration::from_secs(5),
        disconnect_grace: Duration::from_secs(1),
    },
    failure_grace: Duration::from_millis(500),
    in_order: false,
};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedJobEvent {
    /// An agent takes its next step.
    Agent {
        task: u32,
        session: u64,
    },
    /// A message arrives at the registrar.
    Arrives {
        task: u32,
        session: u64,
        what: SimulatedAgentMessage,
    },
    /// A message arrives at an agent.
    Hears {
        task: u32,
        session: u64,
        what: SimulatedRegistrarMessage,
    },
    /// The agent's machine fails.
    Crash {
        task: u32,
    },
    /// Spark restarts the agent.
    Restart {
        task: u32,
    },
    /// Spark ends an agent of a stage that has failed.
    Ended {
        task: u32,
        session: u64,
    },
    /// An agent whose generation was stopped still runs.
    LeftAlone {
        task: u32,
        session: u64,
    },
    /// The network between this agent and the registrar is cut until then.
    Part {
        task: u32,
        until: u64,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedAgentMessage {
    Register { attempt: u64 },
    Beat,
    Closed,
    Exited { generation: u64, code: i32, peer: bool, stopped: bool },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedRegistrarMessage {
    Assigned { generation: u64 },
    Stop { generation: u64 },
    Refused,
    Registered,
}

#[derive(Clone, Debug)]
struct SimulatedAgent {
    session: u64,
    attempt: u64,
    registered: bool,
    /// Generation of its worker, the time of the worker's end, and its exit code.
    working: Option<(u64, u64, i32)>,
    /// An end that the registrar has not confirmed.
    ended: Option<SimulatedAgentMessage>,
    done: bool,
    beaten: u64,
}

struct JobSimulation {
    seed: u64,
    now: u64,
    chance: StdRng,
    job: FixedMembership,
    queue: BinaryHeap<Reverse<(u64, u64, SimulatedJobEvent)>>,
    order: u64,
    agents: BTreeMap<u32, SimulatedAgent>,
    /// Tasks that are cut off from the registrar, and the time at which each cut ends.
    parted: BTreeMap<u32, u64>,
    sessions: u64,
    restarting: usize,
    /// Whether an agent registers again when another one is lost, as in a gang without a barrier.
    rejoins: bool,
    faults: bool,
    assigned: u64,
    blamable: BTreeSet<u32>,
    failures: BTreeSet<u32>,
    good: BTreeMap<u64, BTreeSet<u32>>,
    verdicts: BTreeSet<u64>,
    over: Option<&'static str>,
}

impl JobSimulation {
    fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let tasks = chance.random_range(1..=6);
        let mut world = Self {
            seed,
            now: 0,
            rejoins: chance.random_bool(0.5),
            faults: chance.random_bool(0.8),
            chance,
            job: FixedMembership::new(MembershipOptions { tasks, ..SIMULATION_OPTIONS }),
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
            world.schedule_at(at, SimulatedJobEvent::Restart { task });
            if world.faults {
                for _ in 0..world.chance.random_range(0..3) {
                    let at = world.chance.random_range(0..NETWORK_HEALED_MS);
                    let until = at + world.chance.random_range(100..12_000);
                    let fault = if world.chance.random_bool(0.5) {
                        SimulatedJobEvent::Crash { task }
                    } else {
                        SimulatedJobEvent::Part { task, until: until.min(NETWORK_HEALED_MS) }
                    };
                    world.schedule_at(at, fault);
                }
            }
        }
        world.schedule_at(0, SimulatedJobEvent::Tick);
        world
    }

    fn schedule_at(&mut self, at: u64, what: SimulatedJobEvent) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, what)));
    }

    fn is_cut(&self, task: u32) -> bool {
        self.parted.get(&task).is_some_and(|until| *until > self.now)
    }

    /// Sends a message over the network: late, twice, or never. Heartbeats are sent on a stream, so
    /// they are delayed but not lost.
    fn send_over_network(&mut self, task: u32, what: SimulatedJobEvent) {
        let healed = !self.faults || self.now >= NETWORK_HEALED_MS;
        let streams =
            matches!(what, SimulatedJobEvent::Arrives { what: SimulatedAgentMessage::Beat, .. });
        if self.is_cut(task) || (!healed && !streams && self.chance.random_bool(0.1)) {
            return;
        }
        let copies = if !healed && self.chance.random_bool(0.1) { 2 } else { 1 };
        for _ in 0..copies {
            let slow = !healed && self.chance.random_bool(0.05);
            let delay = self.chance.random_range(1..if slow { 400 } else { 60 });
            self.schedule_at(self.now + delay, what.clone());
        }
    }

    fn send_to_registrar(&mut self, task: u32, session: u64, what: SimulatedAgentMessage) {
        self.send_over_network(task, SimulatedJobEvent::Arrives { task, session, what });
    }

    fn send_to_agent(&mut self, task: u32, session: u64, what: SimulatedRegistrarMessage) {
        self.send_over_network(task, SimulatedJobEvent::Hears { task, session, what });
    }

    fn run_to_end(mut self) -> (&'static str, u64) {
        while let Some(Reverse((at, _, what))) = self.queue.pop() {
            assert!(
                at <= SIMULATION_END_MS,
                "SI-3: seed {}: not over at {SIMULATION_END_MS} ms: {:?}",
                self.seed,
                self.agents
            );
            self.now = at;
            self.handle_event(what);
            if let Some(over) = self.over {
                return (over, self.assigned);
            }
        }
        panic!("seed {}: nothing happens any more", self.seed);
    }

    fn handle_event(&mut self, what: SimulatedJobEvent) {
        match what {
            SimulatedJobEvent::Tick => {
                self.schedule_at(self.now + 50, SimulatedJobEvent::Tick);
                let decisions = self
                    .job
                    .apply_membership_input(millis_to_duration(self.now), MembershipInput::Tick);
                self.check_decisions(decisions);
                if self.restarting == 0 && self.agents.values().all(|agent| agent.done) {
                    // Spark has no task to restart: the driver reports the lost task.
                    self.over.get_or_insert("lost");
                } else if self.now > NETWORK_HEALED_MS + START_TIMEOUT_MS {
                    // Some agents wait for others that do not come.
                    self.over.get_or_insert("timed out");
                }
            }
            SimulatedJobEvent::Restart { task } => {
                self.restarting -= 1;
                self.restart_agent(task);
            }
            SimulatedJobEvent::Ended { task, session } => {
                if self.agents.get(&task).is_some_and(|agent| agent.session == session) {
                    self.agents.remove(&task);
                    self.schedule_at(
                        self.now + 20,
                        SimulatedJobEvent::Arrives {
                            task,
                            session,
                            what: SimulatedAgentMessage::Closed,
                        },
                    );
                }
            }
            SimulatedJobEvent::LeftAlone { task, session } => {
                self.restarting -= 1;
                if self.agents.get(&task).is_some_and(|agent| agent.session == session) {
                    self.restart_agent(task);
                }
            }
            SimulatedJobEvent::Crash { task } => self.crash_agent(task),
            SimulatedJobEvent::Part { task, until } => {
                self.parted.insert(task, until);
                self.blamable.insert(task);
                // The registrar may notice the loss at once by the broken connection, or later by
                // silence.
                if let Some(session) = self.agents.get(&task).map(|agent| agent.session)
                    && self.chance.random_bool(0.5)
                {
                    self.schedule_at(
                        self.now + 1,
                        SimulatedJobEvent::Arrives {
                            task,
                            session,
                            what: SimulatedAgentMessage::Closed,
                        },
                    );
                }
            }
            SimulatedJobEvent::Agent { task, session } => self.step_agent(task, session),
            SimulatedJobEvent::Arrives { task, session, what } => {
                self.receive_at_registrar(task, session, what)
            }
            SimulatedJobEvent::Hears { task, session, what } => {
                self.receive_at_agent(task, session, what)
            }
        }
    }

    fn restart_agent(&mut self, task: u32) {
        self.sessions += 1;
        let (session, attempt) = (self.sessions, self.sessions);
        let agent = SimulatedAgent {
            session,
            attempt,
            registered: false,
            working: None,
            ended: None,
            done: false,
            beaten: 0,
        };
        self.agents.insert(task, agent);
        self.schedule_at(self.now, SimulatedJobEvent::Agent { task, session });
    }

    fn crash_agent(&mut self, task: u32) {
        let Some(agent) = self.agents.remove(&task) else { return };
        self.blamable.insert(task);
        if let Some((generation, ..)) = agent.working {
            self.fail_peers_of(task, generation);
        }
        if !self.is_cut(task) && self.chance.random_bool(0.8) {
            self.schedule_at(
                self.now + 5,
                SimulatedJobEvent::Arrives {
                    task,
                    session: agent.session,
                    what: SimulatedAgentMessage::Closed,
                },
            );
        }
        // Spark restarts all tasks of a barrier stage. Without a barrier, it restarts only lost
        // tasks.
        let tasks: Vec<u32> =
            if self.rejoins { vec![task] } else { (0..self.job.options.tasks).collect() };
        let later = self.now + self.chance.random_range(500..8_000);
        for task in tasks {
            // Spark ends the tasks of a stage together, but not at the same moment, and does not
            // wait for their ends. If there are slots, the remaining tasks of the old stage run
            // beside the new stage, and end without a message.
            if let Some(session) = self.agents.get(&task).map(|agent| agent.session) {
                self.blamable.insert(task);
                let ended = self.now + self.chance.random_range(20..STAGE_OVERLAP_MS);
                self.schedule_at(ended, SimulatedJobEvent::Ended { task, session });
            }
            self.restarting += 1;
            let started = later + self.chance.random_range(0..STAGE_OVERLAP_MS);
            self.schedule_at(started, SimulatedJobEvent::Restart { task });
        }
    }

    /// Makes the collectives of the other workers lose their peer.
    fn fail_peers_of(&mut self, lost: u32, generation: u64) {
        for (task, agent) in &mut self.agents {
            if *task != lost
                && let Some((of, until, code)) = &mut agent.working
                && *of == generation
            {
                let soon = self.now + self.chance.random_range(50..2_000);
                if soon < *until {
                    (*until, *code) = (soon, PEER_FAILURE_CODE);
                }
            }
        }
    }

    /// Takes an agent's next step.
    fn step_agent(&mut self, task: u32, session: u64) {
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
            // The connection is restored, and the agent registers its task again.
            self.parted.remove(&task);
            agent.registered = false;
        }
        let mut says = Vec::new();
        if !agent.registered {
            says.push(SimulatedAgentMessage::Register { attempt: agent.attempt });
        }
        if let Some((generation, until, code)) = agent.working
            && now >= until
        {
            agent.working = None;
            agent.ended = Some(SimulatedAgentMessage::Exited {
                generation,
                code,
                peer: code == PEER_FAILURE_CODE,
                stopped: false,
            });
            if code == 0 {
                self.good.entry(generation).or_default().insert(task);
            } else if code != PEER_FAILURE_CODE {
                self.blamable.insert(task);
                self.failures.insert(task);
                self.fail_peers_of(task, generation);
            }
        }
        let Some(agent) = self.agents.get_mut(&task) else { return };
        says.extend(agent.ended.clone());
        if now >= agent.beaten + HEARTBEAT_INTERVAL_MS {
            agent.beaten = now;
            says.push(SimulatedAgentMessage::Beat);
        }
        for said in says {
            self.send_to_registrar(task, session, said);
        }
        self.schedule_at(now + AGENT_STEP_MS, SimulatedJobEvent::Agent { task, session });
    }

    fn receive_at_registrar(&mut self, task: u32, session: u64, what: SimulatedAgentMessage) {
        let (time, name) = (millis_to_duration(self.now), TaskId(task));
        let decisions = match what {
            SimulatedAgentMessage::Register { attempt } => {
                match self.job.register_task(
                    time,
                    name,
                    attempt,
                    session,
                    host_hash(if task.is_multiple_of(2) { "a" } else { "b" }),
                ) {
                    Ok((_, decisions)) => {
                        self.send_to_agent(task, session, SimulatedRegistrarMessage::Registered);
                        decisions
                    }
                    Err(_) => {
                        self.send_to_agent(task, session, SimulatedRegistrarMessage::Refused);
                        Vec::new()
                    }
                }
            }
            SimulatedAgentMessage::Beat => self
                .job
                .apply_membership_input(time, MembershipInput::Heartbeat { task: name, session }),
            SimulatedAgentMessage::Closed => self.job.apply_membership_input(
                time,
                MembershipInput::Disconnected { task: name, session },
            ),
            SimulatedAgentMessage::Exited { generation, code, peer, stopped } => {
                let exit = ExitReport {
                    kind: ExitKind::Code(code),
                    peer_error: peer,
                    stopped,
                    stderr_tail: Vec::new(),
                };
                let input = MembershipInput::Exited {
                    task: name,
                    generation: Generation(generation),
                    exit,
                };
                let decisions = self.job.apply_membership_input(time, input);
                // The answer to a failure is the verdict. So is the answer to a success, because a
                // lost task makes all tasks start again.
                decisions
            }
        };
        self.check_decisions(decisions);
        // Send the answer that the agent waits for as soon as possible, and again on each request.
        if let Some(running) = &self.job.running
            && running.member_sessions().any(|member| member == (name, session))
        {
            let generation = running.generation().0;
            let verdict = match self.verdicts.contains(&generation) {
                true => SimulatedRegistrarMessage::Stop { generation },
                false => SimulatedRegistrarMessage::Assigned { generation },
            };
            self.send_to_agent(task, session, verdict);
        }
    }

    fn receive_at_agent(&mut self, task: u32, session: u64, what: SimulatedRegistrarMessage) {
        let ends = self.now + self.chance.random_range(500..20_000);
        let code =
            i32::from(self.faults && self.now < NETWORK_HEALED_MS && self.chance.random_bool(0.03));
        let Some(agent) = self.agents.get_mut(&task).filter(|agent| agent.session == session)
        else {
            return;
        };
        match what {
            SimulatedRegistrarMessage::Registered => agent.registered = true,
            SimulatedRegistrarMessage::Assigned { generation }
                if agent.working.is_none() && agent.ended.is_none() && !agent.done =>
            {
                agent.working = Some((generation, ends, code));
            }
            SimulatedRegistrarMessage::Stop { generation } => {
                let mine = agent.working.is_some_and(|(of, ..)| of == generation)
                    || agent.working.is_none();
                if mine && !agent.done {
                    agent.working = None;
                    agent.ended = None;
                    agent.done = true;
                    if self.rejoins {
                        self.restart_agent(task);
                    } else {
                        self.restarting += 1;
                        self.schedule_at(
                            self.now + REREGISTER_DELAY_MS,
                            SimulatedJobEvent::LeftAlone { task, session },
                        );
                    }
                }
            }
            // Another attempt of the task has replaced this one, or the job is over.
            SimulatedRegistrarMessage::Refused => agent.done = true,
            SimulatedRegistrarMessage::Assigned { .. } => {}
        }
    }

    fn check_decisions(&mut self, decisions: Vec<MembershipDecision>) {
        for decision in decisions {
            match decision {
                MembershipDecision::Assigned { world } => {
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
                MembershipDecision::Stop { generation, verdict } => {
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
                        // The driver raises the worker's error, and nothing is restarted.
                        self.over = Some("failed");
                    }
                }
                MembershipDecision::Finished { generation } => {
                    let good = self.good.get(&generation.0).map_or(0, BTreeSet::len);
                    assert_eq!(good, self.job.options.tasks as usize, "SI-1: seed {}", self.seed);
                    self.over = Some("finished");
                }
                _ => {}
            }
        }
    }
}

fn millis_to_duration(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn host_hash(name: &str) -> HostHash {
    HostHash(name.into())
}

fn setting_from_env(name: &str, default: u64) -> u64 {
    farandole_config::environment_variable(name)
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

#[test]
fn jobs_over_a_bad_network_come_to_their_end_and_blame_no_task_wrongly() {
    let first = setting_from_env("FARANDOLE_SIMULATION_FIRST", 0);
    let count = setting_from_env("FARANDOLE_SIMULATION_SEEDS", 300);
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    let mut generations = 0;
    for seed in first..first + count {
        let (end, assigned) = JobSimulation::new(seed).run_to_end();
        *ends.entry(end).or_default() += 1;
        generations += assigned;
    }
    if count >= 100 {
        // Check that the histories had enough faults to be a useful test.
        assert!(ends["finished"] > count / 2 && ends["failed"] > 0, "{ends:?}");
        assert!(!ends.contains_key("timed out"), "SI-3: {ends:?}");
        assert!(generations > count + count / 4, "{generations} generations of {count} jobs");
    }
}

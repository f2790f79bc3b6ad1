// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The membership of a job: a pure state machine without clock, I/O, lock and async. The server
//! feeds it.
//!
//! Time is a `Duration` since the job began. Every decision carries its reason.
//!
//! ```text
//! register --> waiting --(all tasks wait)--> running generation --(all exit well)--> finished
//!    ^            |  agent gone: dropped           | failure, loss, newer attempt
//!    |            v                                v
//!    +------- registered again <----------- verdict: everybody stops
//! ```
//!
//! - `MB-1`: a generation is assigned when every task waits exactly once, and seats every task
//!   exactly once.
//! - `MB-2`: generations grow by one and are assigned at most once.
//! - `MB-3`: an attempt is replaced only by a higher one, also after it was lost; a repeated
//!   registration of one session changes nothing.
//! - `MB-4`: a generation gets at most one verdict; it names a task's own failure rather than a
//!   peer's error or a stopped worker whenever one was seen in time.
//! - `MB-5`: after an abort, or a finish, nothing is assigned.

pub(crate) mod elastic;
mod running;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId, TaskPlace, World, assign, assign_in_order};
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Verdict};
use running::Running;

/// The rules of the machine.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Tasks in the job.
    pub(crate) tasks: u32,
    /// Limits after which an agent counts as gone.
    pub(crate) liveness: Liveness,
    /// Time for which exits are collected after the first failure, before one is named the first.
    pub(crate) failure_grace: Duration,
    /// Whether a task's number is its rank, whichever host it is on.
    pub(crate) in_order: bool,
}

/// Limits after which an agent counts as gone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Liveness {
    /// Silence after which it is lost.
    pub(crate) heartbeat_timeout: Duration,
    /// Longest time in which an agent whose connection broke must return.
    pub(crate) disconnect_grace: Duration,
}

/// An event for the machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Input {
    /// An agent shows that it lives.
    Beat { task: TaskId, session: u64 },
    /// An agent's connection broke.
    Disconnected { task: TaskId, session: u64 },
    /// A worker ended.
    Exited { task: TaskId, generation: Generation, exit: Exit },
    /// The driver gives up.
    Abort { reason: String },
    /// Elastic jobs: the hosts that there are now, and their slots.
    Hosts(Vec<(String, u32)>),
    /// Elastic jobs: a worker could not be started.
    NotStarted { task: TaskId, reason: String },
    /// Elastic jobs: a worker wants to go at the next chance.
    Leaves { task: TaskId, reason: String },
    /// Time has passed.
    Tick,
}

/// A decision of the machine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decision {
    /// A task waits for its rank; whether an earlier start of it has waited until now.
    Registered { task: TaskId, session: u64, replaces: bool },
    /// A waiting task is gone; it may register again.
    Withdrawn { task: TaskId, reason: String },
    /// A generation begins. Seen from rank 0.
    Assigned { world: World },
    /// A running task's agent is gone.
    Lost { task: TaskId, reason: String },
    /// A generation is over, and its workers must end.
    Stop { generation: Generation, verdict: Verdict },
    /// The driver gave up: nothing will be assigned any more.
    Aborted { reason: String },
    /// All workers of a generation ended well: the job is done.
    Finished { generation: Generation },
    /// Elastic jobs: a worker is to be started.
    Start { task: TaskId, host: String },
    /// Elastic jobs: a worker is to be ended, or is held to be: it must not come back.
    End { task: TaskId, reason: String },
    /// Elastic jobs: a worker that waits for a world gets none, and may go.
    Dismissed { task: TaskId, reason: String },
    /// Elastic jobs: members of a world should ask for the next one, at their next chance.
    Changed { generation: Generation, removed: bool, added: bool },
    /// Elastic jobs: a world cannot continue; its members will ask for the next one.
    Broken { generation: Generation, verdict: Verdict },
}

/// The reason why a registration was turned down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("unknown task {task}: the job has tasks 0 to {last}")]
    UnknownTask { task: TaskId, last: u32 },
    #[error("task {task} has already registered with attempt {attempt} from another process")]
    Duplicate { task: TaskId, attempt: u64 },
    #[error(
        "task {task} has already registered with attempt {current}, attempt {attempt} is stale"
    )]
    Stale { task: TaskId, attempt: u64, current: u64 },
    #[error("the job was aborted: {reason}")]
    Aborted { reason: String },
    #[error("task {task} is not expected: the driver has not started it, or counts it as gone")]
    NotWanted { task: TaskId },
    #[error("task {task} is to leave the job")]
    Dismissed { task: TaskId },
    #[error("the job is done: all workers of generation {generation} ended well")]
    Finished { generation: Generation },
}

#[derive(Clone, Debug)]
struct Registration {
    attempt: u64,
    session: u64,
    host: HostHash,
    presence: Presence,
}

/// The last signs of life of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Presence {
    seen: Duration,
    disconnected: Option<Duration>,
}

#[derive(Clone, Debug)]
enum Phase {
    Open,
    Aborted { reason: String },
    Finished { generation: Generation },
}

/// Everything known about the job's tasks.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    options: Options,
    phase: Phase,
    generation: Generation,
    waiting: BTreeMap<TaskId, Registration>,
    running: Option<Running>,
    /// The highest attempt of each task so far: what an earlier start says comes too late.
    fences: BTreeMap<TaskId, u64>,
}

impl Presence {
    fn at(now: Duration) -> Self {
        Self { seen: now, disconnected: None }
    }

    /// Returns the reason why the agent counts as gone, if it does.
    fn gone(&self, now: Duration, liveness: &Liveness) -> Option<String> {
        let silent = now.saturating_sub(self.seen);
        if silent >= liveness.heartbeat_timeout {
            return Some(format!("its agent was silent for {:.1} s", silent.as_secs_f64()));
        }
        let since = self.disconnected?;
        (now.saturating_sub(since) >= liveness.disconnect_grace)
            .then(|| "its agent's connection closed".to_owned())
    }
}

impl Membership {
    /// Returns a job without registered agents.
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            phase: Phase::Open,
            generation: Generation(0),
            waiting: BTreeMap::new(),
            running: None,
            fences: BTreeMap::new(),
        }
    }

    /// Returns the latest assigned generation; 0 before the first.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Tasks that the next generation still needs, ascending.
    pub(crate) fn missing(&self) -> impl Iterator<Item = TaskId> + '_ {
        (0..self.options.tasks).map(TaskId).filter(|task| !self.waiting.contains_key(task))
    }

    /// Returns whether a start of a task waits or runs; no task is missed in a job that is over.
    pub(crate) fn knows(&self, task: TaskId, session: u64) -> bool {
        let waits = self.waiting.get(&task).is_some_and(|waiting| waiting.session == session);
        let runs = self.running.as_ref().is_some_and(|running| running.has(task, session));
        waits || runs || !matches!(self.phase, Phase::Open)
    }

    /// Takes a task in. The generation returned is the one it will be, or already is, part of.
    pub(crate) fn register(
        &mut self,
        now: Duration,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<(Generation, Vec<Decision>), Refusal> {
        self.admit(task)?;
        if let Some(running) = &mut self.running
            && let Some(member) = running.member(task)
        {
            if member.session == session {
                member.presence = Presence::at(now);
                return Ok((self.generation, Vec::new()));
            }
            newer(task, attempt, member.attempt)?;
        }
        if let Some(waiting) = self.waiting.get_mut(&task) {
            if waiting.session == session {
                waiting.presence = Presence::at(now);
                return Ok((Generation(self.generation.0 + 1), Vec::new()));
            }
            newer(task, attempt, waiting.attempt)?;
        }
        let fence = self.fences.entry(task).or_insert(attempt);
        if attempt < *fence {
            return Err(Refusal::Stale { task, attempt, current: *fence });
        }
        *fence = attempt;
        let replaces = self.waiting.contains_key(&task);
        let mut decisions = vec![Decision::Registered { task, session, replaces }];
        if let Some(running) = &mut self.running {
            let reason = format!("task {task} was started again, as attempt {attempt}");
            decisions.extend(running.stop(Verdict { reason, cause: None, retry: true }));
        }
        self.waiting
            .insert(task, Registration { attempt, session, host, presence: Presence::at(now) });
        decisions.extend(self.assign(now));
        let part_of =
            if self.waiting.is_empty() { self.generation.0 } else { self.generation.0 + 1 };
        Ok((Generation(part_of), decisions))
    }

    /// Takes an event and returns the actions that follow.
    pub(crate) fn observe(&mut self, now: Duration, input: Input) -> Vec<Decision> {
        match input {
            Input::Beat { task, session } => {
                // Nothing can follow from a sign of life; ten thousand agents give one each second.
                self.touch(task, session, |presence| *presence = Presence::at(now));
                return Vec::new();
            }
            Input::Disconnected { task, session } => {
                self.touch(task, session, |presence| presence.disconnected = Some(now));
            }
            Input::Exited { task, generation, exit } => {
                if let Some(running) = &mut self.running
                    && running.generation() == generation
                {
                    running.exited(now, task, exit);
                }
            }
            Input::Abort { reason } => return self.abort(reason),
            // Nothing of an elastic job comes here.
            Input::Hosts(_) | Input::NotStarted { .. } | Input::Leaves { .. } | Input::Tick => {}
        }
        self.settle(now)
    }

    fn admit(&self, task: TaskId) -> Result<(), Refusal> {
        match &self.phase {
            Phase::Aborted { reason } => return Err(Refusal::Aborted { reason: reason.clone() }),
            Phase::Finished { generation } => {
                return Err(Refusal::Finished { generation: *generation });
            }
            Phase::Open => {}
        }
        if task.0 >= self.options.tasks {
            return Err(Refusal::UnknownTask { task, last: self.options.tasks.saturating_sub(1) });
        }
        Ok(())
    }

    fn touch(&mut self, task: TaskId, session: u64, change: impl Fn(&mut Presence)) {
        if let Some(waiting) =
            self.waiting.get_mut(&task).filter(|waiting| waiting.session == session)
        {
            change(&mut waiting.presence);
        }
        if let Some(member) = self.running.as_mut().and_then(|running| running.member(task))
            && member.session == session
        {
            change(&mut member.presence);
        }
    }

    fn assign(&mut self, now: Duration) -> Option<Decision> {
        if self.waiting.len() < self.options.tasks as usize {
            return None;
        }
        let places: Vec<TaskPlace> = self
            .waiting
            .iter()
            .map(|(task, waiting)| TaskPlace { task: *task, host: waiting.host.clone() })
            .collect();
        let next = Generation(self.generation.0 + 1);
        let rule = if self.options.in_order { assign_in_order } else { assign };
        let world = rule(next, &places).ok()?;
        let members = std::mem::take(&mut self.waiting);
        self.generation = next;
        self.running = Some(Running::new(now, world.clone(), members));
        Some(Decision::Assigned { world })
    }

    fn abort(&mut self, reason: String) -> Vec<Decision> {
        if !matches!(self.phase, Phase::Open) {
            return Vec::new();
        }
        self.phase = Phase::Aborted { reason: reason.clone() };
        self.waiting.clear();
        let verdict = Verdict { reason: reason.clone(), cause: None, retry: false };
        let stop = self.running.as_mut().and_then(|running| running.stop(verdict));
        stop.into_iter().chain([Decision::Aborted { reason }]).collect()
    }

    fn settle(&mut self, now: Duration) -> Vec<Decision> {
        let mut decisions = Vec::new();
        if !matches!(self.phase, Phase::Open) {
            return decisions;
        }
        let options = &self.options;
        self.waiting.retain(|task, waiting| {
            match waiting.presence.gone_while_waiting(now, &options.liveness) {
                Some(reason) => {
                    decisions.push(Decision::Withdrawn { task: *task, reason });
                    false
                }
                None => true,
            }
        });
        if let Some(running) = &mut self.running {
            decisions.extend(running.settle(now, options));
            if running.is_finished() {
                let generation = running.generation();
                self.phase = Phase::Finished { generation };
                decisions.push(Decision::Finished { generation });
            }
        }
        decisions
    }
}

impl Presence {
    /// Nothing runs yet, so a closed connection is enough: the task may simply register again.
    fn gone_while_waiting(&self, now: Duration, liveness: &Liveness) -> Option<String> {
        match self.disconnected {
            Some(_) => Some("its agent's connection closed".to_owned()),
            None => self.gone(now, liveness),
        }
    }
}

fn newer(task: TaskId, attempt: u64, current: u64) -> Result<(), Refusal> {
    match attempt.cmp(&current) {
        std::cmp::Ordering::Less => Err(Refusal::Stale { task, attempt, current }),
        std::cmp::Ordering::Equal => Err(Refusal::Duplicate { task, attempt }),
        std::cmp::Ordering::Greater => Ok(()),
    }
}

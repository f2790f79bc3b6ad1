// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Members of an elastic job: a pure state machine like [`Membership`](super::Membership), whose
//! workers come and go.
//!
//! ```text
//! hosts --> Start --> starting --> importing --> ready --> working --> done
//!              register()      ready()     ^  Assigned |      |
//!                                          '-----------'      '--> lost, failed: the world is broken, the others
//!                                     ready(after) again           become ready again and form the next one
//! ```
//!
//! A worker has a task number of its own, which is never used again. It is *ready* once its
//! `init()` was called; until then no member waits for it. A world is *broken* as soon as a member
//! is lost, fails, or asks for the next world.
//!
//! - `EL-1`: a world has `least` to `most` members, each ready, each once; only a world whose
//!   function has returned on some rank may continue with fewer.
//! - `EL-2`: the next world is formed when every member of the broken one is ready again, done, or
//!   gone.
//! - `EL-3`: rank 0 is a member of the world before, where one of them is left; members keep their
//!   ranks where they can.
//! - `EL-4`: the job finishes when the function has returned on every rank of the present world,
//!   and only then.
//! - `EL-5`: a worker that was dismissed, or leaves, is no failure; a host whose worker failed gets
//!   no new one until it has cooled down, nor does one whose worker has said by itself that it
//!   leaves, for the shortest cooldown.
//! - `EL-6`: a job that cannot continue ends within `timeout`, with a reason that says what was
//!   missing.
//! - `EL-7`: repeating the steps that changed something makes the same machine: a registrar that
//!   starts again continues where it was, and loses no worker that shows within the usual time that
//!   it lives.

#[cfg(test)]
mod costs;
mod forming;
mod hosts;
mod losses;
mod places;
mod seats;
#[cfg(test)]
mod simulation;
mod steps;
#[cfg(test)]
mod tests;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId, World, assign_as_listed};
use serde::{Deserialize, Serialize};

use super::{Decision, Input, Liveness, Presence, Refusal};
use crate::exit::Verdict;
use hosts::Hosts;
pub(crate) use steps::{Step, What};
use world::{Present, Why};

/// The rules of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rules {
    /// Workers that the first world waits for.
    pub(crate) first: u32,
    /// Fewest workers of a world.
    pub(crate) least: u32,
    /// Most workers of a world.
    pub(crate) most: u32,
    /// Workers beyond `most` that wait, ready to take a place.
    pub(crate) spares: u32,
    /// Longest wait of a job for workers.
    pub(crate) timeout: Duration,
    /// Worlds after the first that may be formed.
    pub(crate) reset_limit: Option<u32>,
    /// Shortest and longest time without a new worker on a host where one has failed.
    pub(crate) cooldown: (Duration, Duration),
    /// Longest time between the start of a worker and the registration of its agent.
    pub(crate) start_timeout: Duration,
    /// Limits after which an agent counts as gone.
    pub(crate) liveness: Liveness,
}

/// Longest time in which a member that others have lost must show that it lives, by asking for the
/// next world.
const SUSPECTED: Duration = Duration::from_millis(500);
/// Longest time in which a dismissed worker must leave.
const LEAVING: Duration = Duration::from_secs(60);
/// Time for which the first world waits for workers beyond those it needs.
const SETTLING: Duration = Duration::from_secs(3);
/// The reason why the last workers end.
const DONE: &str = "the job is done";
/// Worlds in a row in which two members lose each other, and no other fails, until one of them is
/// dismissed.
const QUARRELS: u32 = 2;

/// A worker that was started and has not ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Worker {
    /// The host it was started on; empty where it came by itself.
    host: String,
    place: Option<HostHash>,
    session: Option<u64>,
    presence: Presence,
    stage: Stage,
    /// Since when it is to go, and why.
    dismissed: Option<(Duration, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    /// Its agent has not registered.
    Starting,
    /// It runs and has not called `init`.
    Importing,
    /// It waits for a world after `after`.
    Ready { after: Generation, since: Duration, suspects: BTreeSet<TaskId> },
    /// It is in the present world.
    Working,
    /// It ended well in the present world.
    Done,
    /// It was dismissed, and ends.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Phase {
    Open,
    Aborted { reason: String },
    Finished { generation: Generation },
}

/// Everything known about an elastic job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Elastic {
    rules: Rules,
    phase: Phase,
    generation: Generation,
    hosts: Hosts,
    workers: BTreeMap<TaskId, Worker>,
    next: u32,
    /// Workers that came by themselves, gone ones included.
    came: BTreeSet<TaskId>,
    present: Option<Present>,
    /// The time at which the job began.
    began: Duration,
    /// Since when enough workers were ready for the first world.
    enough_since: Option<Duration>,
    /// The reason why the last worker was lost: what a job that ends for lack of workers says.
    last_loss: Option<String>,
    /// After a restart: until when workers that others have lost may connect again.
    returning_until: Duration,
    #[serde(with = "steps::pairs")]
    quarrels: BTreeMap<(TaskId, TaskId), u32>,
    /// Once the job is over: workers whose ends are not reported yet, and their hosts. They may not
    /// know that it is.
    unheard: BTreeMap<TaskId, String>,
    /// Whether the present step has changed something that its decisions do not tell.
    #[serde(skip)]
    changed: bool,
    /// The tasks that the last step gave up for their silence. Signs of life are in no journal, so
    /// a step has them.
    #[serde(skip)]
    losses: Vec<(TaskId, String)>,
    /// The same, of a step that is repeated.
    #[serde(skip)]
    repeated: Option<Vec<(TaskId, String)>>,
}

impl Elastic {
    /// Returns a job without workers.
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            hosts: Hosts::new(rules.cooldown),
            rules,
            phase: Phase::Open,
            generation: Generation(0),
            workers: BTreeMap::new(),
            next: 0,
            came: BTreeSet::new(),
            present: None,
            began: Duration::ZERO,
            enough_since: None,
            last_loss: None,
            returning_until: Duration::ZERO,
            quarrels: BTreeMap::new(),
            unheard: BTreeMap::new(),
            changed: false,
            losses: Vec::new(),
            repeated: None,
        }
    }

    /// Returns the latest world; 0 before the first.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the present world, seen from rank 0.
    pub(crate) fn world(&self) -> Option<World> {
        assign_as_listed(self.generation, &self.present.as_ref()?.places).ok()
    }

    /// Workers that have not called `init` yet, ascending.
    pub(crate) fn missing(&self) -> impl Iterator<Item = TaskId> + '_ {
        let missing = |worker: &Worker| matches!(worker.stage, Stage::Starting | Stage::Importing);
        self.workers.iter().filter(move |(_, worker)| missing(worker)).map(|(task, _)| *task)
    }

    /// Takes an agent in. Repeating it changes nothing.
    pub(crate) fn register(
        &mut self,
        now: Duration,
        task: TaskId,
        session: u64,
        place: HostHash,
    ) -> Result<Vec<Decision>, Refusal> {
        self.admit()?;
        if !self.workers.contains_key(&task) {
            if self.hosts.are_known() || !self.came.insert(task) {
                return Err(Refusal::NotWanted { task });
            }
            self.workers.insert(task, Worker::started(String::new(), now));
        }
        let Some(worker) = self.workers.get_mut(&task) else {
            return Err(Refusal::NotWanted { task });
        };
        if worker.session.is_some_and(|known| known != session) {
            return Err(Refusal::Duplicate { task, attempt: 0 });
        }
        worker.presence = Presence::at(now);
        if worker.stage != Stage::Starting {
            return Ok(Vec::new());
        }
        worker.session = Some(session);
        worker.place = Some(place);
        worker.stage = Stage::Importing;
        Ok(vec![Decision::Registered { task, session, replaces: false }])
    }

    /// A worker asks for a world after `after`, and names the lost members of that world.
    pub(crate) fn ready(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<Vec<Decision>, Refusal> {
        self.admit()?;
        let generation = self.generation;
        let Some(worker) = self.workers.get_mut(&task) else {
            return Err(Refusal::Dismissed { task });
        };
        match &mut worker.stage {
            Stage::Done | Stage::Starting => return Err(Refusal::NotWanted { task }),
            Stage::Leaving => return Err(Refusal::Dismissed { task }),
            // It asks again for what it has been given.
            Stage::Working if after < generation => return Ok(Vec::new()),
            Stage::Ready { suspects: known, .. } => {
                self.changed |= !suspects.is_subset(known);
                known.extend(suspects);
            }
            Stage::Importing | Stage::Working => {
                self.changed = true;
                worker.stage = Stage::Ready { after, since: now, suspects };
                if let Some(present) = &mut self.present
                    && let Some(rank) = present.rank(task)
                {
                    present.break_up(now, format!("rank {rank} asked for the next world"));
                }
            }
        }
        // Of thousands that ask, most are followed by nothing: time settles the rest.
        let decisions = if self.may_follow(task) { self.settle(now) } else { Vec::new() };
        let leaving = self.workers.get(&task).is_none_or(|worker| worker.stage == Stage::Leaving);
        if leaving && decisions.is_empty() {
            Err(Refusal::Dismissed { task })
        } else {
            Ok(decisions)
        }
    }

    /// Takes an event and returns the actions that follow.
    pub(crate) fn observe(&mut self, now: Duration, input: Input) -> Vec<Decision> {
        let mut decisions = Vec::new();
        match input {
            Input::Beat { task, session } => {
                self.touch(task, session, |presence| *presence = Presence::at(now));
                return decisions;
            }
            Input::Disconnected { task, session } => {
                self.touch(task, session, |presence| presence.disconnected = Some(now));
                // It may come back for a while.
                return decisions;
            }
            Input::Exited { task, exit, .. } => self.exited(now, task, &exit, &mut decisions),
            Input::Hosts(hosts) => self.hosts.discovered(hosts),
            Input::NotStarted { task, reason } => {
                // The connection that started it may have broken, while the worker lives on.
                decisions.push(Decision::End { task, reason: reason.clone() });
                self.lose(now, task, Why::Lost(reason), &mut decisions);
            }
            Input::Leaves { task, reason } => {
                if let Some(worker) = self.workers.get(&task) {
                    self.hosts.rests(now, &worker.host);
                }
                self.dismiss(now, task, reason);
            }
            Input::Abort { reason } => {
                self.abort(reason, None, &mut decisions);
                return decisions;
            }
            Input::Tick => {}
        }
        decisions.extend(self.settle(now));
        decisions
    }

    fn admit(&self) -> Result<(), Refusal> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Aborted { reason } => Err(Refusal::Aborted { reason: reason.clone() }),
            Phase::Finished { generation } => Err(Refusal::Finished { generation: *generation }),
        }
    }

    fn touch(&mut self, task: TaskId, session: u64, change: impl Fn(&mut Presence)) {
        if let Some(worker) =
            self.workers.get_mut(&task).filter(|worker| worker.session == Some(session))
        {
            change(&mut worker.presence);
        }
    }

    fn abort(&mut self, reason: String, cause: Option<TaskId>, decisions: &mut Vec<Decision>) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        self.phase = Phase::Aborted { reason: reason.clone() };
        self.disband();
        if self.generation.0 > 0 {
            let verdict = Verdict { reason: reason.clone(), cause, retry: false };
            decisions.push(Decision::Stop { generation: self.generation, verdict });
        }
        decisions.push(Decision::Aborted { reason });
    }

    /// The job is over. Workers whose agents have registered are to hear of it, those that have
    /// ended well excepted.
    fn disband(&mut self) {
        for (task, worker) in std::mem::take(&mut self.workers) {
            if !matches!(worker.stage, Stage::Starting | Stage::Done) {
                self.unheard.insert(task, worker.host);
            }
        }
    }

    fn settle(&mut self, now: Duration) -> Vec<Decision> {
        let mut decisions = Vec::new();
        if !matches!(self.phase, Phase::Open) {
            return decisions;
        }
        self.look_for_losses(now, &mut decisions);
        self.look_for_suspects(now, &mut decisions);
        self.plan(now, &mut decisions);
        self.dismiss_ready(now, &mut decisions);
        if !matches!(self.phase, Phase::Open) {
            return decisions;
        }
        self.conclude(now, &mut decisions);
        if matches!(self.phase, Phase::Open) {
            self.tell_changes(&mut decisions);
        }
        decisions
    }

    fn stage(&self, task: TaskId) -> Option<&Stage> {
        self.workers.get(&task).map(|worker| &worker.stage)
    }
}

impl Worker {
    fn started(host: String, now: Duration) -> Self {
        Self {
            host,
            place: None,
            session: None,
            presence: Presence::at(now),
            stage: Stage::Starting,
            dismissed: None,
        }
    }

    fn named(&self) -> &str {
        match &self.place {
            _ if !self.host.is_empty() => &self.host,
            Some(place) => &place.0,
            None => "an unknown host",
        }
    }
}

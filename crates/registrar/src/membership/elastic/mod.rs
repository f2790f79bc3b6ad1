// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Who is in an elastic job: a pure state machine like [`Membership`](super::Membership), whose workers come and go.
//!
//! ```text
//! hosts --> Start --> starting --> importing --> ready --> working --> done
//!              register()      ready()     ^  Assigned |      |
//!                                          '-----------'      '--> lost, failed: the world is broken, the others
//!                                     ready(after) again           become ready again and form the next one
//! ```
//!
//! A worker has a task number of its own, which is never used again. It is *ready* once its `init()` was called; until
//! then nobody waits for it. A world is *broken* as soon as a member is lost, fails, or asks for the next world.
//!
//! - `EL-1`: a world has `least` to `most` members, each ready, each once; only a world whose function has returned on
//!   some rank may go on with fewer.
//! - `EL-2`: the next world is formed when every member of the broken one is ready again, done, or gone.
//! - `EL-3`: rank 0 is a member of the world before, where one of them is left; members keep their ranks where they can.
//! - `EL-4`: the job finishes when the function has returned on every rank of the present world, and only then.
//! - `EL-5`: a worker that was dismissed, or leaves, is no failure; a host whose worker failed gets no new one until it
//!   has cooled down, nor does one whose worker has said by itself that it leaves, for the shortest cooldown.
//! - `EL-6`: a job that cannot go on ends within `timeout`, with a reason that says what was missing.

mod hosts;
mod seats;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId, TaskPlace, assign_as_listed};

use super::{Decision, Input, Liveness, Presence, Refusal};
use crate::exit::{Exit, Verdict};
use hosts::Hosts;
use world::{Present, Why};

/// What the machine goes by.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// Workers that the first world waits for.
    pub(crate) first: u32,
    /// Fewest workers of a world.
    pub(crate) least: u32,
    /// Most workers of a world.
    pub(crate) most: u32,
    /// Workers beyond `most` that wait, ready to take a place.
    pub(crate) spares: u32,
    /// How long a job may wait for workers.
    pub(crate) timeout: Duration,
    /// Worlds after the first that may be formed.
    pub(crate) reset_limit: Option<u32>,
    /// Shortest and longest time without a new worker on a host where one has failed.
    pub(crate) cooldown: (Duration, Duration),
    /// How long a worker may take from its start until its agent has registered.
    pub(crate) start_timeout: Duration,
    /// When an agent counts as gone.
    pub(crate) liveness: Liveness,
}

/// How long a member that others have lost may take to show that it lives, by asking for the next world.
const SUSPECTED: Duration = Duration::from_millis(500);
/// How long a dismissed worker may take to leave.
const LEAVING: Duration = Duration::from_secs(60);
/// How long the first world waits for workers beyond those it needs.
const SETTLING: Duration = Duration::from_secs(3);
/// Worlds in a row in which two members lose each other, and nobody else fails, until one of them has to go.
const QUARRELS: u32 = 2;

/// A worker that was started and has not ended.
#[derive(Clone, Debug)]
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

#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// It was told to go, and ends.
    Leaving,
}

#[derive(Clone, Debug)]
enum Phase {
    Open,
    Aborted { reason: String },
    Finished { generation: Generation },
}

/// Everything known about an elastic job.
#[derive(Clone, Debug)]
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
    /// When the job began.
    began: Duration,
    /// Since when enough workers were ready for the first world.
    enough_since: Option<Duration>,
    /// Why the last worker was lost: what a job that ends for lack of workers says.
    last_loss: Option<String>,
    quarrels: BTreeMap<(TaskId, TaskId), u32>,
}

impl Elastic {
    /// A job without workers.
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
            quarrels: BTreeMap::new(),
        }
    }

    /// The latest world; 0 before the first.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
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
        let Some(worker) = self.workers.get_mut(&task) else { return Err(Refusal::NotWanted { task }) };
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

    /// A worker asks for a world after `after`, and names the members of that one whom it has lost.
    pub(crate) fn ready(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<Vec<Decision>, Refusal> {
        self.admit()?;
        let generation = self.generation;
        let Some(worker) = self.workers.get_mut(&task) else { return Err(Refusal::Dismissed { task }) };
        match &mut worker.stage {
            Stage::Done | Stage::Starting => return Err(Refusal::NotWanted { task }),
            Stage::Leaving => return Err(Refusal::Dismissed { task }),
            // It asks again for what it has been given.
            Stage::Working if after < generation => return Ok(Vec::new()),
            Stage::Ready { suspects: known, .. } => known.extend(suspects),
            Stage::Importing | Stage::Working => {
                worker.stage = Stage::Ready { after, since: now, suspects };
                if let Some(present) = &mut self.present
                    && let Some(rank) = present.rank(task)
                {
                    present.break_up(now, format!("rank {rank} asked for the next world"));
                }
            }
        }
        let decisions = self.settle(now);
        let leaving = self.workers.get(&task).is_none_or(|worker| worker.stage == Stage::Leaving);
        if leaving && decisions.is_empty() { Err(Refusal::Dismissed { task }) } else { Ok(decisions) }
    }

    /// Takes in what happened and returns what follows.
    pub(crate) fn observe(&mut self, now: Duration, input: Input) -> Vec<Decision> {
        let mut decisions = Vec::new();
        match input {
            Input::Beat { task, session } => {
                self.touch(task, session, |presence| *presence = Presence::at(now));
                return decisions;
            }
            Input::Disconnected { task, session } => {
                self.touch(task, session, |presence| presence.disconnected = Some(now));
            }
            Input::Exited { task, exit, .. } => self.exited(now, task, &exit, &mut decisions),
            Input::Hosts(hosts) => self.hosts.discovered(hosts),
            Input::NotStarted { task, reason } => self.lose(now, task, Why::Lost(reason), &mut decisions),
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
        if let Some(worker) = self.workers.get_mut(&task).filter(|worker| worker.session == Some(session)) {
            change(&mut worker.presence);
        }
    }

    /// A worker has ended by itself, or because its agent was told to end it.
    fn exited(&mut self, now: Duration, task: TaskId, exit: &Exit, decisions: &mut Vec<Decision>) {
        let Some(worker) = self.workers.get_mut(&task) else { return };
        let member = self.present.as_ref().is_some_and(|present| present.rank(task).is_some());
        if worker.stage == Stage::Done {
            return;
        }
        if worker.stage == Stage::Leaving || worker.dismissed.is_some() || exit.stopped {
            self.leave(now, task);
        } else if !exit.how.is_success() {
            self.lose(now, task, Why::of(exit), decisions);
        } else if member && worker.stage == Stage::Working {
            worker.stage = Stage::Done;
        } else if matches!(worker.stage, Stage::Starting | Stage::Importing) {
            // A program that never asks for a world would be started again for ever.
            self.lose(now, task, Why::Own("ended before it called init()".to_owned()), decisions);
        } else {
            self.leave(now, task);
        }
    }

    /// A worker is gone, and that is nobody's failure.
    fn leave(&mut self, now: Duration, task: TaskId) {
        self.workers.remove(&task);
        if let Some(present) = &mut self.present
            && let Some(rank) = present.rank(task)
        {
            present.break_up(now, format!("rank {rank} left"));
        }
    }

    /// A worker is gone, and its host is to blame, unless the worker was to go anyway.
    fn lose(&mut self, now: Duration, task: TaskId, why: Why, decisions: &mut Vec<Decision>) {
        let Some(worker) = self.workers.get(&task) else { return };
        if worker.dismissed.is_some() {
            return self.leave(now, task);
        }
        let reason = why.sentence().to_owned();
        let began = worker.stage != Stage::Starting && worker.stage != Stage::Importing;
        let rank = self.present.as_ref().and_then(|present| present.rank(task));
        let host = worker.host.clone();
        let named = match rank {
            Some(rank) => format!("rank {rank} on {} {reason}", worker.named()),
            None => format!("worker {task} on {} {reason}", worker.named()),
        };
        self.workers.remove(&task);
        self.hosts.failed(now, &host);
        self.last_loss = Some(named.clone());
        decisions.push(Decision::Lost { task, reason: reason.clone() });
        if let (Some(present), Some(_)) = (&mut self.present, rank) {
            present.failed(now, task, named, &why);
        } else if self.present.is_none() && !began && matches!(why, Why::Own(_)) {
            self.abort(named, Some(task), decisions);
        }
    }

    /// Has a worker go at the next chance.
    fn dismiss(&mut self, now: Duration, task: TaskId, reason: String) {
        if let Some(worker) = self.workers.get_mut(&task).filter(|worker| worker.stage != Stage::Done) {
            worker.dismissed.get_or_insert((now, reason));
        }
    }

    fn abort(&mut self, reason: String, cause: Option<TaskId>, decisions: &mut Vec<Decision>) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        self.phase = Phase::Aborted { reason: reason.clone() };
        self.workers.clear();
        if self.generation.0 > 0 {
            let verdict = Verdict { reason: reason.clone(), cause, retry: false };
            decisions.push(Decision::Stop { generation: self.generation, verdict });
        }
        decisions.push(Decision::Aborted { reason });
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

    fn look_for_losses(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let rules = &self.rules;
        let gone: Vec<(TaskId, String)> = self
            .workers
            .iter()
            .filter_map(|(task, worker)| {
                let reason = match worker.stage {
                    Stage::Done => None,
                    Stage::Starting => (now.saturating_sub(worker.presence.seen) >= rules.start_timeout)
                        .then(|| format!("did not register within {:.1?}", rules.start_timeout)),
                    _ => {
                        worker.presence.gone(now, &rules.liveness).map(|reason| format!("was lost: {reason}"))
                    }
                };
                Some((*task, reason?))
            })
            .collect();
        for (task, reason) in gone {
            // Whatever it still is: it must not come back.
            decisions.push(Decision::End { task, reason: reason.clone() });
            self.lose(now, task, Why::Lost(reason), decisions);
        }
    }

    /// Members that others have lost, and that do not ask for the next world themselves, are out.
    fn look_for_suspects(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let Some(present) = &self.present else { return };
        let mut expelled = BTreeSet::new();
        for member in &present.order {
            let Some(Stage::Ready { after, since, suspects }) =
                self.workers.get(member).map(|worker| &worker.stage)
            else {
                continue;
            };
            if *after == self.generation && now.saturating_sub(*since) >= SUSPECTED {
                let silent = |task: &&TaskId| {
                    present.rank(**task).is_some()
                        && self.workers.get(task).is_some_and(|worker| worker.stage == Stage::Working)
                };
                expelled.extend(suspects.iter().filter(silent).copied());
            }
        }
        for task in expelled {
            let reason = "fell silent: its peers lost it".to_owned();
            decisions.push(Decision::End { task, reason: reason.clone() });
            self.lose(now, task, Why::Lost(reason), decisions);
        }
    }

    /// Starts workers where there is room, and has those go for whom there is none.
    fn plan(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        if !self.hosts.are_known() {
            return;
        }
        let rank = |task: &TaskId| self.present.as_ref().and_then(|present| present.rank(*task));
        // Those without a rank go first, then the highest.
        let mut living: Vec<(TaskId, String)> = self
            .workers
            .iter()
            .filter(|(_, worker)| worker.dismissed.is_none() && worker.stage != Stage::Done)
            .map(|(task, worker)| (*task, worker.host.clone()))
            .collect();
        living.sort_by_key(|(task, _)| (rank(task).is_none(), rank(task), *task));
        for (task, reason) in self.hosts.surplus(&living) {
            self.dismiss(now, task, reason);
            living.retain(|(other, _)| *other != task);
        }
        if self.present.as_ref().is_some_and(|present| self.has_done(present)) {
            return;
        }
        let wanted =
            (self.rules.most.saturating_add(self.rules.spares) as usize).saturating_sub(living.len());
        for host in self.hosts.vacancies(now, &living).into_iter().take(wanted) {
            let task = TaskId(self.next);
            self.next += 1;
            self.workers.insert(task, Worker::started(host.clone(), now));
            decisions.push(Decision::Start { task, host });
        }
    }

    /// Dismissed workers that are not at work may go now; those that take too long are ended.
    fn dismiss_ready(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let mut ended = Vec::new();
        for (task, worker) in &mut self.workers {
            let Some((since, reason)) = &worker.dismissed else { continue };
            let late = now.saturating_sub(*since) >= LEAVING;
            match worker.stage {
                Stage::Ready { .. } => {
                    worker.stage = Stage::Leaving;
                    decisions.push(Decision::Dismissed { task: *task, reason: reason.clone() });
                }
                Stage::Starting | Stage::Importing => ended.push((*task, reason.clone())),
                Stage::Working | Stage::Leaving if late => ended.push((*task, reason.clone())),
                _ => {}
            }
        }
        for (task, reason) in ended {
            self.leave(now, task);
            decisions.push(Decision::End { task, reason });
        }
    }

    /// Whether the function has returned on some rank.
    fn has_done(&self, present: &Present) -> bool {
        present.finishing || present.order.iter().any(|task| self.stage(*task) == Some(&Stage::Done))
    }

    fn stage(&self, task: TaskId) -> Option<&Stage> {
        self.workers.get(&task).map(|worker| &worker.stage)
    }

    /// Members of the present world that are neither done nor gone nor about to go, by rank.
    fn survivors(&self, present: &Present) -> Vec<TaskId> {
        let there = |task: &TaskId| {
            self.stage(*task).is_some_and(|stage| !matches!(stage, Stage::Done | Stage::Leaving))
        };
        present.order.iter().copied().filter(there).collect()
    }

    /// Ready workers that are in no world, in the order of their start.
    fn newcomers(&self) -> Vec<TaskId> {
        let member =
            |task: &TaskId| self.present.as_ref().is_some_and(|present| present.rank(*task).is_some());
        self.workers
            .iter()
            .filter(|(task, worker)| matches!(worker.stage, Stage::Ready { .. }) && !member(task))
            .map(|(task, _)| *task)
            .collect()
    }

    /// The job is done, or hopeless, or a world can be formed; or nothing can be said yet.
    fn conclude(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let Some(present) = &self.present else { return self.fresh_world(now, self.began, decisions) };
        let survivors = self.survivors(present);
        let done = self.has_done(present);
        let unbroken = present.broken.is_none();
        if done && survivors.is_empty() && present.failures.is_empty() {
            self.phase = Phase::Finished { generation: self.generation };
            for (task, worker) in std::mem::take(&mut self.workers) {
                if worker.stage != Stage::Done {
                    decisions.push(Decision::End { task, reason: "the job is done".to_owned() });
                }
            }
            decisions.push(Decision::Finished { generation: self.generation });
            return;
        }
        if unbroken || survivors.iter().any(|task| self.stage(*task) == Some(&Stage::Working)) {
            return;
        }
        if survivors.is_empty()
            && let Some((task, reason)) = present.hopeless(done)
        {
            return self.abort(reason, Some(task), decisions);
        }
        let broken_at = present.broken.as_ref().map_or(now, |broken| broken.0);
        if survivors.is_empty() && !done {
            return self.fresh_world(now, broken_at, decisions);
        }
        let calm = present.failures.is_empty();
        let mut members = survivors.clone();
        if !done {
            let room = (self.rules.most as usize).saturating_sub(members.len());
            members.extend(self.newcomers().into_iter().take(room));
        }
        if members.len() >= self.rules.least as usize || done {
            if calm && let Some(task) = self.quarrel(&survivors) {
                let reason = "cannot be reached by its peers".to_owned();
                decisions.push(Decision::End { task, reason: reason.clone() });
                return self.lose(now, task, Why::Lost(reason), decisions);
            }
            return self.assign(now, &survivors, members, decisions);
        }
        self.wait_or_give_up(now, broken_at, members.len(), decisions);
    }

    /// A world of which nobody has been in another one.
    fn fresh_world(&mut self, now: Duration, since: Duration, decisions: &mut Vec<Decision>) {
        let mut ready = self.newcomers();
        ready.truncate(self.rules.most as usize);
        let late = now.saturating_sub(since) >= self.rules.timeout;
        if ready.len() >= self.rules.first as usize {
            let enough = *self.enough_since.get_or_insert(now);
            let full = ready.len() == self.rules.most as usize || self.missing().next().is_none();
            if full || now.saturating_sub(enough) >= SETTLING {
                self.assign(now, &[], ready, decisions);
            }
        } else if late && ready.len() >= self.rules.least as usize {
            self.assign(now, &[], ready, decisions);
        } else {
            self.enough_since = None;
            self.wait_or_give_up(now, since, ready.len(), decisions);
        }
    }

    fn wait_or_give_up(
        &mut self,
        now: Duration,
        since: Duration,
        ready: usize,
        decisions: &mut Vec<Decision>,
    ) {
        if now.saturating_sub(since) < self.rules.timeout {
            return;
        }
        let least = self.rules.least;
        let last =
            self.last_loss.as_ref().map_or_else(String::new, |loss| format!("; the last loss: {loss}"));
        let reason = format!(
            "timed out after {:.1?} waiting for a world of at least {least} workers: {ready} ready, slots now: {}{last}",
            self.rules.timeout,
            self.hosts.describe(now),
        );
        self.abort(reason, None, decisions);
    }

    /// Two survivors that keep losing each other while nobody else fails: the one of the higher rank, once that has
    /// happened often enough.
    fn quarrel(&mut self, survivors: &[TaskId]) -> Option<TaskId> {
        let mut pairs = BTreeSet::new();
        for (rank, one) in survivors.iter().enumerate() {
            for other in &survivors[rank + 1..] {
                let lost = |from: TaskId, whom: TaskId| match self.stage(from) {
                    Some(Stage::Ready { suspects, .. }) => suspects.contains(&whom),
                    _ => false,
                };
                if lost(*one, *other) || lost(*other, *one) {
                    pairs.insert((*one, *other));
                }
            }
        }
        self.quarrels.retain(|pair, _| pairs.contains(pair));
        for pair in pairs {
            *self.quarrels.entry(pair).or_default() += 1;
        }
        let (_, out) = *self.quarrels.iter().find(|(_, times)| **times > QUARRELS)?.0;
        self.quarrels.retain(|(one, other), _| *one != out && *other != out);
        Some(out)
    }

    fn assign(
        &mut self,
        now: Duration,
        survivors: &[TaskId],
        members: Vec<TaskId>,
        decisions: &mut Vec<Decision>,
    ) {
        if let Some(limit) = self.rules.reset_limit
            && self.generation.0 > u64::from(limit)
        {
            let reason = format!(
                "Farandole was shut down because the number of resets during the elastic job exceeded the limit: {limit}"
            );
            return self.abort(reason, None, decisions);
        }
        let finishing = self.present.as_ref().is_some_and(|present| self.has_done(present));
        let old: &[TaskId] = self.present.as_ref().map_or(&[], |present| &present.order);
        let order = seats::order(old, survivors, &members[survivors.len()..], |task| {
            self.workers.get(&task).and_then(|worker| worker.place.clone())
        });
        let place = |task: &TaskId| {
            let host = self.workers.get(task)?.place.clone()?;
            Some(TaskPlace { task: *task, host })
        };
        let places: Vec<TaskPlace> = order.iter().filter_map(place).collect();
        let next = Generation(self.generation.0 + 1);
        let Ok(world) = assign_as_listed(next, &places) else { return };
        for task in &order {
            if let Some(worker) = self.workers.get_mut(task) {
                worker.stage = Stage::Working;
                worker.presence = Presence { seen: now, ..worker.presence };
            }
        }
        self.generation = next;
        self.enough_since = None;
        // Those that were done in the world before have ended.
        self.workers.retain(|_, worker| worker.stage != Stage::Done);
        self.present = Some(Present::new(order, finishing));
        decisions.push(Decision::Assigned { world });
    }

    /// Tells the members of a world at work when another one should follow.
    fn tell_changes(&mut self, decisions: &mut Vec<Decision>) {
        let Some(present) = &self.present else { return };
        if present.broken.is_some() {
            if let Some(present) = &mut self.present
                && let Some(reason) = present.tell_broken()
            {
                let verdict = Verdict { reason, cause: None, retry: true };
                decisions.push(Decision::Broken { generation: self.generation, verdict });
            }
            return;
        }
        if self.has_done(present) {
            return;
        }
        let going = |task: &TaskId| self.workers.get(task).is_some_and(|worker| worker.dismissed.is_some());
        let removed = present.order.iter().any(going);
        let staying = present.order.iter().filter(|task| !going(task)).count();
        let added = staying < self.rules.most as usize && !self.newcomers().is_empty();
        let generation = self.generation;
        if let Some(present) = &mut self.present
            && present.tell(removed, added)
        {
            decisions.push(Decision::Changed { generation, removed, added });
        }
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

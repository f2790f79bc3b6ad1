// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The job's state behind its locks, and the effects of what `membership` decides.
//!
//! Lock order: the turn to carry out decisions, then membership, then the clock, then the reported
//! state, then board, then events; or the turn, then key-values, then meetings. The journal is
//! locked last, and never with membership locked.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole_telemetry::{Drained, Ring};
use farandole_world::{Generation, HostHash, JobId, Rank, TaskId, World};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::board::Board;
use super::clock::Clock;
use super::kept::{Kept, Resumed};
use super::members::Members;
use super::{Elastic, Options};
use crate::event::Event;
use crate::exit::Exit;
use crate::journal::Journal;
use crate::kv::KeyValues;
use crate::meetings::Meetings;
use crate::membership::{self, Input, Liveness, Membership, Refusal, elastic};

/// The number of senders that are remembered for each task: its agent, its worker, and those before
/// them.
const SOURCES: usize = 8;
/// Bytes of events that wait for the driver.
const EVENTS: usize = 64 << 20;
/// Bytes of waiting events beyond which senders of records have to wait.
const PRESSURE: usize = EVENTS / 2;
/// The longest they wait for a driver that takes none: then the oldest records make room.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which the driver's progress is checked meanwhile.
const GLANCE: Duration = Duration::from_millis(5);
/// Interval at which the clock is read.
const TICK: Duration = Duration::from_millis(50);
/// Time by which the registrar ends a late start after the driver and the agents: their messages
/// say more.
const LEEWAY: Duration = Duration::from_secs(1);
/// Agents show that they live each second: a shorter silence says nothing.
const SHORTEST: Duration = Duration::from_secs(3);
/// Number of missing tasks that a message lists.
pub(super) const LISTED: usize = 16;

/// The job.
pub(super) struct Core {
    pub(super) job_id: JobId,
    tasks: u32,
    started: Instant,
    start_timeout: Duration,
    pub(super) is_elastic: bool,
    pub(super) membership: Mutex<Members>,
    /// Held by the thread that carries out membership's decisions.
    pub(super) turn: Mutex<()>,
    pub(super) journal: Option<Arc<Journal>>,
    /// The state that an earlier registrar has left.
    pub(super) resumed: Option<Resumed>,
    /// The history of the job before the registrar started again.
    before: Duration,
    clock: Mutex<Clock>,
    pub(super) board: watch::Sender<Board>,
    pub(super) kv: Mutex<KeyValues>,
    pub(super) meetings: Mutex<Meetings>,
    pub(super) events: Ring<Event>,
    /// A wait for the driver has ended without success: no other waits until it takes something.
    deaf: AtomicBool,
    told: Mutex<Told>,
    /// The latest connection of each task that carries signs of life.
    streams: Mutex<HashMap<TaskId, u64>>,
    /// By task, the last batch of records that was sent for it lately.
    batches: Mutex<HashMap<TaskId, VecDeque<(u64, u64)>>>,
    /// The last rank of each worker of an elastic job.
    pub(super) last_ranks: Mutex<HashMap<TaskId, Rank>>,
}

/// The events of a generation's tasks that the driver knows. A call repeated after a broken
/// connection is no news.
#[derive(Default)]
struct Told {
    generation: Generation,
    ends: HashSet<TaskId>,
    results: HashSet<TaskId>,
}

impl Told {
    fn enter(&mut self, generation: Generation) -> &mut Self {
        if self.generation != generation {
            *self = Self { generation, ..Self::default() };
        }
        self
    }
}

/// Returns the rules of an elastic job.
pub(super) fn rules(options: &Options, elastic: &Elastic) -> elastic::Rules {
    elastic::Rules {
        first: elastic.first,
        least: elastic.least,
        most: elastic.most,
        spares: elastic.spares,
        timeout: elastic.timeout,
        reset_limit: elastic.reset_limit,
        cooldown: elastic.cooldown,
        start_timeout: options.start_timeout,
        liveness: liveness(options),
    }
}

fn liveness(options: &Options) -> Liveness {
    Liveness {
        heartbeat_timeout: options.peer_timeout.max(SHORTEST),
        disconnect_grace: Duration::from_secs(1).min(options.peer_timeout),
    }
}

impl Core {
    /// `in_order` where tasks have the ranks of their numbers.
    pub(super) fn new(job_id: JobId, options: &Options, in_order: bool) -> Self {
        let membership = Membership::new(membership::Options {
            tasks: options.tasks,
            liveness: liveness(options),
            failure_grace: Duration::from_millis(500),
            in_order,
        });
        Self::of(job_id, options, Members::fixed(membership))
    }

    /// For workers that come and go; with what an earlier registrar has kept of the job, if there
    /// is any.
    pub(super) fn elastic(job_id: JobId, options: &Options, kept: Kept) -> Self {
        let Kept { machine, journal, at, kv, meetings } = kept;
        let members = Members::elastic(machine, journal.is_some());
        let (kv, meetings) = (Mutex::new(kv), Mutex::new(meetings));
        Self { before: at, journal, kv, meetings, ..Self::of(job_id, options, members) }
    }

    fn of(job_id: JobId, options: &Options, membership: Members) -> Self {
        Self {
            job_id,
            tasks: options.tasks,
            started: Instant::now(),
            start_timeout: options.start_timeout,
            is_elastic: membership.is_elastic(),
            membership: Mutex::new(membership),
            turn: Mutex::new(()),
            journal: None,
            resumed: None,
            before: Duration::ZERO,
            clock: Mutex::default(),
            board: watch::Sender::new(Board::default()),
            kv: Mutex::new(KeyValues::default()),
            meetings: Mutex::default(),
            events: Ring::new(EVENTS),
            deaf: AtomicBool::new(false),
            told: Mutex::default(),
            streams: Mutex::default(),
            batches: Mutex::default(),
            last_ranks: Mutex::default(),
        }
    }

    /// Returns whether a batch of records is one that has not come before: one whose connection
    /// broke may be sent again.
    pub(super) fn is_new_batch(&self, task: TaskId, source: u64, number: u64) -> bool {
        let mut batches = self.batches.lock();
        let known = batches.entry(task).or_default();
        if let Some((_, last)) = known.iter_mut().find(|(known, _)| *known == source) {
            let news = number > *last;
            *last = number.max(*last);
            return news;
        }
        if known.len() == SOURCES {
            known.pop_front();
        }
        known.push_back((source, number));
        true
    }

    /// Time since the job began, without that in which this process was stopped; membership is
    /// locked.
    pub(super) fn now(&self) -> Duration {
        self.before + self.clock.lock().read(self.started.elapsed())
    }

    /// Takes a task in.
    pub(super) fn register(
        &self,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<Generation, Refusal> {
        self.act(|members| members.register(self.now(), task, attempt, session, host))
    }

    /// A worker of an elastic job asks for a world after `after`.
    pub(super) fn ready(
        &self,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<(), Refusal> {
        self.act(|members| members.ready(self.now(), task, after, suspects))
    }

    /// Takes in a sign of life. False when its sender waited and was dropped for its silence, which
    /// it cannot know: it has to register again.
    pub(super) fn beat(&self, task: TaskId, session: u64) -> bool {
        let mut membership = self.membership.lock();
        // Nothing follows from it, so it waits for nothing.
        membership.observe(self.now(), Input::Beat { task, session });
        let dropped = !membership.knows(task, session)
            && self.board.borrow().holders.get(&task).is_some_and(|holder| *holder == session);
        !dropped
    }

    /// Returns a number for a connection that has begun to carry an agent's signs of life; older
    /// ones count no more.
    pub(super) fn stream(&self, task: TaskId) -> u64 {
        let mut streams = self.streams.lock();
        let latest = streams.entry(task).or_default();
        *latest += 1;
        *latest
    }

    /// Takes in the end of such a connection, unless the agent has another one by now.
    pub(super) fn disconnected(&self, task: TaskId, session: u64, stream: u64) {
        if self.streams.lock().get(&task) == Some(&stream) {
            self.observe(Input::Disconnected { task, session });
        }
    }

    /// Takes in what happened.
    pub(super) fn observe(&self, input: Input) {
        self.act(|members| members.observe(self.now(), input));
    }

    /// Takes in a worker's end; the driver gets it before its consequences.
    pub(super) fn exited(&self, task: TaskId, generation: Generation, exit: Exit) {
        self.act(|members| {
            if self.is_news(members, generation)
                && self.told.lock().enter(generation).ends.insert(task)
            {
                members.ended(task, generation, exit.clone());
            }
            members.observe(self.now(), Input::Exited { task, generation, exit });
        });
    }

    /// Reports a worker's end to the driver.
    pub(super) fn tell_end(&self, task: TaskId, generation: Generation, exit: Exit) {
        let rank = self.last_rank(task);
        if !self.is_elastic {
            self.note_end(generation, rank, &exit);
        }
        self.events.push(Event::Exited { task, rank, exit });
    }

    /// Lets workers that wait for this one hear that it has ended well: a failure ends them all
    /// anyway.
    fn note_end(&self, generation: Generation, rank: Rank, exit: &Exit) {
        if !exit.how.is_success() {
            return;
        }
        let host =
            self.assignment().and_then(|world| Some(world.seats.get(rank.index())?.host.0.clone()));
        self.meetings.lock().ended(generation, rank.0, host.unwrap_or_default());
    }

    /// Takes in what a worker of the present generation returned.
    pub(super) fn returned(&self, task: TaskId, generation: Generation, data: Vec<u8>) {
        let membership = self.membership.lock();
        if self.is_news(&membership, generation)
            && self.told.lock().enter(generation).results.insert(task)
        {
            self.events.push(Event::Result { task, rank: self.last_rank(task), data });
        }
    }

    /// Agents of elastic jobs speak of no generation: a task is one process.
    fn is_news(&self, membership: &Members, generation: Generation) -> bool {
        self.is_elastic || membership.generation() == generation
    }

    fn last_rank(&self, task: TaskId) -> Rank {
        let present = self.board.borrow().rank(task);
        present.or_else(|| self.last_ranks.lock().get(&task).copied()).unwrap_or_default()
    }

    pub(super) fn abort(&self, reason: String) {
        self.observe(Input::Abort { reason });
    }

    /// Tells the driver something.
    pub(super) fn push(&self, event: Event) {
        self.events.push(event);
    }

    /// Returns when the driver keeps up, or has not for a while.
    pub(super) async fn room(&self) {
        let started = Instant::now();
        while self.events.weight() > PRESSURE && !self.deaf.load(Ordering::Acquire) {
            if started.elapsed() >= PATIENCE {
                self.deaf.store(true, Ordering::Release);
            }
            tokio::time::sleep(GLANCE).await;
        }
    }

    pub(super) fn events(&self, deadline: Instant) -> Drained<Event> {
        self.deaf.store(false, Ordering::Release);
        self.events.drain(deadline)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.events.is_finished()
    }

    pub(super) fn assignment(&self) -> Option<World> {
        self.board.borrow().world.as_ref().map(|published| published.world.clone())
    }

    pub(super) fn rank(&self, task: TaskId) -> Option<Rank> {
        self.board.borrow().rank(task)
    }

    /// Returns a task's rank in the present world, and the ranks there are.
    pub(super) fn place(&self, task: TaskId) -> Option<(u32, u32)> {
        let board = self.board.borrow();
        let published = board.world.as_ref()?;
        Some((published.ranks.get(&task)?.0, u32::try_from(published.world.size()).ok()?))
    }

    pub(super) fn board(&self) -> watch::Receiver<Board> {
        self.board.subscribe()
    }

    pub(super) fn kv(&self) -> &Mutex<KeyValues> {
        &self.kv
    }

    pub(super) fn meetings(&self) -> &Mutex<Meetings> {
        &self.meetings
    }

    /// Returns the lowest tasks that have not registered, and how many there are.
    pub(super) fn missing(&self) -> (Vec<u32>, u32) {
        let membership = self.membership.lock();
        let all: Vec<u32> = membership.missing().into_iter().map(|task| task.0).collect();
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        (all.into_iter().take(LISTED).collect(), count)
    }

    /// Lets calls end.
    pub(super) fn close(&self) {
        self.board.send_modify(|board| board.closed = true);
        self.events.close();
    }

    pub(super) async fn until_closed(&self) {
        // The sender lives in `self`, so the wait ends by the condition alone.
        drop(self.board().wait_for(|board| board.closed).await);
    }

    /// Lets membership know that time passes.
    pub(super) async fn tick(self: Arc<Self>) {
        let mut interval = tokio::time::interval(TICK);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut board = self.board();
        while !board.borrow_and_update().closed {
            interval.tick().await;
            self.observe(Input::Tick);
            self.shorten_journal_beside();
            if !self.is_elastic
                && self.started.elapsed() >= self.start_timeout + LEEWAY
                && self.board.borrow().world.is_none()
            {
                self.give_up();
            }
        }
    }

    fn give_up(&self) {
        let (listed, count) = self.missing();
        let more = if listed.len() < count as usize { " and more" } else { "" };
        self.abort(format!(
            "only {} of {} tasks registered within {:.1?}, missing: {listed:?}{more}",
            self.tasks - count,
            self.tasks,
            self.start_timeout,
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use farandole_config::Config;
    use farandole_telemetry::{LogLine, Record, Stream};

    use super::*;

    #[test]
    fn a_driver_that_takes_nothing_is_waited_for_once_and_again_after_it_took_something() {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let core = Core::new(JobId("job".to_owned()), &Options::from_config(1, &config), false);
        let fill = || {
            while core.events.weight() <= PRESSURE {
                let text = "x".repeat(1 << 20);
                let line = LogLine { task: 0, rank: None, stream: Stream::Stdout, text };
                core.push(Event::Record(Record::Log(line)));
            }
        };
        let waited = || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let started = Instant::now();
            runtime.block_on(core.room());
            started.elapsed()
        };
        fill();
        assert!(waited() >= PATIENCE);
        // A sender of a thousand batches is not held up a thousand times.
        let began = Instant::now();
        for _ in 0..1_000 {
            waited();
        }
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
        core.events(Instant::now());
        fill();
        assert!(waited() >= PATIENCE);
    }

    #[test]
    fn a_result_of_another_generation_is_ignored() {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let core = Core::new(JobId("job".to_owned()), &Options::from_config(2, &config), false);
        for (task, generation) in [(0, 0), (1, 3), (0, 0), (1, 0)] {
            core.returned(TaskId(task), Generation(generation), vec![0]);
        }
        let told = core.events(Instant::now());
        assert_eq!(told.records.len(), 2, "one of each task");
    }
}

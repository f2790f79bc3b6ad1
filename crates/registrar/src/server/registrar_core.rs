// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The job's state behind its locks, and the effects of the decisions of `membership`.
//!
//! Lock order: `effects_turn`, then `membership`, then `clock`, then `delivered_events`, then
//! `board`, then `events`; or `effects_turn`, then `kv`, then the formation table. The journal is
//! locked last, and never while `membership` is locked.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole_membership::{
    ElasticRules, ExitReport, FixedMembership, LivenessLimits, MembershipInput, MembershipOptions,
    RegistrationRefusal,
};
use farandole_telemetry::{BoundedRing, DrainedRecords};
use farandole_world::{Generation, HostHash, JobId, Rank, TaskId, World};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::announcements::WorldAnnouncements;
use super::clock::JobClock;
use super::membership_machine::MembershipMachine;
use super::options::{ElasticOptions, RegistrarOptions};
use super::recovered_state::{RecoveredState, ResumedJob};
use crate::event::JobEvent;
use crate::formation::FormationTable;
use crate::generation_key_values::KeyValueStore;
use crate::journal::MembershipJournal;

/// Number of record senders that are remembered for each task: its agent, its worker, and earlier
/// ones.
const MAX_RECORD_SOURCES: usize = 8;
/// Largest total size of events that wait for the driver.
const MAX_EVENT_BYTES: usize = 64 << 20;
/// Size of the waiting events above which senders of records must wait.
const BACKPRESSURE_BYTES: usize = MAX_EVENT_BYTES / 2;
/// Longest wait of a sender for a driver that takes no events. After that, the oldest records are
/// dropped.
const BACKPRESSURE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which a waiting sender checks the driver's progress.
const BACKPRESSURE_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval at which the clock is read.
const CLOCK_TICK_INTERVAL: Duration = Duration::from_millis(50);
/// Delay of the registrar's start timeout after the timeouts of the driver and the agents, because
/// their messages say more.
const START_TIMEOUT_LEEWAY: Duration = Duration::from_secs(1);
/// Shortest heartbeat timeout: agents send a heartbeat each second, so a shorter silence proves
/// nothing.
const MIN_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of missing tasks that a message lists.
pub(super) const MAX_LISTED_TASKS: usize = 16;

/// The state of a job.
pub(super) struct RegistrarCore {
    pub(super) job_id: JobId,
    tasks: u32,
    started: Instant,
    start_timeout: Duration,
    pub(super) is_elastic: bool,
    pub(super) membership: Mutex<MembershipMachine>,
    /// Held by the thread that carries out the decisions of `membership`.
    pub(super) effects_turn: Mutex<()>,
    pub(super) journal: Option<Arc<MembershipJournal>>,
    /// The state that an earlier registrar left.
    pub(super) resumed: Option<ResumedJob>,
    /// Job time that passed before the registrar restarted.
    earlier_time: Duration,
    clock: Mutex<JobClock>,
    pub(super) board: watch::Sender<WorldAnnouncements>,
    pub(super) kv: Mutex<KeyValueStore>,
    pub(super) formation: Mutex<FormationTable>,
    pub(super) events: BoundedRing<JobEvent>,
    /// Whether a sender has waited for the driver in vain. Then no other sender waits until the
    /// driver takes an event.
    is_driver_stalled: AtomicBool,
    delivered_events: Mutex<DeliveredEvents>,
    /// Number of the latest connection of each task that carries heartbeats.
    streams: Mutex<HashMap<TaskId, u64>>,
    /// Number of the last batch of records from each recent sender, by task.
    batches: Mutex<HashMap<TaskId, VecDeque<(u64, u64)>>>,
    /// The last rank of each worker of an elastic job.
    pub(super) last_ranks: Mutex<HashMap<TaskId, Rank>>,
}

/// The events of a generation's tasks that the driver has received. A call that is repeated after a
/// broken connection is dropped.
#[derive(Default)]
struct DeliveredEvents {
    generation: Generation,
    ends: HashSet<TaskId>,
    results: HashSet<TaskId>,
}

impl DeliveredEvents {
    fn clear_for_newer_generation(&mut self, generation: Generation) -> &mut Self {
        if self.generation != generation {
            *self = Self { generation, ..Self::default() };
        }
        self
    }
}

/// Returns the rules of an elastic job.
pub(super) fn elastic_rules(options: &RegistrarOptions, elastic: &ElasticOptions) -> ElasticRules {
    ElasticRules {
        first: elastic.first,
        min_workers: elastic.min_workers,
        max_workers: elastic.max_workers,
        spares: elastic.spares,
        timeout: elastic.timeout,
        reset_limit: elastic.reset_limit,
        cooldown: elastic.cooldown,
        start_timeout: options.start_timeout,
        liveness: liveness_limits(options),
    }
}

fn liveness_limits(options: &RegistrarOptions) -> LivenessLimits {
    LivenessLimits {
        heartbeat_timeout: options.peer_timeout.max(MIN_HEARTBEAT_TIMEOUT),
        // Agents connect again after 0.2 s, so this time allows for several attempts.
        disconnect_grace: Duration::from_secs(1).min(options.peer_timeout),
    }
}

impl RegistrarCore {
    /// Creates a job with a fixed number of tasks. With `in_order`, a task's number is its rank.
    pub(super) fn new(job_id: JobId, options: &RegistrarOptions, in_order: bool) -> Self {
        let membership = FixedMembership::new(MembershipOptions {
            tasks: options.tasks,
            liveness: liveness_limits(options),
            failure_grace: Duration::from_millis(500),
            in_order,
        });
        Self::with_membership(job_id, options, MembershipMachine::new_fixed(membership))
    }

    /// Creates an elastic job, with the state that an earlier registrar kept of it, if there is
    /// any.
    pub(super) fn new_elastic(
        job_id: JobId,
        options: &RegistrarOptions,
        recovered: RecoveredState,
    ) -> Self {
        let RecoveredState { machine, journal, at, kv, formation } = recovered;
        let members = MembershipMachine::new_elastic(machine, journal.is_some());
        let (kv, formation) = (Mutex::new(kv), Mutex::new(formation));
        Self {
            earlier_time: at,
            journal,
            kv,
            formation,
            ..Self::with_membership(job_id, options, members)
        }
    }

    fn with_membership(
        job_id: JobId,
        options: &RegistrarOptions,
        membership: MembershipMachine,
    ) -> Self {
        Self {
            job_id,
            tasks: options.tasks,
            started: Instant::now(),
            start_timeout: options.start_timeout,
            is_elastic: membership.is_elastic(),
            membership: Mutex::new(membership),
            effects_turn: Mutex::new(()),
            journal: None,
            resumed: None,
            earlier_time: Duration::ZERO,
            clock: Mutex::default(),
            board: watch::Sender::new(WorldAnnouncements::default()),
            kv: Mutex::new(KeyValueStore::default()),
            formation: Mutex::default(),
            events: BoundedRing::new(MAX_EVENT_BYTES),
            is_driver_stalled: AtomicBool::new(false),
            delivered_events: Mutex::default(),
            streams: Mutex::default(),
            batches: Mutex::default(),
            last_ranks: Mutex::default(),
        }
    }

    /// Returns whether a batch of records has not arrived before. A batch may be sent again after
    /// its connection broke.
    pub(super) fn record_batch_if_new(&self, task: TaskId, source: u64, number: u64) -> bool {
        let mut batches = self.batches.lock();
        let known = batches.entry(task).or_default();
        if let Some((_, last)) = known.iter_mut().find(|(known, _)| *known == source) {
            let is_newer = number > *last;
            // A repeated old batch must not lower the number.
            *last = number.max(*last);
            return is_newer;
        }
        // A task that restarts its worker for ever would otherwise grow this list.
        if known.len() == MAX_RECORD_SOURCES {
            known.pop_front();
        }
        known.push_back((source, number));
        true
    }

    /// Returns the time since the job began, without the time in which this process was stopped.
    /// `membership` must be locked.
    pub(super) fn job_time(&self) -> Duration {
        self.earlier_time + self.clock.lock().job_time(self.started.elapsed())
    }

    /// Registers a task.
    pub(super) fn register_task(
        &self,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<Generation, RegistrationRefusal> {
        self.step_membership(|members| {
            members.register_task(self.job_time(), task, attempt, session, host)
        })
    }

    /// Records that a worker of an elastic job asks for a world after `after`.
    pub(super) fn request_world(
        &self,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<(), RegistrationRefusal> {
        self.step_membership(|members| {
            members.request_world(self.job_time(), task, after, suspects)
        })
    }

    /// Records a heartbeat. Returns false if the sender was waiting and was dropped because of its
    /// silence. The sender cannot know this, so it must register again.
    pub(super) fn record_heartbeat(&self, task: TaskId, session: u64) -> bool {
        let mut membership = self.membership.lock();
        // A heartbeat causes no effects, so it does not wait for the effects of other steps.
        membership
            .apply_membership_input(self.job_time(), MembershipInput::Heartbeat { task, session });
        let dropped = !membership.knows_session(task, session)
            && self.board.borrow().holders.get(&task).is_some_and(|holder| *holder == session);
        !dropped
    }

    /// Returns a number for a new connection that carries an agent's heartbeats. Older connections
    /// of the agent do not count any more.
    pub(super) fn next_heartbeat_stream(&self, task: TaskId) -> u64 {
        let mut streams = self.streams.lock();
        let latest = streams.entry(task).or_default();
        *latest += 1;
        *latest
    }

    /// Records the end of a heartbeat connection, unless the agent has a newer one.
    pub(super) fn record_disconnect(&self, task: TaskId, session: u64, stream: u64) {
        if self.streams.lock().get(&task) == Some(&stream) {
            self.apply_membership_input(MembershipInput::Disconnected { task, session });
        }
    }

    /// Passes an input to the membership.
    pub(super) fn apply_membership_input(&self, input: MembershipInput) {
        self.step_membership(|members| members.apply_membership_input(self.job_time(), input));
    }

    /// Records a worker's exit. The driver gets the exit before its consequences.
    pub(super) fn record_exit(&self, task: TaskId, generation: Generation, exit: ExitReport) {
        self.step_membership(|members| {
            if self.is_current_generation(members, generation)
                // The call may be repeated after a broken connection, and the driver must count
                // each end once.
                && self.delivered_events.lock().clear_for_newer_generation(generation).ends.insert(task)
            {
                members.queue_exit_report(task, generation, exit.clone());
            }
            members.apply_membership_input(
                self.job_time(),
                MembershipInput::Exited { task, generation, exit },
            );
        });
    }

    /// Reports a worker's end to the driver.
    pub(super) fn queue_exit_event(&self, task: TaskId, generation: Generation, exit: ExitReport) {
        let rank = self.last_rank_of_task(task);
        // An elastic world that loses a worker is formed again, so its members need no such answer.
        if !self.is_elastic {
            self.end_formations_awaiting(generation, rank, &exit);
        }
        self.events.push(JobEvent::Exited { task, rank, exit });
    }

    /// Notifies workers that wait for this one that it has ended successfully. A failure ends all
    /// workers in any case.
    fn end_formations_awaiting(&self, generation: Generation, rank: Rank, exit: &ExitReport) {
        if !exit.kind.is_success() {
            return;
        }
        let host = self
            .current_world()
            .and_then(|world| Some(world.seats.get(rank.index())?.host.0.clone()));
        self.formation.lock().record_worker_end(generation, rank.0, host.unwrap_or_default());
    }

    /// Records the result of a worker of the present generation.
    pub(super) fn record_result(&self, task: TaskId, generation: Generation, data: Vec<u8>) {
        let membership = self.membership.lock();
        if self.is_current_generation(&membership, generation)
            && self
                .delivered_events
                .lock()
                .clear_for_newer_generation(generation)
                .results
                .insert(task)
        {
            self.events.push(JobEvent::Result { task, rank: self.last_rank_of_task(task), data });
        }
    }

    /// Returns whether the generation is the present one. Agents of elastic jobs send no
    /// generation, because a task is one process.
    fn is_current_generation(
        &self,
        membership: &MembershipMachine,
        generation: Generation,
    ) -> bool {
        self.is_elastic || membership.generation() == generation
    }

    fn last_rank_of_task(&self, task: TaskId) -> Rank {
        let present = self.board.borrow().task_rank(task);
        present.or_else(|| self.last_ranks.lock().get(&task).copied()).unwrap_or_default()
    }

    pub(super) fn abort_job(&self, reason: String) {
        self.apply_membership_input(MembershipInput::Abort { reason });
    }

    /// Makes every agent send SIGINT to its worker.
    pub(super) fn interrupt_workers(&self) {
        self.board.send_modify(|board| board.interrupted = true);
    }

    /// Adds an event for the driver.
    pub(super) fn push_event(&self, event: JobEvent) {
        self.events.push(event);
    }

    /// Waits until the driver keeps up, but at most for `BACKPRESSURE_TIMEOUT`.
    pub(super) async fn wait_for_event_room(&self) {
        let started = Instant::now();
        while self.events.queued_bytes() > BACKPRESSURE_BYTES
            && !self.is_driver_stalled.load(Ordering::Acquire)
        {
            if started.elapsed() >= BACKPRESSURE_TIMEOUT {
                // One sender has waited long enough for all: a driver that reads nothing must not
                // stop the workers.
                self.is_driver_stalled.store(true, Ordering::Release);
            }
            tokio::time::sleep(BACKPRESSURE_POLL_INTERVAL).await;
        }
    }

    pub(super) fn drain_events(&self, deadline: Instant) -> DrainedRecords<JobEvent> {
        self.is_driver_stalled.store(false, Ordering::Release);
        self.events.wait_and_drain(deadline)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.events.is_finished()
    }

    pub(super) fn current_world(&self) -> Option<World> {
        self.board.borrow().world.as_ref().map(|published| published.world.clone())
    }

    pub(super) fn task_rank(&self, task: TaskId) -> Option<Rank> {
        self.board.borrow().task_rank(task)
    }

    /// Returns a task's rank in the present world, and the number of ranks.
    pub(super) fn rank_and_size(&self, task: TaskId) -> Option<(u32, u32)> {
        let board = self.board.borrow();
        let published = board.world.as_ref()?;
        Some((published.ranks.get(&task)?.0, u32::try_from(published.world.size()).ok()?))
    }

    pub(super) fn subscribe_announcements(&self) -> watch::Receiver<WorldAnnouncements> {
        self.board.subscribe()
    }

    pub(super) fn key_value_store(&self) -> &Mutex<KeyValueStore> {
        &self.kv
    }

    pub(super) fn formation_table(&self) -> &Mutex<FormationTable> {
        &self.formation
    }

    /// Returns the lowest tasks that have not registered, and the number of all of them.
    pub(super) fn missing_tasks(&self) -> (Vec<u32>, u32) {
        let membership = self.membership.lock();
        let all: Vec<u32> = membership.missing_tasks().into_iter().map(|task| task.0).collect();
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        (all.into_iter().take(MAX_LISTED_TASKS).collect(), count)
    }

    /// Ends all waiting calls.
    pub(super) fn close(&self) {
        self.board.send_modify(|board| board.closed = true);
        self.events.close();
    }

    pub(super) async fn wait_until_closed(&self) {
        // The sender lives in `self`, so only the condition ends the wait.
        drop(self.subscribe_announcements().wait_for(|board| board.closed).await);
    }

    /// Ticks the membership at a fixed interval.
    pub(super) async fn run_membership_ticks(self: Arc<Self>) {
        let mut interval = tokio::time::interval(CLOCK_TICK_INTERVAL);
        // After a stop of this process, a burst of missed ticks would prove nothing.
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut board = self.subscribe_announcements();
        while !board.borrow_and_update().closed {
            interval.tick().await;
            self.apply_membership_input(MembershipInput::Tick);
            self.spawn_journal_compaction();
            if !self.is_elastic
                && self.started.elapsed() >= self.start_timeout + START_TIMEOUT_LEEWAY
                && self.board.borrow().world.is_none()
            {
                self.abort_after_start_timeout();
            }
        }
    }

    fn abort_after_start_timeout(&self) {
        let (listed, count) = self.missing_tasks();
        let more = if listed.len() < count as usize { " and more" } else { "" };
        self.abort_job(format!(
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
    use farandole_telemetry::{LogLine, OutputStream, WorkerRecord};

    use super::*;

    #[test]
    fn a_driver_that_takes_nothing_is_waited_for_once_and_again_after_it_took_something() {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let core = RegistrarCore::new(
            JobId("job".to_owned()),
            &RegistrarOptions::from_config(1, &config),
            false,
        );
        let fill = || {
            while core.events.queued_bytes() <= BACKPRESSURE_BYTES {
                let text = "x".repeat(1 << 20);
                let line = LogLine { task: 0, rank: None, stream: OutputStream::Stdout, text };
                core.push_event(JobEvent::Record(WorkerRecord::Log(line)));
            }
        };
        let waited = || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let started = Instant::now();
            runtime.block_on(core.wait_for_event_room());
            started.elapsed()
        };
        fill();
        assert!(waited() >= BACKPRESSURE_TIMEOUT);
        // Only the first of a thousand batches waits.
        let began = Instant::now();
        for _ in 0..1_000 {
            waited();
        }
        assert!(began.elapsed() < BACKPRESSURE_TIMEOUT, "{:?}", began.elapsed());
        core.drain_events(Instant::now());
        fill();
        assert!(waited() >= BACKPRESSURE_TIMEOUT);
    }

    #[test]
    fn a_result_of_another_generation_is_ignored() {
        let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
        let core = RegistrarCore::new(
            JobId("job".to_owned()),
            &RegistrarOptions::from_config(2, &config),
            false,
        );
        for (task, generation) in [(0, 0), (1, 3), (0, 0), (1, 0)] {
            core.record_result(TaskId(task), Generation(generation), vec![0]);
        }
        let delivered = core.drain_events(Instant::now());
        assert_eq!(delivered.records.len(), 2, "one of each task");
    }
}

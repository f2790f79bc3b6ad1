// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Progress: waiting threads drive the engine. The holder of the progress lock drives for all.
//!
//! Locks are taken in this order: `progress`, then `submissions`. `background` is taken alone.
//! [`signals`] contains the state that threads exchange without a lock.

mod background_thread;
mod drive_loop;
mod driver_signals;
mod spin_budget;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farandole_world::World;
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::background_thread::BackgroundThread;
use self::driver_signals::DriverSignals;
use self::spin_budget::SpinBudget;
use crate::callbacks::{CallbackQueue, DueCallback};
use crate::set::{FinishedRequest, ProcessSet};
use crate::submission_table::{CheckedSubmission, SubmissionTable};
use crate::{
    DriverParkingAndLiveness, EngineSettings, EngineStatistics, Error, RequestCompletion,
    RequestHandle, Result, StopCause,
};

/// Longest sleep of a waiter before it tries to take the progress lock again.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time that a waiter spins for the progress lock before it sleeps.
const LOCK_SPIN_TIME: Duration = Duration::from_micros(20);

/// The state under the progress lock.
pub(crate) struct DriverState {
    pub(crate) sets: Vec<ProcessSet>,
    intake: VecDeque<CheckedSubmission>,
    finished: Vec<FinishedRequest>,
    calls: Vec<DueCallback>,
    last_tick: Instant,
    /// Whether the driver has slept: the next step then checks clocks and peers.
    woken: bool,
    spin_budget: SpinBudget,
    /// Number of times that results were posted.
    results_posted: u64,
    /// Statistics of removed sets.
    pub(crate) removed_set_statistics: EngineStatistics,
    pub(crate) stopped: bool,
}

impl DriverState {
    fn is_busy(&self) -> bool {
        !self.stopped && self.sets.iter().any(ProcessSet::is_busy)
    }
}

/// The condition until which a thread drives.
#[derive(Clone, Copy)]
enum DriveGoal {
    /// Drives for its own result, until the result is there or the deadline has passed.
    Done(RequestHandle, Instant),
    /// Drives for all, until nothing is in progress or another thread wants to drive.
    Idle,
    /// Drives for peers, without a local waiter: sleeps until any event occurs.
    AnyEvent,
}

/// State that the threads of an engine share.
pub(crate) struct EngineShared {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<EngineSettings>,
    pub(crate) host: Arc<dyn DriverParkingAndLiveness>,
    pub(crate) progress: Mutex<DriverState>,
    pub(crate) submissions: Mutex<SubmissionTable>,
    pub(crate) callbacks: CallbackQueue,
    pub(crate) background: BackgroundThread,
    /// Condition of the `submissions` lock: a result was posted, or the progress lock is free.
    changed: Condvar,
    signals: DriverSignals,
    /// Number of times that a thread has driven.
    pub(crate) drives: AtomicU64,
    /// Whether the host has more ranks than cores: threads then yield instead of spinning.
    oversubscribed: bool,
    /// Whether the world has several hosts, so that a long operation may wait for the network.
    is_across_hosts: bool,
}

impl EngineShared {
    pub(crate) fn new(
        world: Arc<World>,
        settings: Arc<EngineSettings>,
        host: Arc<dyn DriverParkingAndLiveness>,
        sets: Vec<ProcessSet>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let local_ranks = world.local_ranks().len();
        let crowded = local_ranks > cores;
        // On a crowded host, a thread that spins keeps a peer from its core.
        let spin = if crowded { settings.spin / 8 } else { settings.spin };
        Self {
            oversubscribed: crowded,
            is_across_hosts: local_ranks < world.size(),
            world,
            settings,
            host,
            submissions: Mutex::new(SubmissionTable::default()),
            progress: Mutex::new(DriverState {
                sets,
                intake: VecDeque::new(),
                finished: Vec::new(),
                calls: Vec::new(),
                last_tick: Instant::now(),
                woken: true,
                spin_budget: SpinBudget::new(spin),
                results_posted: 0,
                removed_set_statistics: EngineStatistics::default(),
                stopped: false,
            }),
            callbacks: CallbackQueue::default(),
            background: BackgroundThread::default(),
            changed: Condvar::new(),
            signals: DriverSignals::default(),
            drives: AtomicU64::new(0),
        }
    }

    /// Announces a submission whose caller does not wait: peers get the announcement now, the
    /// background thread does the rest. Returns quickly, because the caller may hold another lock.
    pub(crate) fn announce_submission(&self) {
        self.signals.mark_submitted();
        self.ensure_driven();
    }

    /// Announces the queued requests and wakes the background thread, if no thread drives.
    pub(crate) fn ensure_driven(&self) {
        match self.progress.try_lock() {
            Some(mut driver) => {
                self.announce_submissions_or_stop(&mut driver);
                self.release_driver(driver);
            }
            None => self.wake_driver(),
        }
    }

    /// Announces a submission whose caller is about to wait for the result.
    pub(crate) fn announce_before_wait(&self) {
        self.signals.mark_submitted_unfenced();
    }

    fn wake_driver(&self) {
        if self.signals.has_parked_driver() {
            self.host.unpark();
        }
    }

    /// Waits for a result, and drives if no other thread drives.
    pub(crate) fn wait(
        &self,
        handle: RequestHandle,
        deadline: Instant,
    ) -> Result<Option<RequestCompletion>> {
        self.signals.increment_lock_waiters();
        while let Some(mut driver) = self.acquire_driver_unless_done(handle, deadline) {
            self.drive_until_goal(&mut driver, DriveGoal::Done(handle, deadline));
            self.unlock_driver(driver);
            // The drive may have ended only because another thread wanted the lock.
            if Instant::now() >= deadline || !self.submissions.lock().is_pending(handle) {
                break;
            }
        }
        self.signals.decrement_lock_waiters();
        // This thread stops driving, but work of other callers may be left.
        self.request_drive_if_needed();
        self.submissions.lock().take_result(handle)
    }

    /// Acquires the progress lock. Returns `None` if the result is there or the deadline has
    /// passed.
    fn acquire_driver_unless_done(
        &self,
        handle: RequestHandle,
        deadline: Instant,
    ) -> Option<MutexGuard<'_, DriverState>> {
        let start = Instant::now();
        loop {
            // The thread that preempts needs the lock for a moment only, so waiters let it go
            // first.
            if !self.signals.is_preempt_requested()
                && let Some(driver) = self.progress.try_lock()
            {
                return Some(driver);
            }
            // `announce_before_wait` woke no driver, so the driver may sleep and not know of the
            // request.
            self.wake_driver();
            let spun = start.elapsed();
            if spun < LOCK_SPIN_TIME {
                self.spin_or_yield(spun);
                continue;
            }
            let mut submissions = self.submissions.lock();
            if Instant::now() >= deadline || !submissions.is_pending(handle) {
                return None;
            }
            self.signals.register_waiter();
            let free =
                if self.signals.is_preempt_requested() { None } else { self.progress.try_lock() };
            if free.is_none() {
                let retry = deadline.min(Instant::now() + LOCK_RETRY_INTERVAL);
                self.changed.wait_until(&mut submissions, retry);
            }
            self.signals.unregister_waiter();
            if free.is_some() {
                return free;
            }
        }
    }

    /// Acquires the progress lock for a short time: the driving thread yields it.
    pub(crate) fn preempt_driver(&self) -> MutexGuard<'_, DriverState> {
        self.signals.increment_preempt_requests();
        let driver = loop {
            self.wake_driver();
            // The driver may go to sleep just after the wake-up. A short wait wakes it again.
            if let Some(driver) = self.progress.try_lock_for(Duration::from_millis(1)) {
                break driver;
            }
        };
        self.signals.decrement_preempt_requests();
        driver
    }

    /// Adds a process set.
    pub(crate) fn add_set(&self, set: ProcessSet) -> Result<()> {
        let mut driver = self.preempt_driver();
        let stopped = self.submissions.lock().stop_cause().cloned();
        if stopped.is_none() {
            driver.sets.push(set);
        }
        self.release_driver(driver);
        stopped.map_or(Ok(()), |cause| Err(Error::Stopped { cause }))
    }

    /// Retires a process set. Its links close when no member needs them any more, at the latest at
    /// `deadline`.
    pub(crate) fn remove_set(&self, key: usize, cause: StopCause, deadline: Instant) {
        let cause = Arc::new(cause);
        let mut driver = self.preempt_driver();
        self.submissions.lock().close_set(key, &cause);
        // Takes the queue first: no submission may be queued for a set that is gone.
        self.announce_submissions_or_stop(&mut driver);
        let driven = &mut *driver;
        if let Some(set) = driven.sets.iter_mut().find(|set| set.key == key) {
            set.retire_set(&cause, deadline, &mut driven.finished);
        }
        self.post_finished_requests(driven, key);
        self.release_driver(driver);
    }

    /// Releases the progress lock. Wakes a thread that wants it, or else the background thread.
    pub(crate) fn release_driver(&self, driver: MutexGuard<'_, DriverState>) {
        self.unlock_driver(driver);
        self.request_drive_if_needed();
    }

    fn unlock_driver(&self, driver: MutexGuard<'_, DriverState>) {
        self.signals.store_busy_flag(driver.is_busy());
        self.drives.fetch_add(1, Ordering::Relaxed);
        // Unlocks before it reads `waiters`: see the third pair in `signals`.
        drop(driver);
        if self.signals.should_notify_waiters() {
            // Notify under the lock: a waiter is then either asleep or has not checked yet.
            let submissions = self.submissions.lock();
            self.changed.notify_all();
            drop(submissions);
        }
    }

    /// Wakes the background thread if work is left and no other thread wants to drive.
    fn request_drive_if_needed(&self) {
        if self.signals.needs_driver() {
            self.background.request_drive();
        }
    }

    /// Drives on the background thread until no work is left or another thread wants to drive.
    /// Returns whether it had the lock.
    pub(crate) fn drive_in_background(&self, listen: bool) -> bool {
        if self.signals.is_lock_wanted() || self.signals.is_preempt_requested() {
            return false;
        }
        let Some(mut driver) = self.progress.try_lock() else { return false };
        self.drive_until_goal(
            &mut driver,
            if listen { DriveGoal::AnyEvent } else { DriveGoal::Idle },
        );
        self.release_driver(driver);
        true
    }
}

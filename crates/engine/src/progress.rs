// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Who drives. Whoever waits, helps: the holder of the progress lock drives for everybody.
//!
//! Locks, in the order in which they may be taken: `progress`, then `desk`. `background` is taken alone.
//!
//! No wake-up is lost (EN-5). There are three pairs of one who leaves something and one who looks for it; in each both
//! sides write, fence (SeqCst), and then read what the other wrote, so that at least one of them sees the other:
//!
//! - *Submission against unlocking.* A submitter sets `queued` and then tries the lock; the driver unlocks and then
//!   reads `queued`. Either the submitter gets the lock, or the driver sees the queue and has it driven.
//! - *Submission against sleep.* A submitter sets `queued` (a waiter `wanted`) and then reads `parked`; the driver sets
//!   `parked`, prepares its parker, and then reads `queued` and `wanted` and polls every link once more before it
//!   sleeps. Peers do the same with the parker's own flag.
//! - *Waiting against unlocking.* A waiter counts itself in `waiters` under the desk lock, tries the progress lock once
//!   more, and sleeps on the condition, which gives up the desk lock; the driver unlocks, then reads `waiters`, and
//!   notifies under the desk lock. Results are posted under the desk lock as well.

mod drive;
mod patience;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use farandole_world::World;
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::patience::Patience;
use crate::background::Background;
use crate::callbacks::{Call, Callbacks};
use crate::desk::{Desk, Submission};
use crate::set::{Finished, ProcessSet};
use crate::{Cause, Completion, Error, Handle, ProgressHost, Result, Settings, Statistics};

/// How often peers are told that this process lives, and looked at.
pub(crate) const BEAT: Duration = Duration::from_millis(250);
/// A waiter that does not get the progress lock tries again after this time at the latest.
const RETRY: Duration = Duration::from_millis(50);
/// How long a waiter spins for the progress lock before it sleeps.
const CONTEND: Duration = Duration::from_micros(20);

/// What the progress lock guards.
pub(crate) struct Driver {
    pub(crate) sets: Vec<ProcessSet>,
    intake: VecDeque<Submission>,
    finished: Vec<Finished>,
    calls: Vec<Call>,
    ticked: Instant,
    /// The driver slept: look at clocks and peers with the next step.
    woken: bool,
    patience: Patience,
    /// Grows with every result posted.
    posted: u64,
    /// Of sets that were removed.
    pub(crate) past: Statistics,
    pub(crate) stopped: bool,
}

impl Driver {
    fn is_busy(&self) -> bool {
        !self.stopped && self.sets.iter().any(ProcessSet::is_busy)
    }
}

/// For whom a thread drives.
#[derive(Clone, Copy)]
enum Until {
    /// Itself: until its result is there or its time is over.
    Done(Handle, Instant),
    /// Everybody: until nothing is under way or somebody else wants to.
    Idle,
    /// Nobody: sleeping on behalf of peers until anything happens.
    Something,
}

/// Everything the threads of an engine share.
pub(crate) struct Inner {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) host: Arc<dyn ProgressHost>,
    pub(crate) progress: Mutex<Driver>,
    pub(crate) desk: Mutex<Desk>,
    pub(crate) callbacks: Callbacks,
    pub(crate) background: Background,
    /// With `desk`: a result was posted, or the progress lock is free.
    changed: Condvar,
    /// The desk's queue is not empty.
    queued: AtomicBool,
    /// Threads that want to drive for themselves: the background thread makes way.
    wanted: AtomicUsize,
    /// Threads that want the lock for something short: everybody makes way.
    summoned: AtomicUsize,
    /// Threads asleep on `changed`.
    waiters: AtomicUsize,
    /// The driver sleeps or is about to.
    parked: AtomicBool,
    /// Something was under way when the last driver left.
    busy: AtomicBool,
    /// Grows whenever somebody drove.
    pub(crate) drives: AtomicU64,
    /// Ranks outnumber cores: give way instead of spinning.
    crowded: bool,
}

impl Inner {
    pub(crate) fn new(
        world: Arc<World>,
        settings: Arc<Settings>,
        host: Arc<dyn ProgressHost>,
        sets: Vec<ProcessSet>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let crowded = world.local_ranks().len() > cores;
        let spin = if crowded { settings.spin / 8 } else { settings.spin };
        Self {
            crowded,
            world,
            settings,
            host,
            desk: Mutex::new(Desk::new()),
            progress: Mutex::new(Driver {
                sets,
                intake: VecDeque::new(),
                finished: Vec::new(),
                calls: Vec::new(),
                ticked: Instant::now(),
                woken: true,
                patience: Patience::new(spin),
                posted: 0,
                past: Statistics::default(),
                stopped: false,
            }),
            callbacks: Callbacks::default(),
            background: Background::default(),
            changed: Condvar::new(),
            queued: AtomicBool::new(false),
            wanted: AtomicUsize::new(0),
            summoned: AtomicUsize::new(0),
            waiters: AtomicUsize::new(0),
            parked: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            drives: AtomicU64::new(0),
        }
    }

    /// A submitter has left something on the desk and goes on with other things: peers hear of it now, the background
    /// thread does the rest. Quick, for the caller may hold a lock of its own.
    pub(crate) fn announce(&self) {
        self.queued.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.see_that_somebody_drives();
    }

    /// If nobody drives, hands in what is on the desk and has the background thread drive.
    pub(crate) fn see_that_somebody_drives(&self) {
        match self.progress.try_lock() {
            Some(mut driver) => {
                self.hand_in(&mut driver);
                self.leave(driver);
            }
            None => self.wake_driver(),
        }
    }

    /// A submitter has left something on the desk and is about to wait for it.
    pub(crate) fn announce_quietly(&self) {
        self.queued.store(true, Ordering::SeqCst);
    }

    fn wake_driver(&self) {
        if self.parked.load(Ordering::SeqCst) {
            self.host.unpark();
        }
    }

    /// Waits for a result, driving if nobody else does.
    pub(crate) fn wait(&self, handle: Handle, deadline: Instant) -> Result<Option<Completion>> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        while let Some(mut driver) = self.contend(handle, deadline) {
            self.drive(&mut driver, Until::Done(handle, deadline));
            self.unlock(driver);
            if Instant::now() >= deadline || !self.desk.lock().is_pending(handle) {
                break;
            }
        }
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        self.see_to_it();
        self.desk.lock().take(handle)
    }

    /// The progress lock, or nothing when the result is there or the time is over.
    fn contend(&self, handle: Handle, deadline: Instant) -> Option<MutexGuard<'_, Driver>> {
        let start = Instant::now();
        loop {
            if self.summoned.load(Ordering::SeqCst) == 0
                && let Some(driver) = self.progress.try_lock()
            {
                return Some(driver);
            }
            self.wake_driver();
            let spun = start.elapsed();
            if spun < CONTEND {
                self.pause(spun);
                continue;
            }
            let mut desk = self.desk.lock();
            if Instant::now() >= deadline || !desk.is_pending(handle) {
                return None;
            }
            self.waiters.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let free = match self.summoned.load(Ordering::SeqCst) {
                0 => self.progress.try_lock(),
                _ => None,
            };
            if free.is_none() {
                let retry = deadline.min(Instant::now() + RETRY);
                self.changed.wait_until(&mut desk, retry);
            }
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            if free.is_some() {
                return free;
            }
        }
    }

    /// The progress lock, for something short: whoever drives makes way.
    pub(crate) fn summon(&self) -> MutexGuard<'_, Driver> {
        self.summoned.fetch_add(1, Ordering::SeqCst);
        let driver = loop {
            self.wake_driver();
            if let Some(driver) = self.progress.try_lock_for(Duration::from_millis(1)) {
                break driver;
            }
        };
        self.summoned.fetch_sub(1, Ordering::SeqCst);
        driver
    }

    /// Takes up a set.
    pub(crate) fn add(&self, set: ProcessSet) -> Result<()> {
        let mut driver = self.summon();
        let stopped = self.desk.lock().stopped().cloned();
        if stopped.is_none() {
            driver.sets.push(set);
        }
        self.leave(driver);
        stopped.map_or(Ok(()), |cause| Err(Error::Stopped { cause }))
    }

    /// Leaves a set; it ends when its members need its links no more, at `deadline` at the latest.
    pub(crate) fn remove(&self, key: usize, cause: Cause, deadline: Instant) {
        let cause = Arc::new(cause);
        let mut driver = self.summon();
        self.desk.lock().leave(key, &cause);
        self.hand_in(&mut driver);
        let driven = &mut *driver;
        if let Some(set) = driven.sets.iter_mut().find(|set| set.key == key) {
            set.retire(cause, deadline, &mut driven.finished);
        }
        self.post_all(driven, key);
        self.leave(driver);
    }

    /// Gives up the lock; whoever wants it is told, and if nobody does, the background thread is.
    pub(crate) fn leave(&self, driver: MutexGuard<'_, Driver>) {
        self.unlock(driver);
        self.see_to_it();
    }

    fn unlock(&self, driver: MutexGuard<'_, Driver>) {
        self.busy.store(driver.is_busy(), Ordering::SeqCst);
        self.drives.fetch_add(1, Ordering::Relaxed);
        drop(driver);
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            // Under the lock, so that a waiter is either asleep or has not looked yet.
            let desk = self.desk.lock();
            self.changed.notify_all();
            drop(desk);
        }
    }

    /// If something is left to drive and nobody wants to, the background thread shall.
    fn see_to_it(&self) {
        let left = self.busy.load(Ordering::SeqCst) || self.queued.load(Ordering::SeqCst);
        if left && self.wanted.load(Ordering::SeqCst) == 0 {
            self.background.call();
        }
    }

    /// The background thread drives until nothing is left or somebody wants to; true if it had the lock.
    pub(crate) fn drive_in_background(&self, listen: bool) -> bool {
        if self.wanted.load(Ordering::SeqCst) > 0 || self.summoned.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let Some(mut driver) = self.progress.try_lock() else { return false };
        self.drive(&mut driver, if listen { Until::Something } else { Until::Idle });
        self.leave(driver);
        true
    }
}

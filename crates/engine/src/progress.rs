// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Progress: waiting threads help, and the holder of the progress lock drives for all.
//!
//! Locks, in the order in which they may be taken: `progress`, then `desk`. `background` is taken
//! alone. [`signals`] contains what they exchange without a lock.

mod drive;
mod patience;
mod signals;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farandole_world::World;
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::patience::Patience;
use self::signals::Signals;
use crate::background::Background;
use crate::callbacks::{Call, Callbacks};
use crate::desk::{Desk, Submission};
use crate::set::{Finished, ProcessSet};
use crate::{Cause, Completion, Error, Handle, ProgressHost, Result, Settings, Statistics};

/// Interval at which this process sends signs of life and checks its peers.
pub(crate) const BEAT: Duration = Duration::from_millis(250);
/// A waiter that does not get the progress lock tries again after this time at the latest.
const RETRY: Duration = Duration::from_millis(50);
/// Time for which a waiter spins for the progress lock before it sleeps.
const CONTEND: Duration = Duration::from_micros(20);

/// The state under the progress lock.
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
    /// Statistics of removed sets.
    pub(crate) past: Statistics,
    pub(crate) stopped: bool,
}

impl Driver {
    fn is_busy(&self) -> bool {
        !self.stopped && self.sets.iter().any(ProcessSet::is_busy)
    }
}

/// The waiter for which a thread drives.
#[derive(Clone, Copy)]
enum Until {
    /// Itself: until its result is there or its time is over.
    Done(Handle, Instant),
    /// For all: until nothing is in progress or another thread wants to drive.
    Idle,
    /// For no local waiter: sleeping on behalf of peers until anything happens.
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
    signals: Signals,
    /// Grows each time a thread drove.
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
            desk: Mutex::new(Desk::default()),
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
            signals: Signals::default(),
            drives: AtomicU64::new(0),
        }
    }

    /// A submitter has left something on the desk and continues with other things: peers hear of it
    /// now, the background thread does the rest. Quick, for the caller may hold a lock of its own.
    pub(crate) fn announce(&self) {
        self.signals.submitted();
        self.see_that_somebody_drives();
    }

    /// If no thread drives, submits the requests on the desk and lets the background thread drive.
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
        self.signals.submitted_quietly();
    }

    fn wake_driver(&self) {
        if self.signals.has_sleeper() {
            self.host.unpark();
        }
    }

    /// Waits for a result, and drives if no other thread does.
    pub(crate) fn wait(&self, handle: Handle, deadline: Instant) -> Result<Option<Completion>> {
        self.signals.wants();
        while let Some(mut driver) = self.contend(handle, deadline) {
            self.drive(&mut driver, Until::Done(handle, deadline));
            self.unlock(driver);
            if Instant::now() >= deadline || !self.desk.lock().is_pending(handle) {
                break;
            }
        }
        self.signals.wants_no_more();
        self.see_to_it();
        self.desk.lock().take(handle)
    }

    /// The progress lock, or nothing when the result is there or the time is over.
    fn contend(&self, handle: Handle, deadline: Instant) -> Option<MutexGuard<'_, Driver>> {
        let start = Instant::now();
        loop {
            if !self.signals.is_summoned()
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
            self.signals.waits();
            let free = if self.signals.is_summoned() { None } else { self.progress.try_lock() };
            if free.is_none() {
                let retry = deadline.min(Instant::now() + RETRY);
                self.changed.wait_until(&mut desk, retry);
            }
            self.signals.waits_no_more();
            if free.is_some() {
                return free;
            }
        }
    }

    /// The progress lock, for a short time: the driving thread makes way.
    pub(crate) fn summon(&self) -> MutexGuard<'_, Driver> {
        self.signals.summons();
        let driver = loop {
            self.wake_driver();
            if let Some(driver) = self.progress.try_lock_for(Duration::from_millis(1)) {
                break driver;
            }
        };
        self.signals.has_come();
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

    /// Releases the lock, and wakes a thread that wants it, or else the background thread.
    pub(crate) fn leave(&self, driver: MutexGuard<'_, Driver>) {
        self.unlock(driver);
        self.see_to_it();
    }

    fn unlock(&self, driver: MutexGuard<'_, Driver>) {
        self.signals.leaves(driver.is_busy());
        self.drives.fetch_add(1, Ordering::Relaxed);
        drop(driver);
        if self.signals.unlocked() {
            // Under the lock, so that a waiter is either asleep or has not looked yet.
            let desk = self.desk.lock();
            self.changed.notify_all();
            drop(desk);
        }
    }

    /// If work is left and no thread wants to drive, wakes the background thread.
    fn see_to_it(&self) {
        if self.signals.is_left() {
            self.background.call();
        }
    }

    /// Lets the background thread drive until nothing is left or another thread wants to; true if
    /// it had the lock.
    pub(crate) fn drive_in_background(&self, listen: bool) -> bool {
        if self.signals.is_wanted() || self.signals.is_summoned() {
            return false;
        }
        let Some(mut driver) = self.progress.try_lock() else { return false };
        self.drive(&mut driver, if listen { Until::Something } else { Until::Idle });
        self.leave(driver);
        true
    }
}

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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use farandole_world::World;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::background::Background;
use crate::callbacks::{Call, Callbacks};
use crate::desk::{Desk, Submission};
use crate::set::{Finished, ProcessSet, Step};
use crate::{Cause, Completion, Handle, ProgressHost, Result, Settings};

/// How often peers are told that this process lives, and looked at.
pub(crate) const BEAT: Duration = Duration::from_millis(250);
/// How often the clock is compared with deadlines while driving.
const TICK: Duration = Duration::from_millis(20);
/// Longest sleep while a lost peer may yet turn out to have left in order.
const DOUBT: Duration = Duration::from_millis(5);
/// A waiter that does not get the progress lock tries again after this time at the latest.
const RETRY: Duration = Duration::from_millis(50);
/// How long a waiter spins for the progress lock before it sleeps.
const CONTEND: Duration = Duration::from_micros(20);

/// What the progress lock guards.
pub(crate) struct Driver {
    pub(crate) sets: Vec<ProcessSet>,
    intake: Vec<Submission>,
    finished: Vec<Finished>,
    calls: Vec<Call>,
    ticked: Instant,
    /// The driver slept: look at clocks and peers with the next step.
    woken: bool,
    /// Grows with every result posted.
    posted: u64,
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
        Self {
            crowded: world.local_ranks().len() > cores,
            world,
            settings,
            host,
            desk: Mutex::new(Desk::new(sets.len())),
            progress: Mutex::new(Driver {
                sets,
                intake: Vec::new(),
                finished: Vec::new(),
                calls: Vec::new(),
                ticked: Instant::now(),
                woken: true,
                posted: 0,
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

    /// A submitter has left something on the desk and goes on with other things.
    pub(crate) fn announce(&self) {
        self.queued.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        match self.progress.try_lock() {
            Some(mut driver) => {
                self.step(&mut driver, Instant::now());
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

    /// One step on behalf of whoever is waiting, if nobody drives.
    pub(crate) fn help(&self) {
        if let Some(mut driver) = self.progress.try_lock() {
            self.step(&mut driver, Instant::now());
            self.leave(driver);
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
            if start.elapsed() < CONTEND {
                self.pause();
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

    fn drive(&self, driver: &mut Driver, until: Until) {
        let spin = match until {
            Until::Done(..) if self.crowded => self.settings.spin / 8,
            Until::Done(..) => self.settings.spin,
            // The framework computes meanwhile: leave it the core.
            Until::Idle => self.settings.spin / 32,
            Until::Something => Duration::ZERO,
        };
        let mut still_since: Option<Instant> = None;
        let mut posted = driver.posted.wrapping_sub(1);
        loop {
            let now = Instant::now();
            let moved = self.step(driver, now);
            let over = match until {
                Until::Done(handle, deadline) => {
                    let news = std::mem::replace(&mut posted, driver.posted) != driver.posted;
                    now >= deadline || (news && !self.desk.lock().is_pending(handle))
                }
                Until::Idle | Until::Something => {
                    self.wanted.load(Ordering::SeqCst) > 0
                        || self.background.is_stopping()
                        || (matches!(until, Until::Idle) && !driver.is_busy())
                }
            };
            if over || driver.stopped || self.summoned.load(Ordering::SeqCst) > 0 {
                return;
            }
            if moved {
                still_since = None;
                continue;
            }
            if now.duration_since(*still_since.get_or_insert(now)) < spin {
                self.pause();
                continue;
            }
            let beat = now + if driver.sets.iter().any(ProcessSet::is_in_doubt) { DOUBT } else { BEAT };
            let limit = match until {
                Until::Done(_, deadline) => deadline.min(beat),
                Until::Idle | Until::Something => beat,
            };
            self.park(driver, until, limit);
            if matches!(until, Until::Something) {
                // One look at what came; more is for the next round.
                self.step(driver, Instant::now());
                return;
            }
            still_since = None;
        }
    }

    fn park(&self, driver: &mut Driver, until: Until, limit: Instant) {
        self.parked.store(true, Ordering::SeqCst);
        self.host.prepare();
        fence(Ordering::SeqCst);
        let called = self.queued.load(Ordering::SeqCst)
            || self.summoned.load(Ordering::SeqCst) > 0
            || (!matches!(until, Until::Done(..)) && self.wanted.load(Ordering::SeqCst) > 0)
            || self.background.is_stopping();
        let now = Instant::now();
        if called || self.step(driver, now) || driver.stopped {
            self.host.cancel();
        } else {
            self.host.park(limit.saturating_duration_since(now));
            self.host.cancel();
            driver.woken = true;
        }
        self.parked.store(false, Ordering::SeqCst);
    }

    /// After an orderly stop: keeps links open until no peer needs them, but not past `deadline`.
    pub(crate) fn farewell(&self, driver: &mut Driver, deadline: Instant) {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            // Every set takes its step, also those after one that is not done.
            let open = driver.sets.iter_mut().filter_map(|set| (!set.farewell(now)).then_some(())).count();
            if open == 0 || now >= deadline {
                return;
            }
            if now.duration_since(start) < self.settings.spin {
                self.pause();
                continue;
            }
            // Short enough that a farewell that came just before is not waited for.
            self.host.prepare();
            self.host.park(DOUBT);
            self.host.cancel();
        }
    }

    fn pause(&self) {
        if self.crowded {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    /// Takes what was submitted, polls every set once, posts what completed; true when anything moved.
    pub(crate) fn step(&self, driver: &mut Driver, now: Instant) -> bool {
        if driver.stopped {
            return false;
        }
        match self.try_step(driver, now) {
            Ok(moved) => moved,
            Err(cause) => {
                self.stop(driver, cause);
                true
            }
        }
    }

    fn try_step(&self, driver: &mut Driver, now: Instant) -> Step<bool> {
        let mut moved = false;
        if self.queued.load(Ordering::SeqCst) {
            self.queued.store(false, Ordering::SeqCst);
            self.desk.lock().drain(&mut driver.intake);
            moved = !driver.intake.is_empty();
            for Submission { set, entry, signature } in driver.intake.drain(..) {
                let mut finished = Vec::new();
                driver.sets[set].enqueue(entry, signature, &mut finished)?;
                if !finished.is_empty() {
                    self.post(set, &mut finished, &mut driver.calls);
                    driver.posted += 1;
                }
            }
        }
        let due = driver.woken || now.saturating_duration_since(driver.ticked) >= TICK;
        for index in 0..driver.sets.len() {
            let set = &mut driver.sets[index];
            moved |= set.poll(now, &mut driver.finished)?;
            if due {
                set.tick(now)?;
            }
            if let Some(cause) = set.left() {
                self.desk.lock().leave(index, cause);
            }
            if !driver.finished.is_empty() {
                self.post(index, &mut driver.finished, &mut driver.calls);
                driver.posted += 1;
            }
        }
        if due {
            driver.ticked = now;
            driver.woken = false;
            if let Err(error) = self.host.check() {
                driver.sets.iter_mut().for_each(|set| set.suspect(error.clone(), now));
            }
        }
        Ok(moved)
    }

    fn post(&self, set: usize, finished: &mut Vec<Finished>, calls: &mut Vec<Call>) {
        let mut desk = self.desk.lock();
        desk.post(set, finished, calls);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.changed.notify_all();
        }
        drop(desk);
        self.callbacks.send(calls);
    }

    /// Ends everything: nothing touches a buffer any more, peers are told, every pending request fails.
    pub(crate) fn stop(&self, driver: &mut Driver, cause: Cause) {
        if driver.stopped {
            return;
        }
        driver.stopped = true;
        let orderly = matches!(cause, Cause::ShutDown);
        let cause = Arc::new(cause);
        self.desk.lock().stop(Arc::clone(&cause), &mut driver.calls);
        for (index, set) in driver.sets.iter_mut().enumerate() {
            if orderly {
                set.depart(&mut driver.finished);
            } else {
                set.abort(&cause);
                set.fail(&cause, &mut driver.finished);
            }
            self.post(index, &mut driver.finished, &mut driver.calls);
        }
        driver.posted += 1;
        let desk = self.desk.lock();
        self.changed.notify_all();
        drop(desk);
        self.callbacks.send(&mut driver.calls);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Signals between the threads of an engine, without a lock.
//!
//! No wake-up is lost (EN-5). There are three pairs of a side that leaves something and a side that
//! looks for it. In each pair, both sides write, fence (SeqCst), and then read what the other
//! wrote, so that at least one of them sees the other:
//!
//! - *Submission against unlocking.* A submitter sets `queued` and then tries the lock; the driver
//!   unlocks and then reads `queued`. Either the submitter gets the lock, or the driver sees the
//!   queue and has it driven.
//! - *Submission against sleep.* A submitter sets `queued` (a waiter `wanted`) and then reads
//!   `parked`; the driver sets `parked`, prepares its parker, and then reads `queued` and `wanted`
//!   and polls every link once more before it sleeps. Peers do the same with the parker's own flag.
//! - *Waiting against unlocking.* A waiter counts itself in `waiters` under the desk lock, tries
//!   the progress lock once more, and sleeps on the condition, which gives up the desk lock; the
//!   driver unlocks, then reads `waiters`, and notifies under the desk lock. Results are posted
//!   under the desk lock as well.
//!
//! Loom tries every order of each pair (`make loom`).

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

#[derive(Debug, Default)]
pub(super) struct Signals {
    /// The desk's queue is not empty.
    queued: AtomicBool,
    /// Threads that want to drive for themselves: the background thread makes way.
    wanted: AtomicUsize,
    /// Threads that want the lock for a short time: all others make way.
    summoned: AtomicUsize,
    /// Threads asleep on the desk's condition.
    waiters: AtomicUsize,
    /// The driver sleeps or is about to.
    parked: AtomicBool,
    /// Something was in progress when the last driver left.
    busy: AtomicBool,
}

impl Signals {
    /// Submitter: something lies on the desk. Try the lock next, and if it is taken, look for a
    /// [sleeper](Self::has_sleeper).
    pub(super) fn submitted(&self) {
        self.queued.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Like [`submitted`](Self::submitted), by a thread that waits for it next.
    pub(super) fn submitted_quietly(&self) {
        self.queued.store(true, Ordering::SeqCst);
    }

    /// Returns whether something lies on the desk.
    pub(super) fn is_queued(&self) -> bool {
        self.queued.load(Ordering::SeqCst)
    }

    /// Driver, before it empties the desk: whether something lies there.
    pub(super) fn takes(&self) -> bool {
        if !self.is_queued() {
            return false;
        }
        self.queued.store(false, Ordering::SeqCst);
        true
    }

    pub(super) fn wants(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn wants_no_more(&self) {
        self.wanted.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) > 0
    }

    pub(super) fn summons(&self) {
        self.summoned.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn has_come(&self) {
        self.summoned.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn is_summoned(&self) -> bool {
        self.summoned.load(Ordering::SeqCst) > 0
    }

    /// Driver: about to sleep. Look at everything once more after this.
    pub(super) fn parks(&self, prepare: impl FnOnce()) {
        self.parked.store(true, Ordering::SeqCst);
        prepare();
        fence(Ordering::SeqCst);
    }

    /// Driver: awake again, or after all.
    pub(super) fn is_up(&self) {
        self.parked.store(false, Ordering::SeqCst);
    }

    /// Returns whether the driver has to be woken for what was left before.
    pub(super) fn has_sleeper(&self) -> bool {
        self.parked.load(Ordering::SeqCst)
    }

    /// Waiter, under the desk lock: about to sleep on its condition. Try the progress lock once
    /// more after this.
    pub(super) fn waits(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    pub(super) fn waits_no_more(&self) {
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether a thread has to be notified of results, under the desk lock.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::SeqCst) > 0
    }

    /// Driver, before it unlocks: whether something is in progress.
    pub(super) fn leaves(&self, busy: bool) {
        self.busy.store(busy, Ordering::SeqCst);
    }

    /// Driver, after it unlocked: whether a thread has to be notified that the lock is free.
    pub(super) fn unlocked(&self) -> bool {
        fence(Ordering::SeqCst);
        self.has_waiters()
    }

    /// After unlocking: whether there is work and no thread that will drive.
    pub(super) fn is_left(&self) -> bool {
        (self.busy.load(Ordering::SeqCst) || self.is_queued()) && !self.is_wanted()
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Instant;

    use farandole_collectives::Memory;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;
    use crate::desk::{Desk, Submission};
    use crate::set::{Finished, simulation::request};
    use crate::{Completion, Handle};

    const SET: usize = 0;

    /// The parts of an engine for this model: the desk and the signals are the real ones, under
    /// loom's locks.
    #[derive(Default)]
    struct Model {
        signals: Signals,
        /// Submissions that were driven.
        progress: Mutex<usize>,
        desk: Mutex<Desk>,
        changed: Condvar,
        /// The parker: a wake is kept until it is answered.
        woken: Mutex<bool>,
        wake: Condvar,
        /// The background thread was called.
        called: Mutex<bool>,
    }

    impl Model {
        fn put(&self) -> Handle {
            let input = Memory::new(4);
            let (entry, signature) = request(&Arc::from("t"), &input, Instant::now());
            let mut desk = self.desk.lock().unwrap();
            desk.open(SET).unwrap();
            desk.admit(Submission { set: SET, entry, signature }, None)
        }

        /// Drives: takes what lies on the desk, and posts the results.
        fn step(&self, driven: &mut usize) {
            if self.signals.takes() {
                let (mut intake, mut calls) = (VecDeque::new(), Vec::new());
                self.desk.lock().unwrap().drain(&mut intake);
                *driven += intake.len();
                let done = |Submission { entry, .. }: Submission| Finished {
                    handle: entry.handle,
                    name: entry.name,
                    result: Ok(Completion::default()),
                };
                let mut finished = intake.into_iter().map(done).collect();
                let mut desk = self.desk.lock().unwrap();
                desk.post(SET, &mut finished, &mut calls);
                if self.signals.has_waiters() {
                    self.changed.notify_all();
                }
            }
        }

        fn leave(&self, driven: loom::sync::MutexGuard<'_, usize>) {
            self.signals.leaves(false);
            drop(driven);
            if self.signals.unlocked() {
                let desk = self.desk.lock().unwrap();
                self.changed.notify_all();
                drop(desk);
            }
            if self.signals.is_left() {
                *self.called.lock().unwrap() = true;
            }
        }

        fn wake(&self) {
            if self.signals.has_sleeper() {
                *self.woken.lock().unwrap() = true;
                self.wake.notify_all();
            }
        }

        /// Like `Inner::announce`.
        fn announce(&self) {
            self.put();
            self.signals.submitted();
            match self.progress.try_lock() {
                Ok(mut driven) => {
                    self.step(&mut driven);
                    self.leave(driven);
                }
                Err(_) => self.wake(),
            }
        }

        /// Like `Inner::wait`; whether the result is there.
        fn wait(&self) -> bool {
            let handle = self.put();
            self.signals.submitted_quietly();
            self.signals.wants();
            loop {
                if let Ok(mut driven) = self.progress.try_lock() {
                    self.step(&mut driven);
                    self.leave(driven);
                    break;
                }
                self.wake();
                let desk = self.desk.lock().unwrap();
                if !desk.is_pending(handle) {
                    break;
                }
                self.signals.waits();
                let free = self.progress.try_lock();
                if let Ok(mut driven) = free {
                    self.signals.waits_no_more();
                    drop(desk);
                    self.step(&mut driven);
                    self.leave(driven);
                    break;
                }
                drop(free);
                // Without a time limit here: loom reports a thread that is never notified.
                drop(self.changed.wait(desk).unwrap());
                self.signals.waits_no_more();
            }
            self.signals.wants_no_more();
            self.desk.lock().unwrap().take(handle).unwrap().is_some()
        }
    }

    #[test]
    fn loom_en_5_a_submission_is_taken_or_the_background_is_called() {
        loom::model(|| {
            let model = Arc::new(Model::default());
            let other = Arc::clone(&model);
            let driver = thread::spawn(move || {
                if let Ok(mut driven) = other.progress.try_lock() {
                    other.step(&mut driven);
                    other.leave(driven);
                }
            });
            model.announce();
            driver.join().unwrap();
            let (driven, called) = (*model.progress.lock().unwrap(), *model.called.lock().unwrap());
            assert!(driven == 1 || called, "driven: {driven}, called: {called}");
        });
    }

    #[test]
    fn loom_en_5_a_submission_wakes_a_driver_that_sleeps() {
        loom::model(|| {
            let model = Arc::new(Model::default());
            let other = Arc::clone(&model);
            // Takes the lock before all submissions.
            let mut driven = model.progress.lock().unwrap();
            let submitter = thread::spawn(move || other.announce());
            while *driven == 0 {
                model.signals.parks(|| ());
                if !model.signals.is_queued() {
                    let mut woken = model.woken.lock().unwrap();
                    while !*woken {
                        woken = model.wake.wait(woken).unwrap();
                    }
                    *woken = false;
                }
                model.signals.is_up();
                model.step(&mut driven);
            }
            model.leave(driven);
            submitter.join().unwrap();
        });
    }

    #[test]
    fn loom_en_5_a_waiter_gets_its_result_or_the_lock() {
        loom::model(|| {
            let model = Arc::new(Model::default());
            let other = Arc::clone(&model);
            let driver = thread::spawn(move || {
                if let Ok(mut driven) = other.progress.try_lock() {
                    other.step(&mut driven);
                    other.leave(driven);
                }
            });
            assert!(model.wait());
            driver.join().unwrap();
            assert_eq!(*model.progress.lock().unwrap(), 1);
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Signals between the threads of an engine, exchanged without a lock.
//!
//! No wake-up is lost (EN-5). There are three pairs of a side that stores something and a side that
//! checks for it. In each pair, both sides write, fence (SeqCst), and then read the value of the
//! other side, so at least one side sees the other:
//!
//! - *Submission against unlocking.* A submitter sets `queued` and then tries the lock; the driver
//!   unlocks and then reads `queued`. Either the submitter gets the lock, or the driver sees the
//!   queue and has it driven.
//! - *Submission against sleep.* A submitter sets `queued` (a waiter `wanted`) and then reads
//!   `parked`. The driver sets `parked`, prepares its parker, reads `queued` and `wanted`, and
//!   polls every link once more before it sleeps. Peers do the same with the parker's own flag.
//! - *Waiting against unlocking.* A waiter counts itself in `waiters` under the `submissions` lock,
//!   tries the progress lock once more, and sleeps on the condition, which releases the
//!   `submissions` lock. The driver unlocks, reads `waiters`, and notifies under the `submissions`
//!   lock. Results are posted under the `submissions` lock as well.
//!
//! Loom tries every order of each pair (`make loom`).

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

#[derive(Debug, Default)]
pub(super) struct DriverSignals {
    /// Whether the queue of the submission table is not empty.
    queued: AtomicBool,
    /// Number of threads that want to drive for themselves: the background thread yields to them.
    wanted: AtomicUsize,
    /// Number of threads that want the progress lock for a short time: all other threads yield.
    summoned: AtomicUsize,
    /// Number of threads that sleep on the condition of the `submissions` lock.
    waiters: AtomicUsize,
    /// Whether the driver sleeps or is about to sleep.
    parked: AtomicBool,
    /// Whether work was in progress when the last driver released the lock.
    busy: AtomicBool,
}

impl DriverSignals {
    /// Signals that the queue is not empty; for a submitter. Next, try the progress lock; if it is
    /// taken, check for a [parked driver](Self::has_parked_driver).
    pub(super) fn mark_submitted(&self) {
        self.queued.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Like [`mark_submitted`](Self::mark_submitted), without the fence; for a thread that waits
    /// for the result next.
    pub(super) fn mark_submitted_unfenced(&self) {
        // No fence: the thread drives the request itself, or fences in `register_waiter` before it
        // sleeps.
        self.queued.store(true, Ordering::SeqCst);
    }

    /// Returns whether the queue is not empty.
    pub(super) fn has_queued_submissions(&self) -> bool {
        self.queued.load(Ordering::SeqCst)
    }

    /// Clears `queued` and returns whether the queue was not empty; for the driver, before it
    /// drains the queue.
    pub(super) fn take_queued_flag(&self) -> bool {
        if !self.has_queued_submissions() {
            return false;
        }
        // Before the drain: a submission that comes in between sets the flag again.
        self.queued.store(false, Ordering::SeqCst);
        true
    }

    pub(super) fn increment_lock_waiters(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn decrement_lock_waiters(&self) {
        self.wanted.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn is_lock_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) > 0
    }

    pub(super) fn increment_preempt_requests(&self) {
        self.summoned.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn decrement_preempt_requests(&self) {
        self.summoned.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn is_preempt_requested(&self) -> bool {
        self.summoned.load(Ordering::SeqCst) > 0
    }

    /// Signals that the driver is about to sleep. It must check everything once more after this
    /// call.
    pub(super) fn mark_parked(&self, prepare: impl FnOnce()) {
        self.parked.store(true, Ordering::SeqCst);
        prepare();
        // Pairs with the fence in `mark_submitted`.
        fence(Ordering::SeqCst);
    }

    /// Signals that the driver is awake, after a sleep or instead of one.
    pub(super) fn mark_awake(&self) {
        self.parked.store(false, Ordering::SeqCst);
    }

    /// Returns whether the driver is parked and must be woken for a submission made before this
    /// call.
    pub(super) fn has_parked_driver(&self) -> bool {
        self.parked.load(Ordering::SeqCst)
    }

    /// Signals that a waiter is about to sleep on the condition. Call it under the `submissions`
    /// lock, and try the progress lock once more after it.
    pub(super) fn register_waiter(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    pub(super) fn unregister_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether a thread must be notified of results. Call it under the `submissions` lock.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::SeqCst) > 0
    }

    /// Stores whether work is in progress; for the driver, before it unlocks.
    pub(super) fn store_busy_flag(&self, busy: bool) {
        self.busy.store(busy, Ordering::SeqCst);
    }

    /// Returns whether a thread must be notified that the lock is free; for the driver, after it
    /// unlocked.
    pub(super) fn should_notify_waiters(&self) -> bool {
        // Pairs with the fence in `register_waiter`.
        fence(Ordering::SeqCst);
        self.has_waiters()
    }

    /// Returns whether work is left that no waiting thread will drive; to be called after
    /// unlocking.
    pub(super) fn needs_driver(&self) -> bool {
        (self.busy.load(Ordering::SeqCst) || self.has_queued_submissions())
            && !self.is_lock_wanted()
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Instant;

    use farandole_kernels::HostMemory;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;
    use crate::set::{FinishedRequest, tests::allreduce_request};
    use crate::submission_table::{CheckedSubmission, SubmissionTable};
    use crate::{RequestCompletion, RequestHandle};

    const MODEL_SET_KEY: usize = 0;

    /// The parts of an engine for this model: the real submission table and the real signals, under
    /// loom's locks.
    #[derive(Default)]
    struct ProgressModel {
        signals: DriverSignals,
        /// Number of submissions that were driven.
        progress: Mutex<usize>,
        submissions: Mutex<SubmissionTable>,
        changed: Condvar,
        /// The parker's flag: a wake-up stays set until the driver has consumed it.
        woken: Mutex<bool>,
        wake: Condvar,
        /// Whether the background thread was called.
        called: Mutex<bool>,
    }

    impl ProgressModel {
        fn put_submission(&self) -> RequestHandle {
            let input = HostMemory::new(4);
            let (entry, signature) = allreduce_request(&Arc::from("t"), &input, Instant::now());
            let mut submissions = self.submissions.lock().unwrap();
            submissions.check_set_open(MODEL_SET_KEY).unwrap();
            submissions
                .admit_submission(CheckedSubmission { set: MODEL_SET_KEY, entry, signature }, None)
        }

        /// Drives: drains the queue and posts the results.
        fn drive_step(&self, driven: &mut usize) {
            if self.signals.take_queued_flag() {
                let (mut intake, mut calls) = (VecDeque::new(), Vec::new());
                self.submissions.lock().unwrap().drain_queue(&mut intake);
                *driven += intake.len();
                let done = |CheckedSubmission { entry, .. }: CheckedSubmission| FinishedRequest {
                    handle: entry.handle,
                    name: entry.name,
                    result: Ok(RequestCompletion::default()),
                };
                let mut finished = intake.into_iter().map(done).collect();
                let mut submissions = self.submissions.lock().unwrap();
                submissions.post_results(MODEL_SET_KEY, &mut finished, &mut calls);
                if self.signals.has_waiters() {
                    self.changed.notify_all();
                }
            }
        }

        fn release_driver(&self, driven: loom::sync::MutexGuard<'_, usize>) {
            self.signals.store_busy_flag(false);
            drop(driven);
            if self.signals.should_notify_waiters() {
                let submissions = self.submissions.lock().unwrap();
                self.changed.notify_all();
                drop(submissions);
            }
            if self.signals.needs_driver() {
                *self.called.lock().unwrap() = true;
            }
        }

        fn wake_driver(&self) {
            if self.signals.has_parked_driver() {
                *self.woken.lock().unwrap() = true;
                self.wake.notify_all();
            }
        }

        /// Like `EngineShared::announce_submission`.
        fn announce_submission(&self) {
            self.put_submission();
            self.signals.mark_submitted();
            match self.progress.try_lock() {
                Ok(mut driven) => {
                    self.drive_step(&mut driven);
                    self.release_driver(driven);
                }
                Err(_) => self.wake_driver(),
            }
        }

        /// Like `EngineShared::wait`; returns whether the result is there.
        fn wait_for_result(&self) -> bool {
            let handle = self.put_submission();
            self.signals.mark_submitted_unfenced();
            self.signals.increment_lock_waiters();
            loop {
                if let Ok(mut driven) = self.progress.try_lock() {
                    self.drive_step(&mut driven);
                    self.release_driver(driven);
                    break;
                }
                self.wake_driver();
                let submissions = self.submissions.lock().unwrap();
                if !submissions.is_pending(handle) {
                    break;
                }
                self.signals.register_waiter();
                let free = self.progress.try_lock();
                if let Ok(mut driven) = free {
                    self.signals.unregister_waiter();
                    drop(submissions);
                    self.drive_step(&mut driven);
                    self.release_driver(driven);
                    break;
                }
                drop(free);
                // Without a time limit here: loom reports a thread that is never notified.
                drop(self.changed.wait(submissions).unwrap());
                self.signals.unregister_waiter();
            }
            self.signals.decrement_lock_waiters();
            self.submissions.lock().unwrap().take_result(handle).unwrap().is_some()
        }
    }

    #[test]
    fn loom_en_5_a_submission_is_taken_or_the_background_is_called() {
        loom::model(|| {
            let model = Arc::new(ProgressModel::default());
            let other = Arc::clone(&model);
            let driver = thread::spawn(move || {
                if let Ok(mut driven) = other.progress.try_lock() {
                    other.drive_step(&mut driven);
                    other.release_driver(driven);
                }
            });
            model.announce_submission();
            driver.join().unwrap();
            let (driven, called) = (*model.progress.lock().unwrap(), *model.called.lock().unwrap());
            assert!(driven == 1 || called, "driven: {driven}, called: {called}");
        });
    }

    #[test]
    fn loom_en_5_a_submission_wakes_a_driver_that_sleeps() {
        loom::model(|| {
            let model = Arc::new(ProgressModel::default());
            let other = Arc::clone(&model);
            // Takes the lock before all submissions.
            let mut driven = model.progress.lock().unwrap();
            let submitter = thread::spawn(move || other.announce_submission());
            while *driven == 0 {
                model.signals.mark_parked(|| ());
                if !model.signals.has_queued_submissions() {
                    let mut woken = model.woken.lock().unwrap();
                    while !*woken {
                        woken = model.wake.wait(woken).unwrap();
                    }
                    *woken = false;
                }
                model.signals.mark_awake();
                model.drive_step(&mut driven);
            }
            model.release_driver(driven);
            submitter.join().unwrap();
        });
    }

    #[test]
    fn loom_en_5_a_waiter_gets_its_result_or_the_lock() {
        loom::model(|| {
            let model = Arc::new(ProgressModel::default());
            let other = Arc::clone(&model);
            let driver = thread::spawn(move || {
                if let Ok(mut driven) = other.progress.try_lock() {
                    other.drive_step(&mut driven);
                    other.release_driver(driven);
                }
            });
            assert!(model.wait_for_result());
            driver.join().unwrap();
            assert_eq!(*model.progress.lock().unwrap(), 1);
        });
    }
}

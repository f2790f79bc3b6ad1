// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The drive loop: the work of the thread that holds the progress lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::background_thread::HEARTBEAT_INTERVAL;
use super::spin_budget::{PeerWaits, SpinBudget};
use super::{DriveGoal, DriverState, EngineShared};
use crate::StopCause;
use crate::callbacks::DueCallback;
use crate::error::StepResult;
use crate::set::{FinishedRequest, ProcessSet, answer_stall_queries};
use crate::submission_table::CheckedSubmission;

/// Interval at which the driver checks deadlines.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Shortest and longest sleep between two polls of a device, because the end of device work wakes
/// no thread. A sleep takes an eighth of the time waited so far.
const DEVICE_POLL_INTERVALS: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_micros(500));
/// Longest sleep while it is open whether a lost peer has departed in order.
const SUSPECT_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl EngineShared {
    pub(super) fn drive_until_goal(&self, driver: &mut DriverState, until: DriveGoal) {
        let mut spin = match until {
            DriveGoal::Done(..) => driver.spin_budget.spin_limit(),
            // The framework computes meanwhile: leave the core to it.
            DriveGoal::Idle => self.settings.spin / 32,
            DriveGoal::AnyEvent => Duration::ZERO,
        };
        let mut waits = PeerWaits::begin_drive(Instant::now());
        let mut still_since: Option<Instant> = None;
        // Whether the driver has slept since nothing moved. It then only polls a device and does
        // not spin again.
        let mut slept = false;
        // Differs from the counter, so that the first turn looks for the result.
        let mut posted = driver.results_posted.wrapping_sub(1);
        loop {
            let now = Instant::now();
            let moved = self.drive_step(driver, now);
            let over = match until {
                DriveGoal::Done(handle, deadline) => {
                    let has_new_results = std::mem::replace(&mut posted, driver.results_posted)
                        != driver.results_posted;
                    now >= deadline
                        // Asks the table only after new results, because each question takes a
                        // lock.
                        || (has_new_results && !self.submissions.lock().is_pending(handle))
                }
                DriveGoal::Idle | DriveGoal::AnyEvent => {
                    self.signals.is_lock_wanted()
                        || self.background.is_stopping()
                        || (matches!(until, DriveGoal::Idle) && !driver.is_busy())
                }
            };
            if over || driver.stopped || self.signals.is_preempt_requested() {
                return;
            }
            if moved {
                if let Some(since) = still_since.take() {
                    let waited = now.duration_since(since);
                    waits.record_wait(waited);
                    if !slept && !spin.is_zero() && matches!(until, DriveGoal::Done(..)) {
                        // Capped, because a longer time means that the thread had no core.
                        driver.spin_budget.record_success(waited.min(spin));
                    }
                }
                slept = false;
                continue;
            }
            if still_since.is_none() && matches!(until, DriveGoal::Done(..)) {
                spin = self.spin_limit_of_wait(driver, &waits, now);
            }
            let spun = now.duration_since(*still_since.get_or_insert(now));
            if !slept && spun < spin {
                self.spin_or_yield(spun);
                continue;
            }
            if !slept && !spin.is_zero() && matches!(until, DriveGoal::Done(..)) {
                driver.spin_budget.record_timeout();
            }
            let glances = driver.sets.iter().any(ProcessSet::waits_for_device);
            let beat = now
                + if glances {
                    (spun / 8).clamp(DEVICE_POLL_INTERVALS.0, DEVICE_POLL_INTERVALS.1)
                } else if driver.sets.iter().any(ProcessSet::has_suspected_peer) {
                    SUSPECT_POLL_INTERVAL
                } else {
                    HEARTBEAT_INTERVAL
                };
            let limit = match until {
                DriveGoal::Done(_, deadline) => deadline.min(beat),
                DriveGoal::Idle | DriveGoal::AnyEvent => beat,
            };
            self.park_driver(driver, until, limit);
            if matches!(until, DriveGoal::AnyEvent) {
                // One step for the new data; the rest is for the next round.
                self.drive_step(driver, Instant::now());
                return;
            }
            slept = glances;
            if !glances && let Some(since) = still_since.take() {
                waits.record_wait(since.elapsed());
            }
        }
    }

    /// Returns the time to spin in a wait that begins.
    fn spin_limit_of_wait(
        &self,
        driver: &DriverState,
        waits: &PeerWaits,
        now: Instant,
    ) -> Duration {
        if self.is_across_hosts && waits.exceed_work(now, self.settings.spin) {
            Duration::ZERO
        } else {
            driver.spin_budget.spin_limit()
        }
    }

    fn park_driver(&self, driver: &mut DriverState, until: DriveGoal, limit: Instant) {
        self.signals.mark_parked(|| self.host.prepare_park());
        let called = self.signals.has_queued_submissions()
            || self.signals.is_preempt_requested()
            || (!matches!(until, DriveGoal::Done(..)) && self.signals.is_lock_wanted())
            || self.background.is_stopping();
        let now = Instant::now();
        // Data that peers committed before `prepare_park` does not wake this thread.
        if called || self.drive_step(driver, now) || driver.stopped {
            self.host.cancel_park();
        } else {
            self.host.park(limit.saturating_duration_since(now));
            self.host.cancel_park();
            driver.woken = true;
        }
        self.signals.mark_awake();
    }

    /// Keeps links open after an orderly stop until no peer needs them, at most until `deadline`.
    pub(crate) fn wait_for_links_to_drain(&self, driver: &mut DriverState, deadline: Instant) {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            // Every set takes its step, also sets after one that is still open.
            let open = driver
                .sets
                .iter_mut()
                .filter_map(|set| (!set.advance_link_drain(now)).then_some(()))
                .count();
            if open == 0 || now >= deadline {
                return;
            }
            let spun = now.duration_since(start);
            if spun < self.settings.spin {
                self.spin_or_yield(spun);
                continue;
            }
            // The sleep is short because a departure message that came just before `prepare_park`
            // does not end it.
            self.host.prepare_park();
            self.host.park(SUSPECT_POLL_INTERVAL);
            self.host.cancel_park();
        }
    }

    pub(super) fn spin_or_yield(&self, spun: Duration) {
        if self.oversubscribed || SpinBudget::should_yield(spun) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    /// Takes submissions, polls every set once and posts results. Returns whether anything moved.
    pub(crate) fn drive_step(&self, driver: &mut DriverState, now: Instant) -> bool {
        if driver.stopped {
            return false;
        }
        match convert_panic_to_stop(|| self.try_drive_step(driver, now)) {
            Ok(moved) => moved,
            Err(cause) => {
                self.stop_engine(driver, cause);
                true
            }
        }
    }

    /// Takes submissions and announces them, which is quick. Returns whether there were any.
    fn take_and_announce_submissions(&self, driver: &mut DriverState) -> StepResult<bool> {
        if !self.signals.take_queued_flag() {
            return Ok(false);
        }
        // Drained at once, so that submitters wait for this lock only for a moment.
        self.submissions.lock().drain_queue(&mut driver.intake);
        let moved = !driver.intake.is_empty();
        // One by one: after a panic, the rest is still in `intake` and fails with the engine.
        while let Some(CheckedSubmission { set, entry, signature }) = driver.intake.pop_front() {
            // A set is never removed while submissions to it are queued.
            if let Some(set) = driver.sets.iter_mut().find(|other| other.key == set) {
                set.enqueue_entry(entry, signature, &mut driver.finished)?;
            }
            self.post_finished_requests(driver, set);
        }
        // After all submissions, so that one frame announces them together.
        driver.sets.iter_mut().try_for_each(|set| set.send_complete_announcements().map(drop))?;
        Ok(moved)
    }

    /// Announces submissions like a step, but moves no data: the callers must return soon.
    pub(super) fn announce_submissions_or_stop(&self, driver: &mut DriverState) {
        if !driver.stopped
            && let Err(cause) = convert_panic_to_stop(|| self.take_and_announce_submissions(driver))
        {
            self.stop_engine(driver, cause);
        }
    }

    fn try_drive_step(&self, driver: &mut DriverState, now: Instant) -> StepResult<bool> {
        let mut moved = self.take_and_announce_submissions(driver)?;
        let due =
            driver.woken || now.saturating_duration_since(driver.last_tick) >= CLOCK_CHECK_INTERVAL;
        for index in 0..driver.sets.len() {
            let set = &mut driver.sets[index];
            moved |= set.poll(now, &mut driver.finished)?;
            if due {
                set.check_stall_time_limits(now)?;
            }
            let key = set.key;
            if let Some(cause) = set.departure_cause() {
                self.submissions.lock().close_set(key, cause);
            }
            self.post_finished_requests(driver, key);
        }
        let past = &mut driver.removed_set_statistics;
        driver.sets.retain_mut(|set| {
            let over = set.is_retired_and_drained(now);
            if over {
                *past = past.sum_with(set.statistics());
            }
            !over
        });
        if due {
            answer_stall_queries(&mut driver.sets, now)?;
            driver.last_tick = now;
            driver.woken = false;
            if let Err(error) = self.host.check_peers() {
                // Only a suspicion: the peer may have departed in order, and its message is still
                // on its way.
                driver.sets.iter_mut().for_each(|set| set.suspect_peer(error.clone(), now));
            }
        }
        Ok(moved)
    }

    /// Posts the finished requests of a set, if any.
    pub(super) fn post_finished_requests(&self, driver: &mut DriverState, key: usize) {
        if !driver.finished.is_empty() {
            self.post_results(key, &mut driver.finished, &mut driver.calls);
            driver.results_posted += 1;
        }
    }

    fn post_results(
        &self,
        set: usize,
        finished: &mut Vec<FinishedRequest>,
        calls: &mut Vec<DueCallback>,
    ) {
        let mut submissions = self.submissions.lock();
        submissions.post_results(set, finished, calls);
        if self.signals.has_waiters() {
            self.changed.notify_all();
        }
        drop(submissions);
        // Outside of the table's lock, under which no other lock is taken.
        self.callbacks.enqueue_calls(calls);
    }

    /// Stops the engine: buffers are not accessed any more, peers get the cause, and every pending
    /// request fails.
    pub(crate) fn stop_engine(&self, driver: &mut DriverState, cause: StopCause) {
        if driver.stopped {
            return;
        }
        // First, so that a panic below does not lead here again.
        driver.stopped = true;
        let orderly = matches!(cause, StopCause::ShutDown);
        tracing::debug!(rank = self.world.rank.0, %cause, "the engine stops");
        let cause = Arc::new(cause);
        // New requests are refused before the old ones fail. A request in between would never
        // complete.
        self.submissions.lock().refuse_all_requests(
            Arc::clone(&cause),
            &mut driver.intake,
            &mut driver.calls,
        );
        let DriverState { sets, finished, calls, .. } = driver;
        if !orderly {
            // Notify the peers of all sets first: after a panic, `fail_set` may panic again.
            sets.iter_mut().for_each(|set| ignore_panic(|| set.broadcast_abort(&cause)));
        }
        for set in sets {
            if orderly {
                // An orderly end sends the departure to the peers and keeps links open until they
                // are done.
                set.begin_departure(&cause, finished);
            } else {
                ignore_panic(|| set.fail_set(&cause, finished));
            }
            self.post_results(set.key, finished, calls);
        }
        driver.results_posted += 1;
        let mut submissions = self.submissions.lock();
        if !orderly {
            submissions.fail_unfinished_requests(&cause, &mut driver.calls);
        }
        self.changed.notify_all();
        drop(submissions);
        self.callbacks.enqueue_calls(&mut driver.calls);
    }
}

/// Continues after a panic; the panic hook has logged it.
fn ignore_panic(work: impl FnOnce()) {
    drop(catch_unwind(AssertUnwindSafe(work)));
}

/// Turns a panic into a stop of the engine, on any driving thread. A panic is a bug, and peers
/// would wait for an engine that works only in part.
fn convert_panic_to_stop(step: impl FnOnce() -> StepResult<bool>) -> StepResult<bool> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or(Err(StopCause::Panicked))
}

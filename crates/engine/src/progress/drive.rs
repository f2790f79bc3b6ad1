// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The work of the holder of the progress lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::patience::Patience;
use super::{BEAT, Driver, Inner, Until};
use crate::Cause;
use crate::callbacks::Call;
use crate::desk::Submission;
use crate::set::{Finished, ProcessSet, Step, answer_questions};

/// Interval at which the clock is compared with deadlines while driving.
const TICK: Duration = Duration::from_millis(20);
/// Shortest and longest sleep between looks at a device, whose end wakes no thread. A sleep takes
/// an eighth of the time waited so far.
const GLANCES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(500));
/// Longest sleep while a lost peer may yet turn out to have left in order.
const DOUBT: Duration = Duration::from_millis(5);

impl Inner {
    pub(super) fn drive(&self, driver: &mut Driver, until: Until) {
        let mut spin = match until {
            Until::Done(..) => driver.patience.limit(),
            // The framework computes meanwhile: leave it the core.
            Until::Idle => self.settings.spin / 32,
            Until::Something => Duration::ZERO,
        };
        let mut still_since: Option<Instant> = None;
        // It has slept since then, and does not spin again: the next looks are at a device.
        let mut slept = false;
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
                    self.signals.is_wanted()
                        || self.background.is_stopping()
                        || (matches!(until, Until::Idle) && !driver.is_busy())
                }
            };
            if over || driver.stopped || self.signals.is_summoned() {
                return;
            }
            if moved {
                if let Some(since) = still_since.take()
                    && !slept
                    && matches!(until, Until::Done(..))
                {
                    // Longer only if the thread had no core.
                    driver.patience.paid(now.duration_since(since).min(spin));
                    spin = driver.patience.limit();
                }
                slept = false;
                continue;
            }
            let spun = now.duration_since(*still_since.get_or_insert(now));
            if !slept && spun < spin {
                self.pause(spun);
                continue;
            }
            if !slept && matches!(until, Until::Done(..)) {
                driver.patience.ran_out();
                spin = driver.patience.limit();
            }
            let glances = driver.sets.iter().any(ProcessSet::waits_for_device);
            let beat = now
                + if glances {
                    (spun / 8).clamp(GLANCES.0, GLANCES.1)
                } else if driver.sets.iter().any(ProcessSet::is_in_doubt) {
                    DOUBT
                } else {
                    BEAT
                };
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
            slept = glances;
            if !glances {
                still_since = None;
            }
        }
    }

    fn park(&self, driver: &mut Driver, until: Until, limit: Instant) {
        self.signals.parks(|| self.host.prepare());
        let called = self.signals.is_queued()
            || self.signals.is_summoned()
            || (!matches!(until, Until::Done(..)) && self.signals.is_wanted())
            || self.background.is_stopping();
        let now = Instant::now();
        if called || self.step(driver, now) || driver.stopped {
            self.host.cancel();
        } else {
            self.host.park(limit.saturating_duration_since(now));
            self.host.cancel();
            driver.woken = true;
        }
        self.signals.is_up();
    }

    /// After an orderly stop: keeps links open until no peer needs them, but not past `deadline`.
    pub(crate) fn farewell(&self, driver: &mut Driver, deadline: Instant) {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            // Every set takes its step, also those after one that is not done.
            let open =
                driver.sets.iter_mut().filter_map(|set| (!set.farewell(now)).then_some(())).count();
            if open == 0 || now >= deadline {
                return;
            }
            let spun = now.duration_since(start);
            if spun < self.settings.spin {
                self.pause(spun);
                continue;
            }
            // Short enough that a farewell that came just before is not waited for.
            self.host.prepare();
            self.host.park(DOUBT);
            self.host.cancel();
        }
    }

    pub(super) fn pause(&self, spun: Duration) {
        if self.crowded || Patience::yields(spun) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    /// Takes what was submitted, polls every set once, posts what completed; true when anything
    /// moved.
    pub(crate) fn step(&self, driver: &mut Driver, now: Instant) -> bool {
        if driver.stopped {
            return false;
        }
        match guarded(|| self.try_step(driver, now)) {
            Ok(moved) => moved,
            Err(cause) => {
                self.stop(driver, cause);
                true
            }
        }
    }

    /// Takes what was submitted and announces it, which is quick; true when there was anything.
    fn take_in(&self, driver: &mut Driver) -> Step<bool> {
        if !self.signals.takes() {
            return Ok(false);
        }
        self.desk.lock().drain(&mut driver.intake);
        let moved = !driver.intake.is_empty();
        while let Some(Submission { set, entry, signature }) = driver.intake.pop_front() {
            // Sets are never taken away while something is on its way to them.
            if let Some(set) = driver.sets.iter_mut().find(|other| other.key == set) {
                set.enqueue(entry, signature, &mut driver.finished)?;
            }
            self.post_all(driver, set);
        }
        driver.sets.iter_mut().try_for_each(|set| set.send_announcement().map(drop))?;
        Ok(moved)
    }

    /// As a step, but for callers that must be back soon: moves no data.
    pub(super) fn hand_in(&self, driver: &mut Driver) {
        if !driver.stopped
            && let Err(cause) = guarded(|| self.take_in(driver))
        {
            self.stop(driver, cause);
        }
    }

    fn try_step(&self, driver: &mut Driver, now: Instant) -> Step<bool> {
        let mut moved = self.take_in(driver)?;
        let due = driver.woken || now.saturating_duration_since(driver.ticked) >= TICK;
        for index in 0..driver.sets.len() {
            let set = &mut driver.sets[index];
            moved |= set.poll(now, &mut driver.finished)?;
            if due {
                set.tick(now)?;
            }
            let key = set.key;
            if let Some(cause) = set.left() {
                self.desk.lock().leave(key, cause);
            }
            self.post_all(driver, key);
        }
        let past = &mut driver.past;
        driver.sets.retain_mut(|set| {
            let over = set.is_over(now);
            if over {
                *past = past.plus(set.statistics);
            }
            !over
        });
        if due {
            answer_questions(&mut driver.sets, now)?;
            driver.ticked = now;
            driver.woken = false;
            if let Err(error) = self.host.check() {
                driver.sets.iter_mut().for_each(|set| set.suspect(error.clone(), now));
            }
        }
        Ok(moved)
    }

    /// Posts what a set has finished, if anything.
    pub(super) fn post_all(&self, driver: &mut Driver, key: usize) {
        if !driver.finished.is_empty() {
            self.post(key, &mut driver.finished, &mut driver.calls);
            driver.posted += 1;
        }
    }

    fn post(&self, set: usize, finished: &mut Vec<Finished>, calls: &mut Vec<Call>) {
        let mut desk = self.desk.lock();
        desk.post(set, finished, calls);
        if self.signals.has_waiters() {
            self.changed.notify_all();
        }
        drop(desk);
        self.callbacks.send(calls);
    }

    /// Ends everything: no buffer is touched any more, peers get the reason, every pending request
    /// fails.
    pub(crate) fn stop(&self, driver: &mut Driver, cause: Cause) {
        if driver.stopped {
            return;
        }
        driver.stopped = true;
        let orderly = matches!(cause, Cause::ShutDown);
        tracing::debug!(rank = self.world.rank.0, %cause, "the engine stops");
        let cause = Arc::new(cause);
        self.desk.lock().stop(Arc::clone(&cause), &mut driver.intake, &mut driver.calls);
        let Driver { sets, finished, calls, .. } = driver;
        if !orderly {
            // Peers of all sets first: what a panic has left half done may panic once more.
            sets.iter_mut().for_each(|set| unwound(|| set.abort(&cause)));
        }
        for set in sets {
            if orderly {
                set.depart(&cause, finished);
            } else {
                unwound(|| set.fail(&cause, finished));
            }
            self.post(set.key, finished, calls);
        }
        driver.posted += 1;
        let mut desk = self.desk.lock();
        if !orderly {
            desk.end(&cause, &mut driver.calls);
        }
        self.changed.notify_all();
        drop(desk);
        self.callbacks.send(&mut driver.calls);
    }
}

/// Goes on after a panic, which has been told.
fn unwound(work: impl FnOnce()) {
    drop(catch_unwind(AssertUnwindSafe(work)));
}

/// A panic is a bug and ends the engine, on any driving thread: peers would wait for one that works
/// only in part.
fn guarded(step: impl FnOnce() -> Step<bool>) -> Step<bool> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or(Err(Cause::Panicked))
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The parker without its system calls, so that loom can try every interleaving of threads that
//! sleep and wake (`make loom`).
//!
//! The models have one sleeping thread, the driving thread, as an engine has. That a wake reaches
//! all of several sleepers depends on the total order of all `SeqCst` accesses. Loom treats them as
//! acquire and release, so it cannot check this;
//! `a_wake_reaches_every_sleeper_though_peers_need_not_ring` runs four real threads instead.

use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};

/// The system calls of one sleeping place.
pub(super) trait ParkerSystemCalls {
    /// Result of a wait.
    type Outcome;
    /// Error of a wait.
    type Error;

    /// Stops asking peers to ring.
    fn clear_parked(&self);
    /// Returns whether peers are asked to ring.
    fn is_parked(&self) -> bool;
    /// Ends all waits until `clear_rings`.
    fn ring_doorbell(&self);
    /// Clears all rings so far.
    fn clear_rings(&self);
    /// Waits for a ring or another event that wakes; returns false at the deadline.
    fn wait_for_ring(&self) -> Result<bool, Self::Error>;
    /// Converts the result of a wait for the caller.
    fn park_outcome(woken: bool) -> Self::Outcome;
}

#[derive(Debug, Default)]
pub(super) struct ParkedThreads {
    /// Number of threads inside `park`.
    count: AtomicU32,
    /// Whether a wake of this process was sent and not cleared yet: further wakes need no system
    /// call.
    signalled: AtomicBool,
}

impl ParkedThreads {
    /// Sleeps, unless there was a ring or a `cancel_park` since the preparation.
    pub(super) fn park_thread<P: ParkerSystemCalls>(
        &self,
        place: &P,
    ) -> Result<P::Outcome, P::Error> {
        self.count.fetch_add(1, Ordering::SeqCst);
        // The count is raised before the flag is read, because `wake_all` reads the flag before the
        // count.
        let woken = if place.is_parked() { place.wait_for_ring() } else { Ok(true) };
        if let Ok(false) = woken {
            // Only the last sleeper clears the flag: the others still need rings.
            if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
                place.clear_parked();
            }
            return Ok(P::park_outcome(false));
        }
        // Cleared before the caller polls: a ring that comes later then wakes the next wait.
        place.clear_rings();
        // After `clear_rings`: in the reverse order, the ring of a wake in between would be cleared
        // and the flag would stay set, so that later wakes would not ring.
        self.signalled.swap(false, Ordering::AcqRel);
        // Other sleepers that saw the cleared ring are rung again. Such a sleeper is either counted
        // by now, or it finds the parked flag cleared.
        place.clear_parked();
        if self.count.fetch_sub(1, Ordering::SeqCst) > 1 {
            place.ring_doorbell();
        }
        woken.map(P::park_outcome)
    }

    /// Wakes all threads that sleep or have prepared to.
    pub(super) fn wake_all(&self, place: &impl ParkerSystemCalls) {
        // Pairs with the fence in `mark_parked`: either the sleeper sees the caller's news, or this
        // thread sees the flag.
        fence(Ordering::SeqCst);
        // The flag is read before the count: a thread that found the flag set, which another thread
        // has cleared since, was counted before.
        let asleep = place.is_parked() || self.count.load(Ordering::SeqCst) > 0;
        if asleep && !self.signalled.swap(true, Ordering::AcqRel) {
            place.ring_doorbell();
        }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn thread_count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// Model of a doorbell, without a shared page and without an eventfd.
    #[derive(Default)]
    struct ModelDoorbell {
        parked: AtomicU32,
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl ModelDoorbell {
        /// Like `ParkedFlag::mark_parked` of `farandole_shm`.
        fn mark_parked(&self) {
            self.parked.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }

        /// Like `ProcessDoorbell::ring_if_parked` of `farandole_shm`.
        fn ring_if_parked(&self) {
            fence(Ordering::SeqCst);
            if self.parked.load(Ordering::Relaxed) != 0
                && self.parked.swap(0, Ordering::AcqRel) != 0
            {
                self.ring_doorbell();
            }
        }
    }

    impl ParkerSystemCalls for ModelDoorbell {
        type Outcome = ();
        type Error = Infallible;

        fn clear_parked(&self) {
            self.parked.store(0, Ordering::SeqCst);
        }

        fn is_parked(&self) -> bool {
            self.parked.load(Ordering::SeqCst) != 0
        }

        fn ring_doorbell(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_all();
        }

        fn clear_rings(&self) {
            *self.rung.lock().unwrap() = false;
        }

        fn wait_for_ring(&self) -> Result<bool, Infallible> {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            Ok(true)
        }

        fn park_outcome(_: bool) {}
    }

    #[derive(Default)]
    struct ParkerModel {
        sleepers: ParkedThreads,
        bell: ModelDoorbell,
        word: AtomicU32,
    }

    impl ParkerModel {
        /// Sleeps until `word` is at least `least`; loom reports a thread that is never woken.
        fn sleep_until(&self, least: u32) {
            while self.word.load(Ordering::Acquire) < least {
                self.bell.mark_parked();
                if self.word.load(Ordering::Acquire) >= least {
                    self.bell.clear_parked();
                    return;
                }
                let Ok(()) = self.sleepers.park_thread(&self.bell);
            }
        }
    }

    fn check_few_preemptions(model: impl Fn() + Sync + Send + 'static) {
        // Three threads have too many interleavings; only those with up to two preemptions are
        // tried.
        let mut few = loom::model::Builder::new();
        few.preemption_bound = Some(2);
        few.check(model);
    }

    #[test]
    fn loom_tr_3_a_thread_that_prepared_and_polled_is_woken() {
        loom::model(|| {
            let world = Arc::new(ParkerModel::default());
            let other = Arc::clone(&world);
            let waker = thread::spawn(move || {
                other.word.store(1, Ordering::Release);
                other.sleepers.wake_all(&other.bell);
            });
            world.sleep_until(1);
            waker.join().unwrap();
        });
    }

    #[test]
    fn loom_tr_3_of_two_wakes_close_together_the_second_is_not_lost() {
        check_few_preemptions(|| {
            let world = Arc::new(ParkerModel::default());
            let (one, two) = (Arc::clone(&world), Arc::clone(&world));
            let first = thread::spawn(move || {
                one.word.fetch_add(1, Ordering::AcqRel);
                one.sleepers.wake_all(&one.bell);
            });
            let second = thread::spawn(move || {
                two.word.fetch_add(1, Ordering::AcqRel);
                two.bell.ring_if_parked();
            });
            world.sleep_until(2);
            first.join().unwrap();
            second.join().unwrap();
        });
    }
}

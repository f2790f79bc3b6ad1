// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The sleepers, and those to wake: the parker without its system calls, so that loom can try every
//! order of what several threads do with it (`make loom`).
//!
//! The models have one sleeper, as an engine has: the driving thread. That a wake reaches all of
//! several rests on the one order of all `SeqCst` accesses, which loom does not know (to it they
//! are acquire and release), so it cannot judge it;
//! `a_wake_reaches_every_sleeper_though_peers_need_not_ring` runs four of them instead.

use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};

/// The parts of one place to sleep in.
pub(super) trait Place {
    /// The result of a wait.
    type Outcome;
    /// The error.
    type Error;

    /// Peers need not ring any more.
    fn unpark(&self);
    /// Returns whether peers shall ring.
    fn parked(&self) -> bool;
    /// Ends all waits until it is answered.
    fn ring(&self);
    /// Forgets all rings so far.
    fn answer(&self);
    /// Waits for a ring, or for anything else that concerns a sleeper; whether it came.
    fn wait(&self) -> Result<bool, Self::Error>;
    /// Returns the result for a sleeper.
    fn outcome(woken: bool) -> Self::Outcome;
}

#[derive(Debug, Default)]
pub(super) struct Sleepers {
    /// Threads inside of `park`.
    count: AtomicU32,
    /// An in-process wake was sent and not answered yet: further ones need no system call.
    signalled: AtomicBool,
}

impl Sleepers {
    /// Sleeps, unless there was a ring or a cancellation since the preparation.
    pub(super) fn park<P: Place>(&self, place: &P) -> Result<P::Outcome, P::Error> {
        self.count.fetch_add(1, Ordering::SeqCst);
        // Counted first, looked second: `wake` looks at the flag first.
        let woken = if place.parked() { place.wait() } else { Ok(true) };
        if let Ok(false) = woken {
            if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
                place.unpark();
            }
            return Ok(P::outcome(false));
        }
        place.answer();
        self.signalled.swap(false, Ordering::AcqRel);
        // Other sleepers that saw it are rung again, since the ring was answered. Either such a
        // sleeper is counted by now, or it finds no parked thread.
        place.unpark();
        if self.count.fetch_sub(1, Ordering::SeqCst) > 1 {
            place.ring();
        }
        woken.map(P::outcome)
    }

    /// Wakes all threads that sleep or have prepared to.
    pub(super) fn wake(&self, place: &impl Place) {
        fence(Ordering::SeqCst);
        // In this order: a thread that found the flag set, which another has reset since, had been
        // counted before.
        let asleep = place.parked() || self.count.load(Ordering::SeqCst) > 0;
        if asleep && !self.signalled.swap(true, Ordering::AcqRel) {
            place.ring();
        }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn count(&self) -> u32 {
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

    /// A bell without a page and without an eventfd.
    #[derive(Default)]
    struct Bell {
        parked: AtomicU32,
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Bell {
        /// As `Parked::park`.
        fn park(&self) {
            self.parked.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }

        /// As `Bell::ring_if_parked`.
        fn ring_if_parked(&self) {
            fence(Ordering::SeqCst);
            if self.parked.load(Ordering::Relaxed) != 0
                && self.parked.swap(0, Ordering::AcqRel) != 0
            {
                self.ring();
            }
        }
    }

    impl Place for Bell {
        type Outcome = ();
        type Error = Infallible;

        fn unpark(&self) {
            self.parked.store(0, Ordering::SeqCst);
        }

        fn parked(&self) -> bool {
            self.parked.load(Ordering::SeqCst) != 0
        }

        fn ring(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_all();
        }

        fn answer(&self) {
            *self.rung.lock().unwrap() = false;
        }

        fn wait(&self) -> Result<bool, Infallible> {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            Ok(true)
        }

        fn outcome(_: bool) {}
    }

    #[derive(Default)]
    struct World {
        sleepers: Sleepers,
        bell: Bell,
        word: AtomicU32,
    }

    impl World {
        /// Sleeps until the word is at least this; loom reports a thread that is never woken.
        fn sleep_until(&self, least: u32) {
            while self.word.load(Ordering::Acquire) < least {
                self.bell.park();
                if self.word.load(Ordering::Acquire) >= least {
                    self.bell.unpark();
                    return;
                }
                let Ok(()) = self.sleepers.park(&self.bell);
            }
        }
    }

    fn few(model: impl Fn() + Sync + Send + 'static) {
        // Three threads have too many orders to try all: those with up to two preemptions.
        let mut few = loom::model::Builder::new();
        few.preemption_bound = Some(2);
        few.check(model);
    }

    #[test]
    fn loom_tr_3_a_thread_that_prepared_and_polled_is_woken() {
        loom::model(|| {
            let world = Arc::new(World::default());
            let other = Arc::clone(&world);
            let waker = thread::spawn(move || {
                other.word.store(1, Ordering::Release);
                other.sleepers.wake(&other.bell);
            });
            world.sleep_until(1);
            waker.join().unwrap();
        });
    }

    #[test]
    fn loom_tr_3_of_two_wakes_close_together_the_second_is_not_lost() {
        few(|| {
            let world = Arc::new(World::default());
            let (one, two) = (Arc::clone(&world), Arc::clone(&world));
            let first = thread::spawn(move || {
                one.word.fetch_add(1, Ordering::AcqRel);
                one.sleepers.wake(&one.bell);
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control words of shared memory through which both sides report their progress and request
//! wake-ups.
//!
//! Nothing here knows where the words lie, so that loom can try every order of what both sides do
//! (`make loom`): a ring's words in `SHM-2`'s roles, a bell's word in `SHM-4`'s.

use crate::sync::{AtomicU32, AtomicUsize, Ordering, fence};

/// A value on cache lines of its own: two, because processors prefetch lines in pairs.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct Line<T>(pub(crate) T);

/// The moving words of a ring.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Cursors {
    /// Bytes ever committed; written by the producer.
    pub(crate) tail: Line<AtomicUsize>,
    /// Bytes ever released; written by the consumer.
    pub(crate) head: Line<AtomicUsize>,
    /// The producer saw a ring that was not empty and would like to hear of space; cleared by the
    /// consumer.
    wanted: Line<AtomicU32>,
}

impl Cursors {
    /// Producer: bytes before this are released.
    pub(crate) fn released(&self) -> usize {
        self.head.0.load(Ordering::Acquire)
    }

    /// Consumer: bytes before this are committed.
    pub(crate) fn committed(&self) -> usize {
        self.tail.0.load(Ordering::Acquire)
    }

    /// Producer: asks for a signal at the next release, and returns the bytes released so far.
    pub(crate) fn want(&self) -> usize {
        self.wanted.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `release`: either it sees `wanted`, or we see its new head.
        fence(Ordering::SeqCst);
        self.released()
    }

    /// Producer: publishes the bytes before `tail`.
    pub(crate) fn commit(&self, tail: usize) {
        self.tail.0.store(tail, Ordering::Release);
    }

    /// Consumer: gives back the bytes before `head`; true when the producer asked to hear of it.
    pub(crate) fn release(&self, head: usize) -> bool {
        self.head.0.store(head, Ordering::Release);
        // Pairs with the fence in `want`.
        fence(Ordering::SeqCst);
        self.wanted.0.load(Ordering::Relaxed) != 0 && self.wanted.0.swap(0, Ordering::AcqRel) != 0
    }
}

/// Whether the owner of a bell sleeps or is about to.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Parked(AtomicU32);

impl Parked {
    /// Owner: asks to be rung.
    pub(crate) fn park(&self) {
        self.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `to_ring`.
        fence(Ordering::SeqCst);
    }

    /// Owner: no longer asks to be rung.
    pub(crate) fn unpark(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// Returns whether the owner asks to be rung.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst) != 0
    }

    /// After publishing what the owner should see: whether the caller is the one to ring.
    pub(crate) fn to_ring(&self) -> bool {
        // Either we see the flag, or the owner's next poll sees what we published.
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) != 0 && self.0.swap(0, Ordering::AcqRel) != 0
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// An eventfd: rings are kept until they are answered.
    #[derive(Default)]
    struct Event {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Event {
        fn ring(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_all();
        }

        fn answer(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    #[derive(Default)]
    struct World {
        cursors: Cursors,
        parked: Parked,
        event: Event,
    }

    impl World {
        fn ring_if_parked(&self) {
            if self.parked.to_ring() {
                self.event.ring();
            }
        }

        /// Sleeps until `ready`; loom reports a thread that is never woken.
        fn sleep_until(&self, ready: impl Fn(&Cursors) -> bool) {
            loop {
                self.parked.park();
                if ready(&self.cursors) {
                    self.parked.unpark();
                    return;
                }
                self.event.answer();
            }
        }
    }

    #[test]
    fn loom_shm_2_bytes_are_seen_after_their_commit_and_overwritten_after_their_release() {
        loom::model(|| {
            // A ring of one byte, which loom sees touched: each side may only in its turn.
            let shared = Arc::new((Cursors::default(), UnsafeCell::new(())));
            let theirs = Arc::clone(&shared);
            let producer = thread::spawn(move || {
                let (cursors, byte) = &*theirs;
                byte.with_mut(|_| ());
                cursors.commit(1);
                if cursors.released() == 1 {
                    byte.with_mut(|_| ());
                    cursors.commit(2);
                }
            });
            let (cursors, byte) = &*shared;
            if cursors.committed() >= 1 {
                byte.with(|_| ());
                cursors.release(1);
            }
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_a_commit_is_seen_or_rings() {
        loom::model(|| {
            let world = Arc::new(World::default());
            let theirs = Arc::clone(&world);
            let producer = thread::spawn(move || {
                theirs.cursors.commit(1);
                theirs.ring_if_parked();
            });
            world.sleep_until(|cursors| cursors.committed() == 1);
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_a_release_is_seen_or_rings() {
        loom::model(|| {
            let world = Arc::new(World::default());
            world.cursors.commit(1);
            let theirs = Arc::clone(&world);
            let consumer = thread::spawn(move || {
                if theirs.cursors.release(1) {
                    theirs.ring_if_parked();
                }
            });
            world.sleep_until(|cursors| cursors.want() == 1);
            consumer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_one_of_several_callers_rings_and_none_is_missed() {
        // Three threads have too many orders to try all: those with up to two preemptions.
        let mut few = loom::model::Builder::new();
        few.preemption_bound = Some(2);
        few.check(|| {
            let world = Arc::new((World::default(), Cursors::default()));
            let (one, other) = (Arc::clone(&world), Arc::clone(&world));
            let first = thread::spawn(move || {
                one.0.cursors.commit(1);
                one.0.ring_if_parked();
            });
            let second = thread::spawn(move || {
                other.1.commit(1);
                other.0.ring_if_parked();
            });
            world.0.sleep_until(|cursors| cursors.committed() == 1 && world.1.committed() == 1);
            first.join().unwrap();
            second.join().unwrap();
        });
    }
}

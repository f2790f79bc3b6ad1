// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control words of shared memory through which both sides report their progress and request
//! wake-ups.
//!
//! This module does not depend on the location of the words, so that loom can try every
//! interleaving of both sides (`make loom`): the words of a ring for `SHM-2`, the word of a
//! doorbell for `SHM-4`.

use crate::loom_atomics::{AtomicU32, AtomicUsize, Ordering, fence};

/// A value on separate cache lines: two, because processors prefetch lines in pairs.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct CacheLinePadded<T>(pub(crate) T);

/// The positions of a ring.
#[derive(Default)]
#[repr(C)]
pub(crate) struct RingCursors {
    /// Total of committed bytes; written by the producer.
    pub(crate) tail: CacheLinePadded<AtomicUsize>,
    /// Total of released bytes; written by the consumer.
    pub(crate) head: CacheLinePadded<AtomicUsize>,
    /// Set by the producer when it saw a ring that was not empty and wants a signal at the next
    /// release; cleared by the consumer.
    wanted: CacheLinePadded<AtomicU32>,
}

impl RingCursors {
    /// Producer: returns the position before which all bytes are released.
    pub(crate) fn released_position(&self) -> usize {
        self.head.0.load(Ordering::Acquire)
    }

    /// Consumer: returns the position before which all bytes are committed.
    pub(crate) fn committed_position(&self) -> usize {
        self.tail.0.load(Ordering::Acquire)
    }

    /// Producer: asks for a signal at the next release, and returns the bytes released so far.
    pub(crate) fn request_release_signal(&self) -> usize {
        self.wanted.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `publish_head`: either the consumer sees `wanted`, or this load
        // sees the new head.
        fence(Ordering::SeqCst);
        self.released_position()
    }

    /// Producer: publishes the bytes before `tail`.
    pub(crate) fn publish_tail(&self, tail: usize) {
        self.tail.0.store(tail, Ordering::Release);
    }

    /// Consumer: releases the bytes before `head`; returns true if the producer asked for a signal.
    pub(crate) fn publish_head(&self, head: usize) -> bool {
        self.head.0.store(head, Ordering::Release);
        // Pairs with the fence in `request_release_signal`.
        fence(Ordering::SeqCst);
        // The load comes first: a swap takes the cache line from the producer at each release, and
        // almost all releases find no request.
        self.wanted.0.load(Ordering::Relaxed) != 0 && self.wanted.0.swap(0, Ordering::AcqRel) != 0
    }
}

/// Whether the owner of a doorbell sleeps or is about to.
#[derive(Default)]
#[repr(C)]
pub(crate) struct ParkedFlag(AtomicU32);

impl ParkedFlag {
    /// Owner: asks to be rung.
    pub(crate) fn mark_parked(&self) {
        self.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `take_parked_flag`.
        fence(Ordering::SeqCst);
    }

    /// Owner: no longer asks to be rung.
    pub(crate) fn clear_parked(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// Returns whether the owner asks to be rung.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst) != 0
    }

    /// Returns whether the caller must ring the owner, and clears the flag. Call it after
    /// publishing data that the owner should see.
    pub(crate) fn take_parked_flag(&self) -> bool {
        // Either this load sees the flag, or the owner's next poll sees the published data.
        fence(Ordering::SeqCst);
        // As in `publish_head`, the load keeps the line shared. The swap lets only one of several
        // callers ring, because each ring is a system call.
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

    /// Model of an eventfd: a ring is kept until it is cleared.
    #[derive(Default)]
    struct ModelEventfd {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl ModelEventfd {
        fn ring_event(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_all();
        }

        fn await_ring(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    #[derive(Default)]
    struct SignalModel {
        cursors: RingCursors,
        parked: ParkedFlag,
        event: ModelEventfd,
    }

    impl SignalModel {
        fn ring_if_parked(&self) {
            if self.parked.take_parked_flag() {
                self.event.ring_event();
            }
        }

        /// Sleeps until `ready`; loom reports a thread that is never woken.
        fn sleep_until(&self, ready: impl Fn(&RingCursors) -> bool) {
            loop {
                self.parked.mark_parked();
                if ready(&self.cursors) {
                    self.parked.clear_parked();
                    return;
                }
                self.event.await_ring();
            }
        }
    }

    #[test]
    fn loom_shm_2_bytes_are_seen_after_their_commit_and_overwritten_after_their_release() {
        loom::model(|| {
            // A ring of one byte. Loom checks the accesses: each side may only touch the byte in
            // its turn.
            let shared = Arc::new((RingCursors::default(), UnsafeCell::new(())));
            let theirs = Arc::clone(&shared);
            let producer = thread::spawn(move || {
                let (cursors, byte) = &*theirs;
                byte.with_mut(|_| ());
                cursors.publish_tail(1);
                if cursors.released_position() == 1 {
                    byte.with_mut(|_| ());
                    cursors.publish_tail(2);
                }
            });
            let (cursors, byte) = &*shared;
            if cursors.committed_position() >= 1 {
                byte.with(|_| ());
                cursors.publish_head(1);
            }
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_a_commit_is_seen_or_rings() {
        loom::model(|| {
            let world = Arc::new(SignalModel::default());
            let theirs = Arc::clone(&world);
            let producer = thread::spawn(move || {
                theirs.cursors.publish_tail(1);
                theirs.ring_if_parked();
            });
            world.sleep_until(|cursors| cursors.committed_position() == 1);
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_a_release_is_seen_or_rings() {
        loom::model(|| {
            let world = Arc::new(SignalModel::default());
            world.cursors.publish_tail(1);
            let theirs = Arc::clone(&world);
            let consumer = thread::spawn(move || {
                if theirs.cursors.publish_head(1) {
                    theirs.ring_if_parked();
                }
            });
            world.sleep_until(|cursors| cursors.request_release_signal() == 1);
            consumer.join().unwrap();
        });
    }

    #[test]
    fn loom_shm_4_one_of_several_callers_rings_and_none_is_missed() {
        // Three threads have too many interleavings; only those with up to two preemptions are
        // tried.
        let mut few = loom::model::Builder::new();
        few.preemption_bound = Some(2);
        few.check(|| {
            let world = Arc::new((SignalModel::default(), RingCursors::default()));
            let (one, other) = (Arc::clone(&world), Arc::clone(&world));
            let first = thread::spawn(move || {
                one.0.cursors.publish_tail(1);
                one.0.ring_if_parked();
            });
            let second = thread::spawn(move || {
                other.1.publish_tail(1);
                other.0.ring_if_parked();
            });
            world.0.sleep_until(|cursors| {
                cursors.committed_position() == 1 && world.1.committed_position() == 1
            });
            first.join().unwrap();
            second.join().unwrap();
        });
    }
}

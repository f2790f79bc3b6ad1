// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies into a ring of shared memory, through the caches or past them.
//!
//! The lines of a ring lie in the cache of the core that read them last, and the core that writes
//! them has to fetch them from there. How long that takes depends on where the system runs the two
//! processes, and that may change at any time. Measured with two cores of an EPYC: 10 to 25 GB/s,
//! and minutes later 2.4 GB/s. Past the caches it is 25 to 35 GB/s in both cases; then the reader
//! gets 17 GB/s from memory instead of 20 to 37 GB/s. So a link measures its copies, and goes past
//! the caches while copies through them are slow.

use std::time::{Duration, Instant};

use farandole_transport::LinkKind;

use crate::buffer::{Flat, copy_past_caches};

/// Bytes from which on a copy is measured.
const WORTH: usize = 16 << 10;
/// Bytes in a nanosecond of which a slow copy makes less.
const SLOW: u32 = 5;
/// Slow copies in a row before the next go past the caches: one alone may have been interrupted.
const PATIENCE: u32 = 8;
/// Copies past the caches until one goes through them again, to see whether that is still slow.
const PROBE: u32 = 256;

/// The copies of one link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    /// Whether another process reads the ring.
    is_shared: bool,
    /// Slow copies in a row.
    slow: u32,
    /// Copies still to go past the caches.
    past: u32,
}

impl Copies {
    pub(super) fn new(kind: LinkKind) -> Self {
        Self { is_shared: kind == LinkKind::SharedMemory, slow: 0, past: 0 }
    }

    /// Returns whether copies go past the caches now.
    pub(super) fn are_past_caches(&self) -> bool {
        self.past > 0
    }

    /// Copies `into.len()` bytes of a list, from position `at` on.
    pub(super) fn read(&mut self, from: &Flat, at: usize, into: &mut [u8]) {
        from.visit(at, into.len(), |offset, bytes| {
            self.copy(bytes, &mut into[offset..offset + bytes.len()]);
        });
    }

    /// Copies `from` to `to`, of the same length, like the copies before.
    pub(super) fn repeat(&self, from: &[u8], to: &mut [u8]) {
        if self.past > 0 { copy_past_caches(from, to) } else { to.copy_from_slice(from) }
    }

    /// Copies `from` to `to`, of the same length.
    fn copy(&mut self, from: &[u8], to: &mut [u8]) {
        if from.len() < WORTH || !self.is_shared {
            return to.copy_from_slice(from);
        }
        if self.past > 0 {
            self.past -= 1;
            return copy_past_caches(from, to);
        }
        let began = Instant::now();
        to.copy_from_slice(from);
        self.measured(from.len(), began.elapsed());
    }

    /// Notes how long a copy through the caches took.
    fn measured(&mut self, bytes: usize, took: Duration) {
        let is_slow = took.as_nanos() * u128::from(SLOW) > bytes as u128;
        self.slow = if is_slow { (self.slow + 1).min(PATIENCE) } else { 0 };
        if self.slow == PATIENCE {
            self.past = PROBE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    const BYTES: usize = 100_000;

    fn flat() -> (Memory, Flat) {
        let memory = Memory::repeating(BYTES, &[1, 2, 3]);
        let flat = Flat::new([memory.buffer()]);
        (memory, flat)
    }

    #[test]
    fn after_slow_copies_they_go_past_the_caches_until_one_is_fast() {
        let (_memory, from) = flat();
        let mut to = vec![0; BYTES];
        let mut copies = Copies::new(LinkKind::SharedMemory);
        let (slow, fast) = (Duration::from_micros(50), Duration::from_micros(10));
        for _ in 1..PATIENCE {
            copies.measured(BYTES, slow);
        }
        copies.measured(BYTES, fast);
        for _ in 1..PATIENCE {
            copies.measured(BYTES, slow);
            assert!(!copies.are_past_caches());
        }
        copies.measured(BYTES, slow);
        assert!(copies.are_past_caches());
        for _ in 0..PROBE {
            assert!(copies.are_past_caches());
            to.fill(0);
            copies.read(&from, 0, &mut to);
            assert_eq!(to[BYTES - 3..], [2, 3, 1][..], "every byte arrives");
        }
        assert!(!copies.are_past_caches(), "one copy is measured again");
        copies.measured(BYTES, slow);
        assert!(copies.are_past_caches(), "one is enough to go on");
        for _ in 0..PROBE {
            copies.read(&from, 0, &mut to);
        }
        copies.measured(BYTES, fast);
        copies.measured(BYTES, slow);
        assert!(!copies.are_past_caches());
    }

    #[test]
    fn short_copies_are_not_measured() {
        let (_memory, from) = flat();
        let mut copies = Copies { is_shared: true, slow: PATIENCE, past: 3 };
        let mut to = vec![0; WORTH - 1];
        copies.read(&from, 1, &mut to);
        assert_eq!((to[0], copies.past), (2, 3));
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies into a ring of shared memory, through the caches or past them.
//!
//! The lines of a ring lie in the cache of the core that read them last, and the core that writes
//! them has to fetch them from there. How long that takes depends on where the system runs the two
//! processes, and that may change at any time. Measured with two cores of an EPYC: 10 to 25 GB/s,
//! and minutes later 2.4 GB/s. Past the caches it is 25 to 35 GB/s in both cases; then the reader
//! gets 17 GB/s from memory instead of 20 to 37 GB/s. So a link measures its copies. While
//! they are slow and copies past the caches are much faster, it makes those.

use std::time::Instant;

use farandole_transport::LinkKind;

use crate::buffer::{Flat, copy_past_caches};

/// Bytes from which on a copy is measured.
const WORTH: usize = 16 << 10;
/// Copies of fewer bytes in a nanosecond are slow.
const SLOW: f32 = 5.0;
/// Slow copies in a row before the next go past the caches: one alone may have been interrupted. As
/// many go past them before it is clear whether that is faster.
const PATIENCE: u32 = 8;
/// Ratio of both speeds from which on copies go past the caches: their reader is slower.
const FASTER: f32 = 2.0;
/// Copies until the other way is tried again.
const PROBE: u32 = 256;

/// The way that copies take.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Through the caches. So many in a row were slow, the fastest with this speed.
    Through { slow: u32, fastest: f32 },
    /// Past them, for so many more copies; those through the caches had this speed. The first ones
    /// decide whether it goes on.
    Past { left: u32, through: f32, fastest: f32 },
    /// Through the caches for so many more copies, slow or not: past them is no faster.
    Settled { left: u32 },
}

const BEGIN: Way = Way::Through { slow: 0, fastest: 0.0 };

/// The copies of one link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    /// Whether another process reads the ring.
    is_shared: bool,
    way: Way,
}

impl Copies {
    pub(super) fn new(kind: LinkKind) -> Self {
        Self { is_shared: kind == LinkKind::SharedMemory, way: BEGIN }
    }

    /// Returns whether copies go past the caches now.
    pub(super) fn are_past_caches(&self) -> bool {
        matches!(self.way, Way::Past { .. })
    }

    /// Copies `into.len()` bytes of a list, from position `at` on.
    pub(super) fn read(&mut self, from: &Flat, at: usize, into: &mut [u8]) {
        from.visit(at, into.len(), |offset, bytes| {
            self.copy(bytes, &mut into[offset..offset + bytes.len()]);
        });
    }

    /// Copies `from` to `to`, of the same length.
    pub(super) fn copy(&mut self, from: &[u8], to: &mut [u8]) {
        if from.len() < WORTH || !self.is_shared {
            return to.copy_from_slice(from);
        }
        let began = Instant::now();
        if self.are_past_caches() {
            copy_past_caches(from, to);
        } else {
            to.copy_from_slice(from);
        }
        let nanoseconds = began.elapsed().as_nanos().max(1);
        self.measured(from.len() as f32 / nanoseconds as f32);
    }

    /// Notes the speed of a copy, in bytes in a nanosecond.
    fn measured(&mut self, speed: f32) {
        self.way = match self.way {
            Way::Through { .. } if speed >= SLOW => BEGIN,
            Way::Through { slow, fastest } if slow + 1 < PATIENCE => {
                Way::Through { slow: slow + 1, fastest: fastest.max(speed) }
            }
            Way::Through { fastest, .. } => {
                Way::Past { left: PROBE, through: fastest.max(speed), fastest: 0.0 }
            }
            Way::Past { left: 0 | 1, through, .. } => {
                Way::Through { slow: PATIENCE - 1, fastest: through.min(SLOW) }
            }
            Way::Past { left, through, fastest } => {
                let (left, fastest) = (left - 1, fastest.max(speed));
                if left == PROBE - PATIENCE && fastest < FASTER * through {
                    Way::Settled { left: PROBE }
                } else {
                    Way::Past { left, through, fastest }
                }
            }
            Way::Settled { left: 0 | 1 } => BEGIN,
            Way::Settled { left } => Way::Settled { left: left - 1 },
        };
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

    fn after(copies: &mut Copies, count: u32, speed: f32) -> bool {
        (0..count).for_each(|_| copies.measured(speed));
        copies.are_past_caches()
    }

    #[test]
    fn after_slow_copies_they_go_past_the_caches_until_one_is_fast() {
        let mut copies = Copies::new(LinkKind::SharedMemory);
        assert!(!after(&mut copies, PATIENCE - 1, 2.0));
        assert!(!after(&mut copies, 1, 10.0));
        assert!(!after(&mut copies, PATIENCE - 1, 2.0));
        assert!(after(&mut copies, 1, 2.0));
        assert!(after(&mut copies, PROBE - 1, 20.0));
        assert!(!after(&mut copies, 1, 20.0), "one copy goes through them again");
        assert!(after(&mut copies, 1, 2.0), "it is slow");
        assert!(!after(&mut copies, PROBE, 20.0));
        assert!(!after(&mut copies, 1, 10.0), "it is fast");
        assert!(!after(&mut copies, PATIENCE - 1, 2.0));
    }

    #[test]
    fn where_copies_past_the_caches_are_not_faster_they_go_through_them() {
        let mut copies = Copies::new(LinkKind::SharedMemory);
        assert!(after(&mut copies, PATIENCE, 4.0));
        assert!(after(&mut copies, PATIENCE - 1, 7.0));
        assert!(!after(&mut copies, 1, 7.0));
        assert!(!after(&mut copies, PROBE + PATIENCE - 1, 4.0));
        assert!(after(&mut copies, 1, 4.0), "it is tried again");
    }

    #[test]
    fn every_byte_arrives_either_way() {
        let (_memory, from) = flat();
        for way in [BEGIN, Way::Past { left: 9, through: 2.0, fastest: 0.0 }] {
            let mut copies = Copies { is_shared: true, way };
            let mut to = vec![0; BYTES - 1];
            copies.read(&from, 1, &mut to);
            assert!(to.iter().zip([2, 3, 1].iter().cycle()).all(|(byte, right)| byte == right));
        }
    }

    #[test]
    fn short_copies_and_those_of_other_links_are_not_measured() {
        let (_memory, from) = flat();
        let way = Way::Past { left: 9, through: 2.0, fastest: 0.0 };
        for (is_shared, bytes) in [(true, WORTH - 1), (false, BYTES)] {
            let mut copies = Copies { is_shared, way };
            let mut to = vec![0; bytes];
            copies.read(&from, 0, &mut to);
            assert_eq!((to[0], copies.way), (1, way));
        }
    }
}

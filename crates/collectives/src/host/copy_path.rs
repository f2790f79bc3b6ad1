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

use crate::buffer::{GatherList, copy_nontemporal};

/// Bytes from which on a copy is measured.
const MIN_MEASURED_COPY_BYTES: usize = 16 << 10;
/// Copies of fewer bytes in a nanosecond are slow.
const SLOW_COPY_BYTES_PER_NS: f32 = 5.0;
/// Slow copies in a row before the next go past the caches: one alone may have been interrupted. As
/// many go past them before it is clear whether that is faster.
const SLOW_COPIES_BEFORE_SWITCH: u32 = 8;
/// Ratio of both speeds from which on copies go past the caches: their reader is slower.
const MIN_NONTEMPORAL_SPEEDUP: f32 = 2.0;
/// Copies until the other way is tried again.
const COPIES_BETWEEN_PROBES: u32 = 256;

/// The way that copies take.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CopyPath {
    /// Through the caches. So many in a row were slow, the fastest with this speed.
    Cached { slow: u32, fastest: f32 },
    /// Past them, for so many more copies; those through the caches had this speed. The first ones
    /// decide whether it goes on.
    NonTemporal { left: u32, through: f32, fastest: f32 },
    /// Through the caches for so many more copies, slow or not: past them is no faster.
    CachedUnmeasured { left: u32 },
}

const INITIAL_COPY_PATH: CopyPath = CopyPath::Cached { slow: 0, fastest: 0.0 };

/// The copies of one link.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingCopier {
    /// Whether another process reads the ring.
    is_shared: bool,
    path: CopyPath,
}

impl RingCopier {
    pub(super) fn new(kind: LinkKind) -> Self {
        Self { is_shared: kind == LinkKind::SharedMemory, path: INITIAL_COPY_PATH }
    }

    /// Returns whether copies go past the caches now.
    pub(super) fn is_nontemporal(&self) -> bool {
        matches!(self.path, CopyPath::NonTemporal { .. })
    }

    /// Copies `into.len()` bytes of a list, from position `at` on.
    pub(super) fn copy_from_list(&mut self, from: &GatherList, at: usize, into: &mut [u8]) {
        from.visit_range(at, into.len(), |offset, bytes| {
            self.copy_bytes(bytes, &mut into[offset..offset + bytes.len()]);
        });
    }

    /// Copies `from` to `to`, of the same length.
    pub(super) fn copy_bytes(&mut self, from: &[u8], to: &mut [u8]) {
        if from.len() < MIN_MEASURED_COPY_BYTES || !self.is_shared {
            return to.copy_from_slice(from);
        }
        let began = Instant::now();
        if self.is_nontemporal() {
            copy_nontemporal(from, to);
        } else {
            to.copy_from_slice(from);
        }
        let nanoseconds = began.elapsed().as_nanos().max(1);
        self.record_speed(from.len() as f32 / nanoseconds as f32);
    }

    /// Notes the speed of a copy, in bytes in a nanosecond.
    fn record_speed(&mut self, speed: f32) {
        self.path = match self.path {
            CopyPath::Cached { .. } if speed >= SLOW_COPY_BYTES_PER_NS => INITIAL_COPY_PATH,
            CopyPath::Cached { slow, fastest } if slow + 1 < SLOW_COPIES_BEFORE_SWITCH => {
                CopyPath::Cached { slow: slow + 1, fastest: fastest.max(speed) }
            }
            CopyPath::Cached { fastest, .. } => CopyPath::NonTemporal {
                left: COPIES_BETWEEN_PROBES,
                through: fastest.max(speed),
                fastest: 0.0,
            },
            CopyPath::NonTemporal { left: 0 | 1, through, .. } => CopyPath::Cached {
                slow: SLOW_COPIES_BEFORE_SWITCH - 1,
                fastest: through.min(SLOW_COPY_BYTES_PER_NS),
            },
            CopyPath::NonTemporal { left, through, fastest } => {
                let (left, fastest) = (left - 1, fastest.max(speed));
                if left == COPIES_BETWEEN_PROBES - SLOW_COPIES_BEFORE_SWITCH
                    && fastest < MIN_NONTEMPORAL_SPEEDUP * through
                {
                    CopyPath::CachedUnmeasured { left: COPIES_BETWEEN_PROBES }
                } else {
                    CopyPath::NonTemporal { left, through, fastest }
                }
            }
            CopyPath::CachedUnmeasured { left: 0 | 1 } => INITIAL_COPY_PATH,
            CopyPath::CachedUnmeasured { left } => CopyPath::CachedUnmeasured { left: left - 1 },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostMemory;

    const BYTES: usize = 100_000;

    fn flat() -> (HostMemory, GatherList) {
        let memory = HostMemory::filled_with(BYTES, &[1, 2, 3]);
        let flat = GatherList::new([memory.as_buffer()]);
        (memory, flat)
    }

    fn after(copies: &mut RingCopier, count: u32, speed: f32) -> bool {
        (0..count).for_each(|_| copies.record_speed(speed));
        copies.is_nontemporal()
    }

    #[test]
    fn after_slow_copies_they_go_past_the_caches_until_one_is_fast() {
        let mut copies = RingCopier::new(LinkKind::SharedMemory);
        assert!(!after(&mut copies, SLOW_COPIES_BEFORE_SWITCH - 1, 2.0));
        assert!(!after(&mut copies, 1, 10.0));
        assert!(!after(&mut copies, SLOW_COPIES_BEFORE_SWITCH - 1, 2.0));
        assert!(after(&mut copies, 1, 2.0));
        assert!(after(&mut copies, COPIES_BETWEEN_PROBES - 1, 20.0));
        assert!(!after(&mut copies, 1, 20.0), "one copy goes through them again");
        assert!(after(&mut copies, 1, 2.0), "it is slow");
        assert!(!after(&mut copies, COPIES_BETWEEN_PROBES, 20.0));
        assert!(!after(&mut copies, 1, 10.0), "it is fast");
        assert!(!after(&mut copies, SLOW_COPIES_BEFORE_SWITCH - 1, 2.0));
    }

    #[test]
    fn where_copies_past_the_caches_are_not_faster_they_go_through_them() {
        let mut copies = RingCopier::new(LinkKind::SharedMemory);
        assert!(after(&mut copies, SLOW_COPIES_BEFORE_SWITCH, 4.0));
        assert!(after(&mut copies, SLOW_COPIES_BEFORE_SWITCH - 1, 7.0));
        assert!(!after(&mut copies, 1, 7.0));
        assert!(!after(&mut copies, COPIES_BETWEEN_PROBES + SLOW_COPIES_BEFORE_SWITCH - 1, 4.0));
        assert!(after(&mut copies, 1, 4.0), "it is tried again");
    }

    #[test]
    fn every_byte_arrives_either_way() {
        let (_memory, from) = flat();
        for way in
            [INITIAL_COPY_PATH, CopyPath::NonTemporal { left: 9, through: 2.0, fastest: 0.0 }]
        {
            let mut copies = RingCopier { is_shared: true, path: way };
            let mut to = vec![0; BYTES - 1];
            copies.copy_from_list(&from, 1, &mut to);
            assert!(to.iter().zip([2, 3, 1].iter().cycle()).all(|(byte, right)| byte == right));
        }
    }

    #[test]
    fn short_copies_and_those_of_other_links_are_not_measured() {
        let (_memory, from) = flat();
        let way = CopyPath::NonTemporal { left: 9, through: 2.0, fastest: 0.0 };
        for (is_shared, bytes) in [(true, MIN_MEASURED_COPY_BYTES - 1), (false, BYTES)] {
            let mut copies = RingCopier { is_shared, path: way };
            let mut to = vec![0; bytes];
            copies.copy_from_list(&from, 0, &mut to);
            assert_eq!((to[0], copies.path), (1, way));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies into a ring of shared memory, through the caches or bypassing them.
//!
//! The cache lines of a ring are in the cache of the core that read them last, and the writing core
//! has to fetch them from there. How long this takes depends on the cores on which the system runs
//! the two processes, and these may change at any time. Measured with two cores of an EPYC: copies
//! through the caches reached 10 to 25 GB/s, and minutes later 2.4 GB/s. Copies that bypass the
//! caches reached 25 to 35 GB/s in both cases, but the reader then gets 17 GB/s from memory instead
//! of 20 to 37 GB/s. So a link measures its copies. While copies through the caches are slow and
//! copies that bypass them are much faster, the link uses the second kind.

use std::time::Instant;

use farandole_kernels::{GatherList, copy_nontemporal};
use farandole_transport::LinkKind;

/// Fewest bytes for which a copy is measured.
// Reading the clock would be a noticeable part of a shorter copy.
const MIN_MEASURED_COPY_BYTES: usize = 16 << 10;
/// Speed, in bytes per nanosecond, below which a copy is slow.
// Between the speeds that were measured in bad times, 2.4, and in good ones, 10 and more.
const SLOW_COPY_BYTES_PER_NS: f32 = 5.0;
/// Number of consecutive slow copies after which the next copies bypass the caches; a single slow
/// copy may have been interrupted. After the same number of nontemporal copies, the link decides
/// whether they are faster.
const SLOW_COPIES_BEFORE_SWITCH: u32 = 8;
/// Smallest speed-up for which copies bypass the caches, because the reader of such copies is
/// slower.
const MIN_NONTEMPORAL_SPEEDUP: f32 = 2.0;
/// Number of copies after which the other path is tried again.
const COPIES_BETWEEN_PROBES: u32 = 256;

/// Path of the copies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CopyPath {
    /// Through the caches. The last `slow` copies were slow, the fastest of them with speed
    /// `fastest`.
    Cached { slow: u32, fastest: f32 },
    /// Bypassing the caches, for `left` more copies. `through` is the speed of copies through the
    /// caches. The first copies decide whether the link keeps this path.
    NonTemporal { left: u32, through: f32, fastest: f32 },
    /// Through the caches for `left` more copies, also if they are slow: bypassing the caches is
    /// not faster.
    CachedUnmeasured { left: u32 },
}

const INITIAL_COPY_PATH: CopyPath = CopyPath::Cached { slow: 0, fastest: 0.0 };

/// Copier of one link.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingCopier {
    /// Whether another process reads the ring.
    is_shared: bool,
    path: CopyPath,
    /// Number of copies that were measured.
    #[cfg(test)]
    pub(super) measured_copies: u64,
}

impl RingCopier {
    pub(super) fn new(kind: LinkKind) -> Self {
        Self {
            is_shared: kind == LinkKind::SharedMemory,
            path: INITIAL_COPY_PATH,
            #[cfg(test)]
            measured_copies: 0,
        }
    }

    /// Returns whether copies currently bypass the caches.
    pub(super) fn is_nontemporal(&self) -> bool {
        matches!(self.path, CopyPath::NonTemporal { .. })
    }

    /// Copies `into.len()` bytes of a list, starting at position `at`.
    pub(super) fn copy_from_list(&mut self, from: &GatherList, at: usize, into: &mut [u8]) {
        from.visit_range(at, into.len(), |offset, bytes| {
            self.copy_bytes(bytes, &mut into[offset..offset + bytes.len()]);
        });
    }

    /// Copies `from` to `to`, of the same length.
    pub(super) fn copy_bytes(&mut self, from: &[u8], to: &mut [u8]) {
        // Only a ring that another process reads has its lines in the cache of another core.
        if from.len() < MIN_MEASURED_COPY_BYTES || !self.is_shared {
            return to.copy_from_slice(from);
        }
        let began = Instant::now();
        if self.is_nontemporal() {
            copy_nontemporal(from, to);
        } else {
            to.copy_from_slice(from);
        }
        #[cfg(test)]
        {
            self.measured_copies += 1;
        }
        let nanoseconds = began.elapsed().as_nanos().max(1);
        self.record_copy_speed(from.len() as f32 / nanoseconds as f32);
    }

    /// Records the speed of a copy, in bytes per nanosecond.
    fn record_copy_speed(&mut self, speed: f32) {
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
                // One slow copy is enough to return, because this link was slow before.
                slow: SLOW_COPIES_BEFORE_SWITCH - 1,
                fastest: through.min(SLOW_COPY_BYTES_PER_NS),
            },
            CopyPath::NonTemporal { left, through, fastest } => {
                let (left, fastest) = (left - 1, fastest.max(speed));
                if left == COPIES_BETWEEN_PROBES - SLOW_COPIES_BEFORE_SWITCH
                    // The fastest copies are compared, because an interruption can only make a copy
                    // slower.
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
    use farandole_kernels::HostMemory;

    use super::*;

    const BYTES: usize = 100_000;

    fn flat() -> (HostMemory, GatherList) {
        let memory = HostMemory::filled_with(BYTES, &[1, 2, 3]);
        let flat = GatherList::new([memory.as_buffer()]);
        (memory, flat)
    }

    fn after(copies: &mut RingCopier, count: u32, speed: f32) -> bool {
        (0..count).for_each(|_| copies.record_copy_speed(speed));
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
        for path in
            [INITIAL_COPY_PATH, CopyPath::NonTemporal { left: 9, through: 2.0, fastest: 0.0 }]
        {
            let mut copies = RingCopier { is_shared: true, path, measured_copies: 0 };
            let mut to = vec![0; BYTES - 1];
            copies.copy_from_list(&from, 1, &mut to);
            assert!(to.iter().zip([2, 3, 1].iter().cycle()).all(|(byte, right)| byte == right));
        }
    }

    #[test]
    fn short_copies_and_those_of_other_links_are_not_measured() {
        let (_memory, from) = flat();
        let path = CopyPath::NonTemporal { left: 9, through: 2.0, fastest: 0.0 };
        for (is_shared, bytes) in [(true, MIN_MEASURED_COPY_BYTES - 1), (false, BYTES)] {
            let mut copies = RingCopier { is_shared, path, measured_copies: 0 };
            let mut to = vec![0; bytes];
            copies.copy_from_list(&from, 0, &mut to);
            assert_eq!((to[0], copies.path), (1, path));
        }
    }
}

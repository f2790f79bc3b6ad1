// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Segments are anonymous files that hold rings. A segment is freed with the last process that has
//! it, even after a crash.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;

use crate::memory::{MemoryMapping, page_size};
use crate::ring::{MirroredRing, RingConsumer, RingProducer};
use crate::{Error, Result};

/// Largest capacity of a ring in bytes: mapped twice, it still fits into any address space.
const MAX_RING_CAPACITY: usize = 1 << 44;
/// Largest number of rings in a segment.
// Limits the arithmetic of `segment_bytes`, whose arguments may come from a peer.
const MAX_RINGS_PER_SEGMENT: usize = 1 << 10;

/// Creates a sealed memfd of `bytes` zeros.
pub(crate) fn create_sealed_memfd(name: &str, bytes: u64) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not have the flag.
        Err(Errno::INVAL) => memfd_create(name, flags),
        other => other,
    }
    .map_err(Error::failed_call_mapper("memfd_create"))?;
    ftruncate(&fd, bytes).map_err(Error::failed_call_mapper("ftruncate"))?;
    // SHRINK: an access beyond the end would raise SIGBUS. SEAL: a peer could otherwise forbid
    // later writable mappings.
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(Error::failed_call_mapper("fcntl"))?;
    Ok(fd)
}

/// Checks the size of a memfd from a peer, and that it cannot be shrunk while it is mapped.
pub(crate) fn verify_sealed_memfd(fd: BorrowedFd<'_>, expected: u64) -> Result<()> {
    let actual =
        u64::try_from(fstat(fd).map_err(Error::failed_call_mapper("fstat"))?.st_size).unwrap_or(0);
    // Only the seal against shrinking counts, because only a smaller file makes an access fault.
    let seals = fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if actual == expected && seals.contains(SealFlags::SHRINK) {
        Ok(())
    } else {
        Err(Error::NotASegment { expected, actual })
    }
}

/// A segment with one or more rings of equal capacity.
#[derive(Debug)]
pub struct RingSegment {
    fd: OwnedFd,
    rings: usize,
    capacity: usize,
}

impl RingSegment {
    /// Creates a segment; `capacity` is rounded up to whole pages. Memory is allocated at its first
    /// use.
    ///
    /// # Errors
    /// `System`, also when `rings` or `capacity` is too large.
    pub fn create(rings: usize, capacity: usize) -> Result<Self> {
        let capacity = check_capacity(rings, capacity)?;
        Ok(Self {
            fd: create_sealed_memfd("farandole-link", Self::segment_bytes(rings, capacity))?,
            rings,
            capacity,
        })
    }

    /// Adopts a descriptor that a peer sent; the peer must have created it with the same arguments.
    ///
    /// # Errors
    /// `NotASegment` when the size or the seals differ from a segment of [`RingSegment::create`];
    /// `System` for arguments that `create` refuses.
    pub fn from_descriptor(fd: OwnedFd, rings: usize, capacity: usize) -> Result<Self> {
        let capacity = check_capacity(rings, capacity)?;
        verify_sealed_memfd(fd.as_fd(), Self::segment_bytes(rings, capacity))?;
        Ok(Self { fd, rings, capacity })
    }

    /// Rounds a capacity up to whole pages, at least one. A capacity that is too large for any
    /// segment stays unchanged.
    pub fn round_capacity(capacity: usize) -> usize {
        capacity.max(1).checked_next_multiple_of(page_size()).unwrap_or(capacity)
    }

    /// Returns the size of a whole segment in bytes, or the largest number if it overflows.
    pub fn segment_bytes(rings: usize, capacity: usize) -> u64 {
        (page_size() as u64)
            .saturating_add(Self::round_capacity(capacity) as u64)
            .saturating_mul(rings as u64)
    }

    /// Returns the capacity of each ring in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Takes the sending half of ring `ring`.
    ///
    /// # Errors
    /// `HalfTaken`, `System`.
    pub fn take_producer(&self, ring: usize) -> Result<RingProducer> {
        RingProducer::claim_producer(self.map_ring(ring)?)
    }

    /// Takes the receiving half of ring `ring`.
    ///
    /// # Errors
    /// `HalfTaken`, `System`.
    pub fn take_consumer(&self, ring: usize) -> Result<RingConsumer> {
        RingConsumer::claim_consumer(self.map_ring(ring)?)
    }

    pub(crate) fn map_ring(&self, ring: usize) -> Result<MirroredRing> {
        if ring >= self.rings {
            return Err(Error::System { call: "ring", source: Errno::INVAL });
        }
        let control = (ring * page_size()) as u64;
        let data = (self.rings * page_size() + ring * self.capacity) as u64;
        Ok(MirroredRing::new(
            MemoryMapping::map_mirrored(self.fd.as_fd(), control, data, self.capacity)?,
            ring,
            self.capacity,
        ))
    }
}

/// Returns the rounded capacity, or an error if a segment of this size is impossible.
fn check_capacity(rings: usize, capacity: usize) -> Result<usize> {
    if rings > MAX_RINGS_PER_SEGMENT || capacity > MAX_RING_CAPACITY {
        return Err(Error::System { call: "memfd_create", source: Errno::FBIG });
    }
    Ok(RingSegment::round_capacity(capacity))
}

impl AsFd for RingSegment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Creates both halves of a ring of this process, which share one mapping.
///
/// # Errors
/// `System`.
pub fn create_private_ring(capacity: usize) -> Result<(RingProducer, RingConsumer)> {
    RingSegment::create(1, capacity)?.map_ring(0)?.claim_both_halves()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_near_the_end_of_numbers_are_refused_and_do_not_wrap() {
        for capacity in [usize::MAX, usize::MAX - page_size(), 1 << 63, (1 << 44) + 1] {
            assert!(matches!(
                RingSegment::create(2, capacity),
                Err(Error::System { source: Errno::FBIG, .. })
            ));
            let own = RingSegment::create(2, 1).unwrap();
            assert!(
                RingSegment::from_descriptor(
                    own.as_fd().try_clone_to_owned().unwrap(),
                    2,
                    capacity
                )
                .is_err()
            );
            assert!(RingSegment::round_capacity(capacity) >= capacity);
            assert!(RingSegment::segment_bytes(usize::MAX, capacity) >= capacity as u64);
        }
        assert!(RingSegment::create(usize::MAX, 1).is_err());
    }
}

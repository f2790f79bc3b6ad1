// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Anonymous files that hold rings: they vanish with the last process that has them, however it
//! ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;

use crate::memory::{Mapping, page};
use crate::ring::{Consumer, Producer, Ring};
use crate::{Error, Result};

/// Largest capacity of a ring: mapped twice, it still fits into any address space.
const LARGEST: usize = 1 << 44;
/// Rings of one segment, at most.
const MOST: usize = 1 << 10;

/// Creates a sealed memfd of `bytes` zeros.
pub(crate) fn sealed(name: &str, bytes: u64) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => memfd_create(name, flags),
        other => other,
    }
    .map_err(Error::of("memfd_create"))?;
    ftruncate(&fd, bytes).map_err(Error::of("ftruncate"))?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(Error::of("fcntl"))?;
    Ok(fd)
}

/// Refuses a descriptor that could be shrunk under our mapping.
pub(crate) fn verify(fd: BorrowedFd<'_>, expected: u64) -> Result<()> {
    let actual = u64::try_from(fstat(fd).map_err(Error::of("fstat"))?.st_size).unwrap_or(0);
    let seals = fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if actual == expected && seals.contains(SealFlags::SHRINK) {
        Ok(())
    } else {
        Err(Error::NotASegment { expected, actual })
    }
}

/// A segment with one or more rings of equal capacity.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    rings: usize,
    capacity: usize,
}

impl Segment {
    /// Creates a segment; `capacity` is rounded up to whole pages. Memory is taken when first
    /// touched.
    ///
    /// # Errors
    /// `System`, also when rings or capacity are absurdly many.
    pub fn create(rings: usize, capacity: usize) -> Result<Self> {
        let capacity = checked(rings, capacity)?;
        Ok(Self { fd: sealed("farandole-link", Self::size(rings, capacity))?, rings, capacity })
    }

    /// Adopts a descriptor that a peer handed over, made with the same arguments.
    ///
    /// # Errors
    /// `NotASegment` when size or seals are not those of [`Segment::create`]; `System` for what it
    /// would refuse.
    pub fn adopt(fd: OwnedFd, rings: usize, capacity: usize) -> Result<Self> {
        let capacity = checked(rings, capacity)?;
        verify(fd.as_fd(), Self::size(rings, capacity))?;
        Ok(Self { fd, rings, capacity })
    }

    /// Rounds a capacity up to whole pages, at least one. A capacity that no segment can have stays
    /// unchanged.
    pub fn round(capacity: usize) -> usize {
        capacity.max(1).checked_next_multiple_of(page()).unwrap_or(capacity)
    }

    /// Returns the bytes of a whole segment; the largest number there is for what no segment can
    /// have.
    pub fn size(rings: usize, capacity: usize) -> u64 {
        (page() as u64).saturating_add(Self::round(capacity) as u64).saturating_mul(rings as u64)
    }

    /// Returns the bytes one ring holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Takes the sending half of ring `ring`.
    ///
    /// # Errors
    /// `Taken`, `System`.
    pub fn producer(&self, ring: usize) -> Result<Producer> {
        Producer::take(self.ring(ring)?)
    }

    /// Takes the receiving half of ring `ring`.
    ///
    /// # Errors
    /// `Taken`, `System`.
    pub fn consumer(&self, ring: usize) -> Result<Consumer> {
        Consumer::take(self.ring(ring)?)
    }

    pub(crate) fn ring(&self, ring: usize) -> Result<Ring> {
        if ring >= self.rings {
            return Err(Error::System { call: "ring", source: Errno::INVAL });
        }
        let control = (ring * page()) as u64;
        let data = (self.rings * page() + ring * self.capacity) as u64;
        Ok(Ring::new(
            Mapping::mirrored(self.fd.as_fd(), control, data, self.capacity)?,
            ring,
            self.capacity,
        ))
    }
}

/// Returns the rounded capacity of a segment that can be.
fn checked(rings: usize, capacity: usize) -> Result<usize> {
    if rings > MOST || capacity > LARGEST {
        return Err(Error::System { call: "memfd_create", source: Errno::FBIG });
    }
    Ok(Segment::round(capacity))
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_near_the_end_of_numbers_are_refused_and_do_not_wrap() {
        for capacity in [usize::MAX, usize::MAX - page(), 1 << 63, (1 << 44) + 1] {
            assert!(matches!(
                Segment::create(2, capacity),
                Err(Error::System { source: Errno::FBIG, .. })
            ));
            let own = Segment::create(2, 1).unwrap();
            assert!(
                Segment::adopt(own.as_fd().try_clone_to_owned().unwrap(), 2, capacity).is_err()
            );
            assert!(Segment::round(capacity) >= capacity);
            assert!(Segment::size(usize::MAX, capacity) >= capacity as u64);
        }
        assert!(Segment::create(usize::MAX, 1).is_err());
    }
}

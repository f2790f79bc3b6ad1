// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of one process that other processes of the host map and use.
//!
//! ```text
//! memfd    | nonce, retired | data ......... |
//! ```
//!
//! A process with the [`RegionCard`] opens the descriptor through `/proc`, which the kernel allows
//! to processes of the same user only. Process numbers differ between containers; so opened memory
//! counts only if it holds the nonce.
#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, fallocate, fstat, open};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::fork::Guard;
use crate::memory::{Mapping, Shared, page};
use crate::segment::{sealed, verify};
use crate::{Error, Result};

#[repr(C)]
struct Head {
    nonce: [AtomicU64; 2],
    /// 1: no longer the owner's memory.
    retired: AtomicU32,
}

// SAFETY: atomics only.
unsafe impl Shared for Head {}

/// The place of a region, and the proof that it is the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionCard {
    /// The owner's process.
    pub pid: u32,
    /// The descriptor in it.
    pub descriptor: u32,
    /// Bytes of data.
    pub bytes: u64,
    /// Differs between any two regions.
    pub nonce: [u64; 2],
}

impl RegionCard {
    fn file_bytes(&self) -> Result<u64> {
        let absurd = Error::System { call: "memfd_create", source: rustix::io::Errno::FBIG };
        let page = page() as u64;
        let data =
            self.bytes.max(1).checked_next_multiple_of(page).filter(|bytes| *bytes < 1 << 48);
        data.map(|bytes| page + bytes).ok_or(absurd)
    }

    fn map(&self, file: &OwnedFd) -> Result<Mapping> {
        let bytes = self.file_bytes()?;
        verify(file.as_fd(), bytes)?;
        let len = usize::try_from(bytes)
            .map_err(|_| Error::NotASegment { expected: bytes, actual: bytes })?;
        Mapping::shared(file.as_fd(), len)
    }
}

/// Memory to share: the owner's own, or a mapping of a peer's.
#[derive(Debug)]
pub struct Region {
    card: RegionCard,
    mapping: Mapping,
    /// The owner's.
    file: Option<OwnedFd>,
    guard: Guard,
}

impl Region {
    /// Zeros of this process.
    ///
    /// # Errors
    /// `System`.
    pub fn create(bytes: usize) -> Result<Self> {
        let mut card = RegionCard {
            pid: std::process::id(),
            descriptor: 0,
            bytes: bytes as u64,
            nonce: nonce()?,
        };
        let file = sealed("farandole-region", card.file_bytes()?)?;
        // Descriptors are not negative.
        card.descriptor = u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX);
        let mapping = card.map(&file)?;
        let region = Self { card, mapping, file: Some(file), guard: Guard::new() };
        for (word, value) in region.head().nonce.iter().zip(card.nonce) {
            word.store(value, Ordering::Relaxed);
        }
        Ok(region)
    }

    /// Maps the region of another process.
    ///
    /// # Errors
    /// `System` when this process may not, or finds nothing; `NotASegment`, `AnotherRegion` when it
    /// finds something else.
    pub fn open(card: &RegionCard) -> Result<Self> {
        let RegionCard { pid, descriptor, .. } = *card;
        // Looked at before it is opened: opening whatever else has this number could block or do
        // something.
        let place = format!("/proc/{pid}/fd/{descriptor}");
        let found = open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::of("open"))?;
        let kind = fstat(&found).map_err(Error::of("fstat"))?.st_mode;
        if FileType::from_raw_mode(kind) != FileType::RegularFile {
            return Err(Error::AnotherRegion { pid, descriptor });
        }
        let place = format!("/proc/self/fd/{}", found.as_raw_fd());
        let file = open(place, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::of("open"))?;
        let mapping = card.map(&file)?;
        let region = Self { card: *card, mapping, file: None, guard: Guard::new() };
        let nonce = region.head().nonce.each_ref().map(|word| word.load(Ordering::Relaxed));
        if nonce == card.nonce { Ok(region) } else { Err(Error::AnotherRegion { pid, descriptor }) }
    }

    fn head(&self) -> &Head {
        self.mapping.head()
    }

    /// Returns the card that others need to map it.
    pub fn card(&self) -> &RegionCard {
        &self.card
    }

    /// First byte of the data; a page begins there. It is valid for `card().bytes` bytes.
    pub fn address(&self) -> *mut u8 {
        self.mapping.data(0)
    }

    /// Returns whether it is no longer its owner's memory: there is no use for it but to unmap it.
    pub fn retired(&self) -> bool {
        self.head().retired.load(Ordering::Acquire) != 0
    }

    /// Returns whether it may be announced to others: by its owner, in the process that created it.
    pub fn is_shareable(&self) -> bool {
        self.file.is_some() && self.guard.intact() && !self.retired()
    }

    /// Returns whether this is the process that mapped it, and no child of it.
    pub fn is_intact(&self) -> bool {
        self.guard.intact()
    }

    /// Owner: takes the memory away from all others, where it is and with what it holds. What they
    /// still write is not seen here, and what they read does not change any more. Nobody here may
    /// write to it meanwhile.
    ///
    /// # Errors
    /// `System`; it is shared as before, but must not be used.
    pub fn detach(&self) -> Result<()> {
        self.guard.check()?;
        if self.file.is_none() || self.head().retired.swap(1, Ordering::AcqRel) != 0 {
            return Ok(());
        }
        self.mapping.privatize()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(file) = self.file.as_ref().filter(|_| self.guard.intact()) else { return };
        if self.head().retired.swap(1, Ordering::AcqRel) == 0 {
            // Others unmap it when they look; its memory is free now. Where that is refused, it is
            // so then.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let bytes = self.card.file_bytes().unwrap_or_default().saturating_sub(page() as u64);
            let _ = fallocate(file, hole, page() as u64, bytes);
        }
    }
}

fn nonce() -> Result<[u64; 2]> {
    let mut nonce = [0_u8; 16];
    let mut filled = 0;
    while filled < nonce.len() {
        let empty = nonce.get_mut(filled..).unwrap_or_default();
        filled += getrandom(empty, GetRandomFlags::empty()).map_err(Error::of("getrandom"))?;
    }
    let [a, b, c, d, e, f, g, h, rest @ ..] = nonce;
    Ok([u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes(rest)])
}

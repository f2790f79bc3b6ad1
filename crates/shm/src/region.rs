// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of one process that other processes of the host map and use.
//!
//! ```text
//! memfd    | nonce, retired | data ......... |
//! ```
//!
//! A process with the [`RegionHandle`] opens the descriptor through `/proc`, which the kernel
//! allows to processes of the same user only. Process ids differ between containers, so opened
//! memory is accepted only if it has the nonce.
#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, fallocate, fstat, open};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::fork_detection::ForkGuard;
use crate::memory::{MemoryMapping, SharedAtomics, page_size};
use crate::segment::{create_sealed_memfd, verify_sealed_memfd};
use crate::{Error, Result};

#[repr(C)]
struct RegionHeader {
    nonce: [AtomicU64; 2],
    /// 1 if the region is no longer the owner's memory.
    retired: AtomicU32,
}

// SAFETY: atomics only.
unsafe impl SharedAtomics for RegionHeader {}

/// The location of a region, with the nonce that identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionHandle {
    /// Process id of the owner.
    pub pid: u32,
    /// Descriptor number in that process.
    pub descriptor: u32,
    /// Size of the data in bytes.
    pub bytes: u64,
    /// Random number, different for every region.
    pub nonce: [u64; 2],
}

impl RegionHandle {
    fn file_bytes(&self) -> Result<u64> {
        let absurd = Error::System { call: "memfd_create", source: rustix::io::Errno::FBIG };
        let page = page_size() as u64;
        let data =
            // The number comes from a peer: an absurd one must not overflow, nor fail only in mmap.
            self.bytes.max(1).checked_next_multiple_of(page).filter(|bytes| *bytes < 1 << 48);
        data.map(|bytes| page + bytes).ok_or(absurd)
    }

    fn map_file(&self, file: &OwnedFd) -> Result<MemoryMapping> {
        let bytes = self.file_bytes()?;
        verify_sealed_memfd(file.as_fd(), bytes)?;
        let len = usize::try_from(bytes)
            .map_err(|_| Error::NotASegment { expected: bytes, actual: bytes })?;
        MemoryMapping::map_shared(file.as_fd(), len)
    }
}

/// Memory to share: created by this process, or mapped from a peer.
#[derive(Debug)]
pub struct SharedRegion {
    handle: RegionHandle,
    mapping: MemoryMapping,
    /// The memfd; only in the owner.
    file: Option<OwnedFd>,
    guard: ForkGuard,
}

impl SharedRegion {
    /// Creates a region of zeros, owned by this process.
    ///
    /// # Errors
    /// `System`.
    pub fn create(bytes: usize) -> Result<Self> {
        let mut handle = RegionHandle {
            pid: std::process::id(),
            descriptor: 0,
            bytes: bytes as u64,
            nonce: random_nonce()?,
        };
        let file = create_sealed_memfd("farandole-region", handle.file_bytes()?)?;
        // Descriptors are not negative.
        handle.descriptor = u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX);
        let mapping = handle.map_file(&file)?;
        let region = Self { handle, mapping, file: Some(file), guard: ForkGuard::new() };
        for (word, value) in region.region_header().nonce.iter().zip(handle.nonce) {
            // Relaxed is enough: peers get the handle over a link, which orders their loads after
            // this.
            word.store(value, Ordering::Relaxed);
        }
        Ok(region)
    }

    /// Maps the region of another process.
    ///
    /// # Errors
    /// `System` when this process has no permission, or the descriptor does not exist;
    /// `NotASegment`, `AnotherRegion` when the descriptor refers to something else.
    pub fn open_peer_region(handle: &RegionHandle) -> Result<Self> {
        let RegionHandle { pid, descriptor, .. } = *handle;
        // The file type is checked before the file is opened, because opening a file of another
        // type could block or have side effects.
        let place = format!("/proc/{pid}/fd/{descriptor}");
        let found = open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::failed_call_mapper("open"))?;
        let kind = fstat(&found).map_err(Error::failed_call_mapper("fstat"))?.st_mode;
        if FileType::from_raw_mode(kind) != FileType::RegularFile {
            return Err(Error::AnotherRegion { pid, descriptor });
        }
        // The path names the file that was checked, even if the peer has closed it and used the
        // number again.
        let place = format!("/proc/self/fd/{}", found.as_raw_fd());
        let file = open(place, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::failed_call_mapper("open"))?;
        let mapping = handle.map_file(&file)?;
        let region = Self { handle: *handle, mapping, file: None, guard: ForkGuard::new() };
        // Checked before the first use of the data: in another namespace, the same numbers may lead
        // to the memory of an unrelated process.
        let nonce =
            region.region_header().nonce.each_ref().map(|word| word.load(Ordering::Relaxed));
        if nonce == handle.nonce {
            Ok(region)
        } else {
            Err(Error::AnotherRegion { pid, descriptor })
        }
    }

    fn region_header(&self) -> &RegionHeader {
        self.mapping.shared_header()
    }

    /// Returns the handle with which other processes map the region.
    pub fn region_handle(&self) -> &RegionHandle {
        &self.handle
    }

    /// Returns the address of the data, which is page-aligned and valid for `region_handle().bytes`
    /// bytes.
    pub fn data_address(&self) -> *mut u8 {
        self.mapping.data_address(0)
    }

    /// Returns whether the region is no longer its owner's memory. It is then only to be unmapped.
    pub fn is_retired(&self) -> bool {
        self.region_header().retired.load(Ordering::Acquire) != 0
    }

    /// Returns whether other processes may be given the handle: only by the owner, in the process
    /// that created the region, and before it is retired.
    pub fn is_shareable(&self) -> bool {
        self.file.is_some() && self.guard.is_original_process() && !self.is_retired()
    }

    /// Returns whether this is the process that mapped the region, and not a forked child.
    pub fn is_original_process(&self) -> bool {
        self.guard.is_original_process()
    }

    /// Owner: detaches the memory from all other processes, at the same address and with the same
    /// content. Later writes of other processes are not visible here, and the content that they
    /// read no longer changes. No thread of this process may write to the memory during the call.
    ///
    /// # Errors
    /// `System`; the memory is then still shared, but must not be used.
    pub fn detach_from_peers(&self) -> Result<()> {
        self.guard.check_not_forked()?;
        // The mark comes first: after the copy, a peer that checks must not find the region
        // current.
        if self.file.is_none() || self.region_header().retired.swap(1, Ordering::AcqRel) != 0 {
            return Ok(());
        }
        self.mapping.make_data_pages_private()
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // A forked child must not free the memory of its parent.
        let Some(file) = self.file.as_ref().filter(|_| self.guard.is_original_process()) else {
            return;
        };
        // After a detach, peers may still read the old content, so it must stay until they unmap.
        if self.region_header().retired.swap(1, Ordering::AcqRel) == 0 {
            // Frees the memory now; other processes unmap the region at their next check. If the
            // kernel refuses to free it, it is freed at that time.
            // The first page stays, because peers read the mark in it.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let bytes =
                self.handle.file_bytes().unwrap_or_default().saturating_sub(page_size() as u64);
            let _ = fallocate(file, hole, page_size() as u64, bytes);
        }
    }
}

fn random_nonce() -> Result<[u64; 2]> {
    let mut nonce = [0_u8; 16];
    let mut filled = 0;
    while filled < nonce.len() {
        let empty = nonce.get_mut(filled..).unwrap_or_default();
        filled += getrandom(empty, GetRandomFlags::empty())
            .map_err(Error::failed_call_mapper("getrandom"))?;
    }
    let [a, b, c, d, e, f, g, h, rest @ ..] = nonce;
    Ok([u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes(rest)])
}

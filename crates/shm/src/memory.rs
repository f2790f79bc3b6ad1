// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Mappings: the one place that calls mmap and munmap.

#![expect(unsafe_code, reason = "maps memory and looks at it through typed references")]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::{Error, Result};

/// Returns the bytes of a page.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// A range of addresses, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory owned by this value; what lies in it is only reached through
// atomics or through the pointers of `Mapping::pointer`, whose users argue for themselves.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives out atomics only.
unsafe impl Sync for Mapping {}

/// Types that may lie in memory which other processes write at any time.
///
/// # Safety
/// Only atomics (and arrays and `repr(C)` structs of them), for which every bit pattern is valid;
/// at most one page.
pub(crate) unsafe trait Shared {}

fn owned(base: *mut c_void, len: usize) -> Result<Mapping> {
    let base = NonNull::new(base.cast())
        .ok_or(Error::System { call: "mmap", source: rustix::io::Errno::FAULT })?;
    Ok(Mapping { base, len })
}

impl Mapping {
    /// Maps the first `len` bytes of `fd`.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        };
        owned(base.map_err(Error::of("mmap"))?, len)
    }

    /// Returns one private page that reads as zeros in a forked child; fails where the kernel
    /// cannot.
    pub(crate) fn wiped_on_fork() -> Result<Self> {
        let len = page();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        let mapping = owned(base.map_err(Error::of("mmap"))?, len)?;
        // SAFETY: the range is exactly the mapping above, which nobody else knows yet.
        unsafe { madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxWipeOnFork) }
            .map_err(Error::of("madvise"))?;
        Ok(mapping)
    }

    /// Maps the page at `control`, then the `capacity` bytes at `data` twice, back to back.
    pub(crate) fn mirrored(
        fd: BorrowedFd<'_>,
        control: u64,
        data: u64,
        capacity: usize,
    ) -> Result<Self> {
        let len = page() + 2 * capacity;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh reservation at an address of the kernel's choice touches no existing
        // memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), reserve) };
        let mapping = owned(base.map_err(Error::of("mmap"))?, len)?;
        for (at, bytes, offset) in
            [(0, page(), control), (page(), capacity, data), (page() + capacity, capacity, data)]
        {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: MAP_FIXED replaces a part of the reservation above, which this value owns and
            // nobody uses yet.
            unsafe {
                let target = mapping.base.as_ptr().add(at).cast();
                mmap(target, bytes, protection, MapFlags::SHARED | MapFlags::FIXED, fd, offset)
            }
            .map_err(Error::of("mmap"))?;
        }
        Ok(mapping)
    }

    /// Returns the atomics at the start of the first page.
    pub(crate) fn head<T: Shared>(&self) -> &T {
        const { assert!(size_of::<T>() <= 4096 && align_of::<T>() <= 4096) };
        // SAFETY: every mapping starts on a page boundary and has at least one page, `T` fits in it
        // (asserted) and is made of atomics, valid for every bit pattern; the reference lives no
        // longer than the mapping.
        unsafe { self.base.cast::<T>().as_ref() }
    }

    /// Puts private copies in the place of all pages but the first. Nobody may write to them
    /// meanwhile.
    pub(crate) fn privatize(&self) -> Result<()> {
        let len = self.len - page();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        let copy = owned(base.map_err(Error::of("mmap"))?, len)?;
        // SAFETY: `len` bytes of this mapping follow its first page, the other one has as many and
        // is new.
        unsafe { ptr::copy_nonoverlapping(self.data(0), copy.base.as_ptr(), len) };
        let (from, to) = (copy.base.as_ptr().cast(), self.data(0).cast());
        // SAFETY: replaces pages of this mapping by others with the same bytes, in one step; from
        // the place they come from they are gone.
        unsafe { mremap_fixed(from, len, len, MremapFlags::MAYMOVE, to) }
            .map_err(Error::of("mremap"))?;
        std::mem::forget(copy);
        Ok(())
    }

    /// Address of a byte of the data of a mirrored mapping, or behind the first page of any other.
    pub(crate) fn data(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(page() + offset)
    }
}

/// Private memory of zeros in large pages, where the system has them.
#[derive(Debug)]
pub struct Pages(Mapping);

impl Pages {
    /// Maps `bytes` of memory, which are not 0. No page is there before its first use.
    ///
    /// # Errors
    /// `System` where there is no such memory.
    pub fn new(bytes: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let mapping = owned(base.map_err(Error::of("mmap"))?, bytes)?;
        prefer_large_pages(mapping.base.as_ptr().addr(), bytes);
        Ok(Self(mapping))
    }

    /// First address.
    pub fn address(&self) -> NonNull<u8> {
        self.0.base
    }
}

/// Asks the system for large pages in a range of addresses, which it may decline. Pages that are
/// there stay as they are.
///
/// Linux calls them transparent huge pages. By default it has them only where it is asked. The
/// first use of memory costs 4 times as much without them: 64 MiB take 33 ms instead of 8.
pub fn prefer_large_pages(address: usize, bytes: usize) {
    let first = address.next_multiple_of(page());
    let end = (address.saturating_add(bytes)) / page() * page();
    if first < end {
        let start = ptr::without_provenance_mut(first);
        // SAFETY: the advice changes no content, and no page of anybody. Of addresses that are not
        // mapped the kernel only says so.
        let _ = unsafe { madvise(start, end - first, Advice::LinuxHugepage) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, and every reference into it borrows from it.
        // The result says nothing that could be acted on.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

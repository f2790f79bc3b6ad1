// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory mappings. Only this module calls mmap and munmap.

#![expect(unsafe_code, reason = "maps memory and looks at it through typed references")]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::{Error, Result};

/// Returns the size of a page in bytes.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// A range of addresses, unmapped on drop.
#[derive(Debug)]
pub(crate) struct MemoryMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory owned by this value. Its content is only accessed through
// atomics or through the pointers of `MemoryMapping::data_address`, whose users have their own
// safety arguments.
unsafe impl Send for MemoryMapping {}
// SAFETY: as above; a shared reference gives access to atomics only.
unsafe impl Sync for MemoryMapping {}

/// Types that may be in memory to which other processes write at any time.
///
/// # Safety
/// The type must consist only of atomics (and arrays and `repr(C)` structs of them), for which
/// every bit pattern is valid, and must fit in one page.
pub(crate) unsafe trait SharedAtomics {}

fn mapping_from_raw(base: *mut c_void, len: usize) -> Result<MemoryMapping> {
    let base = NonNull::new(base.cast())
        .ok_or(Error::System { call: "mmap", source: rustix::io::Errno::FAULT })?;
    Ok(MemoryMapping { base, len })
}

impl MemoryMapping {
    /// Maps the first `len` bytes of `fd`.
    pub(crate) fn map_shared(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        };
        mapping_from_raw(base.map_err(Error::failed_call_mapper("mmap"))?, len)
    }

    /// Maps one private page that reads as zeros in a forked child; fails if the kernel does not
    /// support that.
    pub(crate) fn map_wiped_on_fork() -> Result<Self> {
        let len = page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        let mapping = mapping_from_raw(base.map_err(Error::failed_call_mapper("mmap"))?, len)?;
        // SAFETY: the range is exactly the mapping above, to which no other code has a reference
        // yet.
        unsafe { madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxWipeOnFork) }
            .map_err(Error::failed_call_mapper("madvise"))?;
        Ok(mapping)
    }

    /// Maps the page at offset `control`, then the `capacity` bytes at offset `data` twice, back to
    /// back.
    pub(crate) fn map_mirrored(
        fd: BorrowedFd<'_>,
        control: u64,
        data: u64,
        capacity: usize,
    ) -> Result<Self> {
        let len = page_size() + 2 * capacity;
        // The whole range is reserved first, so that no other mapping gets between the parts.
        // Without access rights and with NORESERVE, it does not count towards the overcommit limit.
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh reservation at an address of the kernel's choice touches no existing
        // memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), reserve) };
        let mapping = mapping_from_raw(base.map_err(Error::failed_call_mapper("mmap"))?, len)?;
        for (at, bytes, offset) in [
            (0, page_size(), control),
            (page_size(), capacity, data),
            // The second copy makes each window contiguous, so no caller handles the end of the
            // ring.
            (page_size() + capacity, capacity, data),
        ] {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: MAP_FIXED replaces a part of the reservation above, which this value owns and
            // no other code uses yet.
            unsafe {
                let target = mapping.base.as_ptr().add(at).cast();
                mmap(target, bytes, protection, MapFlags::SHARED | MapFlags::FIXED, fd, offset)
            }
            .map_err(Error::failed_call_mapper("mmap"))?;
        }
        Ok(mapping)
    }

    /// Returns the atomics at the start of the first page.
    pub(crate) fn shared_header<T: SharedAtomics>(&self) -> &T {
        const { assert!(size_of::<T>() <= 4096 && align_of::<T>() <= 4096) };
        // SAFETY: every mapping starts on a page boundary and has at least one page, `T` fits in it
        // (asserted) and is made of atomics, valid for every bit pattern; the reference lives no
        // longer than the mapping.
        unsafe { self.base.cast::<T>().as_ref() }
    }

    /// Replaces all pages but the first by private copies. No thread of this process may write to
    /// them meanwhile.
    pub(crate) fn make_data_pages_private(&self) -> Result<()> {
        let len = self.len - page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        let copy = mapping_from_raw(base.map_err(Error::failed_call_mapper("mmap"))?, len)?;
        // SAFETY: `len` bytes of this mapping follow its first page; the copy has the same size,
        // and is new, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.data_address(0), copy.base.as_ptr(), len) };
        let (from, to) = (copy.base.as_ptr().cast(), self.data_address(0).cast());
        // SAFETY: the call atomically replaces pages of this mapping by pages with the same bytes.
        // The pages of the copy are moved, so they are no longer mapped at their old address.
        unsafe { mremap_fixed(from, len, len, MremapFlags::MAYMOVE, to) }
            .map_err(Error::failed_call_mapper("mremap"))?;
        // Its drop would unmap the old addresses, which may belong to another mapping by now.
        std::mem::forget(copy);
        Ok(())
    }

    /// Returns the address of a byte of the data: `offset` counts from the end of the first page.
    pub(crate) fn data_address(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(page_size() + offset)
    }
}

/// Private zeroed memory in large pages, if the system has them.
#[derive(Debug)]
pub struct HugePageMemory(MemoryMapping);

impl HugePageMemory {
    /// Maps `bytes` of memory; `bytes` must not be 0. Each page is allocated at its first use.
    ///
    /// # Errors
    /// `System` when the memory cannot be mapped.
    pub fn new(bytes: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let mapping = mapping_from_raw(base.map_err(Error::failed_call_mapper("mmap"))?, bytes)?;
        prefer_large_pages(mapping.base.as_ptr().addr(), bytes);
        Ok(Self(mapping))
    }

    /// Returns the first address.
    pub fn start_address(&self) -> NonNull<u8> {
        self.0.base
    }
}

/// Asks the system for large pages in a range of addresses, which the system may decline. Pages
/// that are already allocated stay unchanged.
///
/// Linux calls them transparent huge pages, and by default uses them only on request. Without them,
/// the first use of memory takes 4 times as long: 33 ms instead of 8 ms for 64 MiB.
pub fn prefer_large_pages(address: usize, bytes: usize) {
    // madvise takes whole pages only; the caller's memory may begin and end inside a page.
    let first = address.next_multiple_of(page_size());
    let end = (address.saturating_add(bytes)) / page_size() * page_size();
    if first < end {
        let start = ptr::without_provenance_mut(first);
        // SAFETY: the advice changes no content and unmaps no page. For unmapped addresses the
        // kernel only returns an error, which is ignored.
        let _ = unsafe { madvise(start, end - first, Advice::LinuxHugepage) };
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, and every reference into it borrows from it.
        // A failure is ignored, because a drop cannot handle it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

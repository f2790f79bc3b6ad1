// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of tensors, by address, without linking a framework.
#![expect(unsafe_code, reason = "the one place where addresses become slices")]

mod flat;
mod past;
mod shared;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use farandole_shm::{Pages, Region};

pub use farandole_shm::prefer_large_pages;
pub(crate) use flat::Flat;
pub use past::copy_past_caches;
pub(crate) use shared::home;

/// The memory that holds a buffer's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Addressable by this process.
    Host,
    /// On the device with this ordinal.
    Device(u32),
}

/// A stream of a framework's on a device: work that is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(usize);

impl Stream {
    /// Returns the stream of this handle, as the framework and the device's driver know it.
    ///
    /// # Safety
    /// It is a stream of the device it is used with, or 0 for the default one, and lives while it
    /// is used.
    pub unsafe fn from_raw(handle: usize) -> Self {
        Self(handle)
    }

    /// Returns its handle.
    pub fn handle(self) -> usize {
        self.0
    }
}

/// A range of memory that stays valid until the operation it takes part in has completed.
#[derive(Clone, Debug)]
pub struct Buffer {
    address: NonNull<u8>,
    bytes: usize,
    place: Place,
    owner: Option<Memory>,
}

// SAFETY: a buffer is an address and a length; the caller of `from_raw` promised that the range may
// be used from the engine's threads until the operation completes.
unsafe impl Send for Buffer {}
// SAFETY: as for Send; shared references only hand out the address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Returns a range with another owner.
    ///
    /// # Safety
    /// `address` must stay valid for `bytes` bytes, for writing if it is used as an output, and no
    /// one else may write it, until every operation given this buffer has completed or failed.
    pub unsafe fn from_raw(address: *mut u8, bytes: usize, place: Place) -> Self {
        Self {
            address: NonNull::new(address).unwrap_or(NonNull::dangling()),
            bytes,
            place,
            owner: None,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the memory that holds the bytes.
    pub fn place(&self) -> Place {
        self.place
    }

    /// First address.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Returns a part of this buffer, cut to what there is, that keeps the same memory alive.
    #[must_use]
    pub fn slice(&self, offset: usize, bytes: usize) -> Self {
        Self { owner: self.owner.clone(), ..self.view(offset, bytes) }
    }

    /// Like [`Buffer::slice`], to be dropped before this buffer.
    fn view(&self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        let address = self.address.as_ptr().wrapping_add(offset);
        Self {
            address: NonNull::new(address).unwrap_or(NonNull::dangling()),
            bytes: bytes.min(self.bytes - offset),
            place: self.place,
            owner: None,
        }
    }

    /// Returns the bytes, for reading. Empty when they are not on the host.
    ///
    /// # Safety
    /// Nobody may write them while the slice lives.
    pub unsafe fn bytes(&self) -> &[u8] {
        match self.place {
            // SAFETY: valid for `bytes` by the promise of `from_raw` or by the owner; not written
            // by the caller's promise.
            Place::Host => unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) },
            Place::Device(_) => &[],
        }
    }

    /// Returns the bytes, for writing. Empty when they are not on the host.
    ///
    /// # Safety
    /// Nobody else may read or write them while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the buffer is an address; exclusiveness is the caller's promise"
    )]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        match self.place {
            // SAFETY: as in `bytes`, and exclusive by the caller's promise.
            Place::Host => unsafe {
                std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes)
            },
            Place::Device(_) => &mut [],
        }
    }
}

/// Bytes from which on memory comes from the system and goes back to it, as with the allocator of
/// glibc.
pub const LARGE: usize = 32 << 20;

/// Host memory of ours or of a peer, aligned to a cache line, shared by reference counting.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    address: NonNull<u8>,
    bytes: usize,
    store: Store,
}

#[derive(Debug)]
enum Store {
    Heap(Layout),
    Pages(#[expect(dead_code, reason = "held, and unmapped by its drop")] Pages),
    Region(Region),
}

// SAFETY: plain memory, freed once by the last owner.
unsafe impl Send for Allocation {}
// SAFETY: as for Send; access goes through Buffer's unsafe methods.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        match &self.store {
            // SAFETY: allocated with this layout in `Memory::new` and freed only here.
            Store::Heap(layout) => unsafe { dealloc(self.address.as_ptr(), *layout) },
            // A forked child might wait for ever for the table, and does not need it.
            Store::Region(region) if region.is_intact() => shared::forget(self.address),
            Store::Pages(_) | Store::Region(_) => {}
        }
    }
}

/// Returns the layout of memory for tensors, aligned for vector instructions; `None` for impossible
/// sizes.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), 64).ok()
}

impl Memory {
    /// Zeroed memory: uninitialised bytes would be unsound to read. Large memory consists of fresh
    /// pages, which are zero anyway.
    ///
    /// Ends the process where there is none, as every allocation does.
    pub fn new(bytes: usize) -> Self {
        // The layout is for the message only.
        let fail = || handle_alloc_error(layout(bytes).unwrap_or(Layout::new::<u8>()));
        Self::try_new(bytes).unwrap_or_else(fail)
    }

    /// Like [`Memory::new`]; `None` where there is no such memory.
    pub fn try_new(bytes: usize) -> Option<Self> {
        let layout = layout(bytes)?;
        if bytes >= LARGE {
            let pages = Pages::new(bytes).ok()?;
            let address = pages.address();
            return Some(Self(Arc::new(Allocation { address, bytes, store: Store::Pages(pages) })));
        }
        // SAFETY: the layout's size is not zero.
        let address = unsafe { alloc_zeroed(layout) };
        let address = NonNull::new(address)?;
        Some(Self(Arc::new(Allocation { address, bytes, store: Store::Heap(layout) })))
    }

    /// Returns memory filled with one element again and again, the last one cut off where it must
    /// be.
    pub fn repeating(bytes: usize, element: &[u8]) -> Self {
        let memory = Self::new(bytes);
        if element.iter().any(|byte| *byte != 0) {
            let buffer = memory.buffer();
            // SAFETY: nobody else knows this memory yet, and the slice ends here.
            let all = unsafe { buffer.bytes_mut() };
            for cell in all.chunks_mut(element.len()) {
                cell.copy_from_slice(&element[..cell.len()]);
            }
        }
        memory
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// First address.
    pub fn address(&self) -> *mut u8 {
        self.0.address.as_ptr()
    }

    /// Returns whether nobody in this process has another clone of it, or a buffer of its bytes.
    pub fn is_sole(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Returns a copy of the bytes; `None` while somebody else in this process may write them.
    pub fn to_vec(&self) -> Option<Vec<u8>> {
        if !self.is_sole() || self.region().is_some() {
            return None;
        }
        let buffer = self.buffer();
        // SAFETY: nobody else has this memory, and the slice ends here.
        Some(unsafe { buffer.bytes() }.to_vec())
    }

    /// Returns the whole range as a buffer that keeps this memory alive.
    pub fn buffer(&self) -> Buffer {
        Buffer {
            address: self.0.address,
            bytes: self.0.bytes,
            place: Place::Host,
            owner: Some(self.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_allocated_is_refused_and_not_reduced() {
        for bytes in [usize::MAX, isize::MAX.unsigned_abs(), isize::MAX.unsigned_abs() - 63] {
            assert!(Memory::try_new(bytes).is_none(), "{bytes} bytes");
            assert!(Memory::shareable(bytes).is_none(), "{bytes} bytes");
        }
        for bytes in [1000, LARGE, LARGE + 1] {
            let memory = Memory::try_new(bytes).unwrap();
            assert_eq!(memory.len(), bytes);
            assert!(memory.to_vec().unwrap().iter().all(|byte| *byte == 0), "{bytes} bytes");
        }
    }
}

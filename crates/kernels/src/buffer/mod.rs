// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of tensors, given by address, so that no framework has to be linked.
#![expect(unsafe_code, reason = "the one place where addresses become slices")]

mod allocation;
mod gather_list;
mod nontemporal_copy;
mod shareable_memory;

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use farandole_shm::HugePageMemory;

use self::allocation::{AllocationSource, HostAllocation};

pub use farandole_shm::prefer_large_pages;
pub use gather_list::GatherList;
pub use nontemporal_copy::copy_nontemporal;
pub use shareable_memory::find_shareable_memory;

/// Kind of memory that holds the bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Host memory, addressable by this process.
    Host,
    /// Memory of the device with this ordinal.
    Device(u32),
}

/// Stream of a framework on a device: the device executes its work in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceStream(usize);

impl DeviceStream {
    /// Returns the stream with this handle, which the framework and the driver of the device share.
    ///
    /// # Safety
    /// `handle` is a stream of the device with which it is used, or 0 for the default stream, and
    /// the stream exists for as long as it is used.
    pub unsafe fn from_raw(handle: usize) -> Self {
        Self(handle)
    }

    /// Returns the handle of the stream.
    pub fn raw_handle(self) -> usize {
        self.0
    }
}

/// Range of memory that stays valid until the operation that uses it has completed.
#[derive(Clone, Debug)]
pub struct Buffer {
    address: NonNull<u8>,
    bytes: usize,
    memory_kind: MemoryKind,
    owner: Option<HostMemory>,
}

// SAFETY: a buffer is an address and a length; the caller of `from_raw` promised that the range may
// be used from the engine's threads until the operation completes.
unsafe impl Send for Buffer {}
// SAFETY: as for Send; shared references only hand out the address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Returns a range of memory that other code owns.
    ///
    /// # Safety
    /// Until every operation with this buffer has completed or failed, `address` must stay valid
    /// for `bytes` bytes, also for writing if the buffer is an output, and no other code may write
    /// it.
    pub unsafe fn from_raw(address: *mut u8, bytes: usize, place: MemoryKind) -> Self {
        Self {
            // Frameworks pass a null address for an empty tensor.
            address: NonNull::new(address).unwrap_or(NonNull::dangling()),
            bytes,
            memory_kind: place,
            owner: None,
        }
    }

    /// Returns a buffer that has a length and no memory, for simulations. A [`GatherList`] of such
    /// buffers has no bytes to read or write.
    pub fn without_memory(bytes: usize) -> Self {
        let memory_kind = MemoryKind::Device(u32::MAX);
        Self { address: NonNull::dangling(), bytes, memory_kind, owner: None }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the kind of memory that holds the bytes.
    pub fn memory_kind(&self) -> MemoryKind {
        self.memory_kind
    }

    /// Returns the first address.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Returns a part of this buffer, cut off at its end. The part keeps the same memory alive.
    #[must_use]
    pub fn slice(&self, offset: usize, bytes: usize) -> Self {
        Self { owner: self.owner.clone(), ..self.unowned_slice(offset, bytes) }
    }

    /// Like [`Buffer::slice`], but the part does not keep the memory alive: drop it before this
    /// buffer.
    fn unowned_slice(&self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        // `wrapping_add` is allowed for any address, also for one on a device.
        let address = self.address.as_ptr().wrapping_add(offset);
        Self {
            address: NonNull::new(address).unwrap_or(NonNull::dangling()),
            bytes: bytes.min(self.bytes - offset),
            memory_kind: self.memory_kind,
            owner: None,
        }
    }

    /// Returns the bytes for reading; empty if they are not on the host.
    ///
    /// # Safety
    /// No code may write the bytes while the slice lives.
    pub unsafe fn as_bytes(&self) -> &[u8] {
        match self.memory_kind {
            // SAFETY: valid for `self.bytes` bytes by the promise made at `from_raw`, or because
            // the owner keeps the memory alive. Not written, by the caller's promise.
            MemoryKind::Host => unsafe {
                std::slice::from_raw_parts(self.address.as_ptr(), self.bytes)
            },
            // The host cannot read these addresses, so an empty slice is the safe answer.
            MemoryKind::Device(_) => &[],
        }
    }

    /// Returns the bytes for writing; empty if they are not on the host.
    ///
    /// # Safety
    /// No other code may read or write the bytes while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the buffer is an address; exclusiveness is the caller's promise"
    )]
    pub unsafe fn as_bytes_mut(&self) -> &mut [u8] {
        match self.memory_kind {
            // SAFETY: as in `as_bytes`, and exclusive by the caller's promise.
            MemoryKind::Host => unsafe {
                std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes)
            },
            MemoryKind::Device(_) => &mut [],
        }
    }
}

/// Smallest number of bytes for which memory comes directly from the system and goes back to it, as
/// in the allocator of glibc.
pub const LARGE_MEMORY_BYTES: usize = 32 << 20;

/// Host memory of this process or of a peer, aligned to a cache line, with a reference count.
#[derive(Clone, Debug)]
pub struct HostMemory(Arc<HostAllocation>);

/// Returns the layout of memory for tensors, aligned for vector instructions; `None` for impossible
/// sizes.
fn tensor_layout(bytes: usize) -> Option<Layout> {
    // An allocation of 0 bytes would be undefined.
    Layout::from_size_align(bytes.max(1), 64).ok()
}

impl HostMemory {
    /// Returns zeroed memory, because reading uninitialised bytes would be unsound. Large memory
    /// consists of fresh pages, which are zero.
    ///
    /// Ends the process if there is no such memory, as every Rust allocation does.
    pub fn new(bytes: usize) -> Self {
        // The layout is only used in the message.
        let fail = || handle_alloc_error(tensor_layout(bytes).unwrap_or(Layout::new::<u8>()));
        Self::try_new(bytes).unwrap_or_else(fail)
    }

    /// Like [`HostMemory::new`], but returns `None` if there is no such memory.
    pub fn try_new(bytes: usize) -> Option<Self> {
        let layout = tensor_layout(bytes)?;
        if bytes >= LARGE_MEMORY_BYTES {
            // Fresh pages are zero already, and large pages take fewer faults than the heap's.
            let pages = HugePageMemory::new(bytes).ok()?;
            let address = pages.start_address();
            return Some(Self(Arc::new(HostAllocation {
                address,
                bytes,
                store: AllocationSource::Pages(pages),
            })));
        }
        // SAFETY: the size of the layout is not zero.
        let address = unsafe { alloc_zeroed(layout) };
        let address = NonNull::new(address)?;
        Some(Self(Arc::new(HostAllocation {
            address,
            bytes,
            store: AllocationSource::Heap(layout),
        })))
    }

    /// Returns memory that is filled with copies of one element. The last copy is cut off if it
    /// does not fit.
    pub fn filled_with(bytes: usize, element: &[u8]) -> Self {
        let memory = Self::new(bytes);
        // The memory is zeroed, so zeros need no writes.
        if element.iter().any(|byte| *byte != 0) {
            let buffer = memory.as_buffer();
            // SAFETY: no other code has this memory yet, and the slice ends here.
            let all = unsafe { buffer.as_bytes_mut() };
            for cell in all.chunks_mut(element.len()) {
                cell.copy_from_slice(&element[..cell.len()]);
            }
        }
        memory
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Returns whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Returns the first address.
    pub fn address(&self) -> *mut u8 {
        self.0.address.as_ptr()
    }

    /// Returns whether this is the only handle of the memory in this process, and no buffer keeps
    /// the memory alive.
    pub fn is_uniquely_owned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Returns a copy of the bytes; `None` if other code or another process may write them.
    pub fn to_vec(&self) -> Option<Vec<u8>> {
        if !self.is_uniquely_owned() || self.shared_region().is_some() {
            return None;
        }
        let buffer = self.as_buffer();
        // SAFETY: no other code has this memory, and the slice ends here.
        Some(unsafe { buffer.as_bytes() }.to_vec())
    }

    /// Returns the whole range as a buffer that keeps this memory alive.
    pub fn as_buffer(&self) -> Buffer {
        Buffer {
            address: self.0.address,
            bytes: self.0.bytes,
            memory_kind: MemoryKind::Host,
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
            assert!(HostMemory::try_new(bytes).is_none(), "{bytes} bytes");
            assert!(HostMemory::new_shareable(bytes).is_none(), "{bytes} bytes");
        }
        for bytes in [1000, LARGE_MEMORY_BYTES, LARGE_MEMORY_BYTES + 1] {
            let memory = HostMemory::try_new(bytes).unwrap();
            assert_eq!(memory.len(), bytes);
            assert!(memory.to_vec().unwrap().iter().all(|byte| *byte == 0), "{bytes} bytes");
        }
    }
}

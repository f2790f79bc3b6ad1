// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of this process that peers may use. It is found by address, because frameworks pass
//! addresses.

use std::ptr::NonNull;
use std::sync::Arc;

use farandole_shm::{RegionHandle, SharedRegion};

use super::allocation::{AllocationSource, HostAllocation, with_shareable_memory_table};
use super::{Buffer, HostMemory};

impl HostMemory {
    /// Returns zeroed memory that the other members on this host can read and write. If the system
    /// gives no shareable memory, returns the memory of `try_new`.
    pub fn new_shareable(bytes: usize) -> Option<Self> {
        let region =
            SharedRegion::create(bytes).ok().and_then(|region| Self::from_region(region, bytes));
        let Some(memory) = region else { return Self::try_new(bytes) };
        with_shareable_memory_table(|table| {
            table.insert(memory.0.address.addr().get(), Arc::downgrade(&memory.0))
        });
        Some(memory)
    }

    /// Returns whether other members can use this memory.
    pub fn is_shareable(&self) -> bool {
        self.shared_region().is_some_and(SharedRegion::is_shareable)
    }

    /// Maps the memory of another process. `None` if its size cannot be addressed here.
    ///
    /// # Errors
    /// The region no longer exists, or cannot be mapped.
    pub fn map_peer_region(handle: &RegionHandle) -> farandole_shm::Result<Option<Self>> {
        let region = SharedRegion::open_peer_region(handle)?;
        Ok(usize::try_from(handle.bytes).ok().and_then(|bytes| Self::from_region(region, bytes)))
    }

    fn from_region(region: SharedRegion, bytes: usize) -> Option<Self> {
        let address = NonNull::new(region.data_address())?;
        Some(Self(Arc::new(HostAllocation {
            address,
            bytes,
            store: AllocationSource::Region(region),
        })))
    }

    /// Returns the region of the memory, if it was created as one.
    pub fn shared_region(&self) -> Option<&SharedRegion> {
        match &self.0.store {
            AllocationSource::Region(region) => Some(region),
            AllocationSource::Heap(_) | AllocationSource::Pages(_) => None,
        }
    }
}

/// Returns the shareable memory that contains the whole buffer, and the offset of the buffer in it.
pub fn find_shareable_memory(buffer: &Buffer) -> Option<(HostMemory, usize)> {
    let address = buffer.address().addr();
    let allocation =
        // Allocations do not overlap, so only the last one that starts before the address can
        // contain it.
        with_shareable_memory_table(|table| table.range(..=address).next_back()?.1.upgrade())?;
    let memory = HostMemory(allocation);
    let offset = address - memory.address().addr();
    let inside = offset.checked_add(buffer.len()).is_some_and(|end| end <= memory.len());
    (inside && memory.is_shareable()).then_some((memory, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_ranges_inside_it_while_it_is_registered() {
        let memory = HostMemory::new_shareable(10_000).unwrap();
        assert!(memory.is_shareable());
        let all = memory.as_buffer();
        let (found, offset) = find_shareable_memory(&all.slice(100, 9_900)).unwrap();
        assert_eq!((found.address(), offset), (memory.address(), 100));
        // SAFETY: the bytes are never accessed.
        let beyond =
            unsafe { Buffer::from_raw(all.address(), 10_001, super::super::MemoryKind::Host) };
        assert!(find_shareable_memory(&beyond).is_none());
        assert!(find_shareable_memory(&HostMemory::new(10).as_buffer()).is_none());
        // SAFETY: the bytes are never accessed.
        let stale = unsafe { Buffer::from_raw(all.address(), 10, super::super::MemoryKind::Host) };
        drop((memory, found, all));
        assert!(find_shareable_memory(&stale).is_none());
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allocations of host memory: their sources, the table of those that peers may use, and their end.

use std::alloc::{Layout, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError, Weak};

use farandole_shm::{HugePageMemory, SharedRegion};

#[derive(Debug)]
pub(super) struct HostAllocation {
    pub(super) address: NonNull<u8>,
    pub(super) bytes: usize,
    pub(super) store: AllocationSource,
}

#[derive(Debug)]
pub(super) enum AllocationSource {
    Heap(Layout),
    Pages(#[expect(dead_code, reason = "held, and unmapped by its drop")] HugePageMemory),
    Region(SharedRegion),
}

// SAFETY: plain memory, which the last owner frees once.
unsafe impl Send for HostAllocation {}
// SAFETY: as for Send; all access is through `Buffer`'s unsafe methods.
unsafe impl Sync for HostAllocation {}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        match &self.store {
            // SAFETY: allocated with this layout in `HostMemory::try_new` and freed only here.
            AllocationSource::Heap(layout) => unsafe { dealloc(self.address.as_ptr(), *layout) },
            // A forked child does not unregister: it does not need the table, and could wait for
            // its lock forever.
            AllocationSource::Region(region) if region.is_original_process() => {
                unregister_memory(self.address)
            }
            AllocationSource::Pages(_) | AllocationSource::Region(_) => {}
        }
    }
}

/// Shareable memory, by its first address.
// Weak: the table must not keep memory alive after its owners have dropped it.
static SHAREABLE_MEMORY: Mutex<BTreeMap<usize, Weak<HostAllocation>>> = Mutex::new(BTreeMap::new());

pub(super) fn with_shareable_memory_table<T>(
    change: impl FnOnce(&mut BTreeMap<usize, Weak<HostAllocation>>) -> T,
) -> T {
    // A panic elsewhere leaves the map whole, because each change is one insertion or removal.
    change(&mut SHAREABLE_MEMORY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Removes memory from the table. Must be called before the address can belong to another
/// allocation.
fn unregister_memory(address: NonNull<u8>) {
    with_shareable_memory_table(|table| table.remove(&address.addr().get()));
}

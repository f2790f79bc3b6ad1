// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of this process that others may use, found by address, because frameworks pass addresses.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use farandole_shm::{Region, RegionCard};

use super::{Allocation, Buffer, Memory, Store};

/// Shareable memory by its first address.
static TABLE: Mutex<BTreeMap<usize, Weak<Allocation>>> = Mutex::new(BTreeMap::new());

fn table<T>(change: impl FnOnce(&mut BTreeMap<usize, Weak<Allocation>>) -> T) -> T {
    change(&mut TABLE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Called before the address can be another's.
pub(super) fn forget(address: NonNull<u8>) {
    table(|table| table.remove(&address.addr().get()));
}

impl Memory {
    /// Zeroed memory that the other members of this host can work in; such as `try_new` has where
    /// the system gives none.
    pub fn shareable(bytes: usize) -> Option<Self> {
        let region = Region::create(bytes).ok().and_then(|region| Self::of(region, bytes));
        let Some(memory) = region else { return Self::try_new(bytes) };
        table(|table| table.insert(memory.0.address.addr().get(), Arc::downgrade(&memory.0)));
        Some(memory)
    }

    /// Returns whether others can work in it.
    pub fn is_shareable(&self) -> bool {
        self.region().is_some_and(Region::is_shareable)
    }

    /// Returns the memory of another process.
    pub(crate) fn of_peer(card: &RegionCard) -> farandole_shm::Result<Option<Self>> {
        let region = Region::open(card)?;
        Ok(usize::try_from(card.bytes).ok().and_then(|bytes| Self::of(region, bytes)))
    }

    fn of(region: Region, bytes: usize) -> Option<Self> {
        let address = NonNull::new(region.address())?;
        Some(Self(Arc::new(Allocation { address, bytes, store: Store::Region(region) })))
    }

    pub(crate) fn region(&self) -> Option<&Region> {
        match &self.0.store {
            Store::Region(region) => Some(region),
            Store::Heap(_) | Store::Pages(_) => None,
        }
    }
}

/// Returns the shareable memory that all of a buffer lies in, and where in it.
pub(crate) fn home(buffer: &Buffer) -> Option<(Memory, usize)> {
    let address = buffer.address().addr();
    let allocation = table(|table| table.range(..=address).next_back()?.1.upgrade())?;
    let memory = Memory(allocation);
    let offset = address - memory.address().addr();
    let inside = offset.checked_add(buffer.len()).is_some_and(|end| end <= memory.len());
    (inside && memory.is_shareable()).then_some((memory, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_ranges_inside_it_while_it_is_registered() {
        let memory = Memory::shareable(10_000).unwrap();
        assert!(memory.is_shareable());
        let all = memory.buffer();
        let (found, offset) = home(&all.slice(100, 9_900)).unwrap();
        assert_eq!((found.address(), offset), (memory.address(), 100));
        // SAFETY: never looked at.
        let beyond = unsafe { Buffer::from_raw(all.address(), 10_001, super::super::Place::Host) };
        assert!(home(&beyond).is_none());
        assert!(home(&Memory::new(10).buffer()).is_none());
        // SAFETY: never looked at.
        let stale = unsafe { Buffer::from_raw(all.address(), 10, super::super::Place::Host) };
        drop((memory, found, all));
        assert!(home(&stale).is_none());
    }
}

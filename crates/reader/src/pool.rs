// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory that is used again: fresh memory costs a page fault for every four kilobytes of it.
//!
//! Large pieces are mapped and unmapped one by one. The allocator would keep them, and budgets would not hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::buffer::MutableBuffer;
use memmap2::{Advice, MmapMut};
use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::pages::room;

/// From this many bytes on memory is mapped.
const LARGE: usize = 512 << 10;

/// From this many bytes on large pages are asked for.
const HUGE: usize = 8 << 20;

/// Plain values.
pub(crate) trait Value: Copy + Default + FromBytes + IntoBytes + Immutable {}

impl<T: Copy + Default + FromBytes + IntoBytes + Immutable> Value for T {}

/// Aligned bytes as values; what is left over at the end is left out.
pub(crate) fn typed<T: Value>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_prefix(bytes).map_or(&[], |(values, _)| values)
}

/// As [`typed`], to be written.
pub(crate) fn typed_mut<T: Value>(bytes: &mut [u8]) -> &mut [T] {
    <[T]>::mut_from_prefix(bytes).map_or(&mut [], |(values, _)| values)
}

#[derive(Debug)]
enum Memory {
    Small(MutableBuffer),
    Large(MmapMut),
}

impl Memory {
    fn new(bytes: usize) -> Self {
        if bytes >= LARGE
            && let Ok(map) = MmapMut::map_anon(bytes)
        {
            if bytes >= HUGE {
                // Kernels without them refuse; nothing is lost.
                drop(map.advise(Advice::HugePage));
            }
            return Self::Large(map);
        }
        let mut buffer = MutableBuffer::default();
        room(&mut buffer, bytes);
        Self::Small(buffer)
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Small(buffer) => buffer.as_slice(),
            Self::Large(map) => map,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small(buffer) => buffer.as_slice_mut(),
            Self::Large(map) => map,
        }
    }
}

/// Memory nobody uses, up to a number of bytes.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Mutex<Vec<Memory>>,
    limit: AtomicUsize,
}

impl Pool {
    /// Keeps up to `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), limit: AtomicUsize::new(limit) })
    }

    /// Keeps up to `limit` bytes from now on.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        let mut free = self.free.lock();
        let mut kept = 0;
        free.retain(|memory| {
            kept += memory.bytes().len();
            kept <= limit
        });
    }

    /// At least `bytes`, with whatever is in them, at an address that suits any value.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Slab {
        let mut free = self.free.lock();
        let most = bytes.saturating_add(bytes / 4).max(4096);
        let fits = |memory: &Memory| (bytes..=most).contains(&memory.bytes().len());
        let found = free.iter().rposition(fits).map(|index| free.swap_remove(index));
        drop(free);
        Slab { memory: Some(found.unwrap_or_else(|| Memory::new(bytes))), pool: Arc::clone(self) }
    }

    fn give(&self, memory: Memory) {
        let mut free = self.free.lock();
        let kept: usize = free.iter().map(|memory| memory.bytes().len()).sum();
        if kept + memory.bytes().len() <= self.limit.load(Ordering::Relaxed) {
            free.push(memory);
        }
    }
}

/// Memory that goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slab {
    memory: Option<Memory>,
    pool: Arc<Pool>,
}

impl Slab {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], Memory::bytes)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], Memory::bytes_mut)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_up_to_the_limit() {
        for bytes in [5_000, 2 << 20] {
            let pool = Pool::new(2 * bytes);
            let mut slab = pool.take(bytes);
            assert!(slab.bytes().len() >= bytes);
            assert_eq!(slab.bytes().as_ptr().align_offset(64), 0);
            slab.bytes_mut()[0] = 7;
            let address = slab.bytes().as_ptr();
            drop(slab);
            let again = pool.take(bytes - bytes / 10);
            assert_eq!((again.bytes().as_ptr(), again.bytes()[0]), (address, 7));
            let (other, third) = (pool.take(bytes), pool.take(bytes));
            drop((again, other, third));
            assert!(pool.free.lock().len() < 3, "what is past the limit is freed");
            pool.set_limit(100);
            assert!(pool.free.lock().is_empty());
        }
    }

    #[test]
    fn bytes_are_values_where_they_are_aligned() {
        let pool = Pool::new(0);
        let mut slab = pool.take(16);
        typed_mut::<u32>(slab.bytes_mut())[1] = 9;
        assert_eq!(typed::<u32>(&slab.bytes()[..11])[..], [typed::<u32>(slab.bytes())[0], 9]);
        assert_eq!(typed::<u32>(&slab.bytes()[1..9]), [] as [u32; 0]);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A pool of memory: new memory costs a page fault for every four kilobytes.
//!
//! Large pieces are mapped and unmapped one by one. The allocator would keep them, and budgets
//! would not hold. What a reader that is gone had is kept for the next one in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::buffer::MutableBuffer;
use memmap2::{Advice, MmapMut};
use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

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

/// Like [`typed`], to be written.
pub(crate) fn typed_mut<T: Value>(bytes: &mut [u8]) -> &mut [T] {
    <[T]>::mut_from_prefix(bytes).map_or(&mut [], |(values, _)| values)
}

/// Makes a buffer at least this long, in steps that suit every type. Its content is undefined.
pub(crate) fn room(buffer: &mut MutableBuffer, bytes: usize) {
    let bytes = bytes.next_multiple_of(64);
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
}

#[derive(Debug)]
enum Memory {
    Small(MutableBuffer),
    Large(MmapMut),
}

impl Memory {
    fn new(bytes: usize) -> Self {
        Self::mapped(bytes).unwrap_or_else(|| {
            let mut buffer = MutableBuffer::default();
            room(&mut buffer, bytes);
            Self::Small(buffer)
        })
    }

    /// Memory of its own, where `bytes` are many and the system has so many.
    fn mapped(bytes: usize) -> Option<Self> {
        let map = (bytes >= LARGE).then(|| MmapMut::map_anon(bytes).ok()).flatten()?;
        if bytes >= HUGE {
            // Kernels without them refuse; nothing is lost.
            drop(map.advise(Advice::HugePage));
        }
        Some(Self::Large(map))
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

/// Memory of pools that are gone, for the next one.
static RESERVE: Mutex<Vec<Memory>> = Mutex::new(Vec::new());

/// Bytes of such memory, at most.
const RESERVED: usize = 256 << 20;

#[derive(Debug, Default)]
struct Held {
    free: Vec<Memory>,
    /// Bytes in use.
    used: usize,
}

impl Held {
    fn kept(&self) -> usize {
        self.free.iter().map(|memory| memory.bytes().len()).sum()
    }

    /// Takes memory out that is too much when `more` bytes come in; it is freed when it is dropped.
    fn shed(&mut self, more: usize, limit: usize) -> Vec<Memory> {
        let mut kept = self.kept();
        let mut shed = Vec::new();
        while self.used.saturating_add(kept).saturating_add(more) > limit {
            let Some(memory) = self.free.pop() else { break };
            kept -= memory.bytes().len();
            shed.push(memory);
        }
        shed
    }
}

/// Memory to be used again: what is used and what is kept together stay below a number of bytes, as
/// far as what is kept decides it.
#[derive(Debug)]
pub(crate) struct Pool {
    held: Mutex<Held>,
    limit: AtomicUsize,
}

impl Pool {
    /// A pool of up to `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), limit: AtomicUsize::new(limit) })
    }

    /// Keeps to `limit` bytes from now on; what is too much is freed.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        let mut held = self.held.lock();
        let shed = held.shed(0, limit);
        drop(held);
        drop(shed);
    }

    /// Bytes that are kept to.
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// At least `bytes`, with whatever is in them, at an address that suits any value.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Slab {
        let memory = self.kept(bytes).unwrap_or_else(|| Memory::new(bytes));
        self.slab(memory, bytes)
    }

    /// As [`Pool::take`]; `None` if the system has not so many bytes.
    pub(crate) fn try_take(self: &Arc<Self>, bytes: usize) -> Option<Slab> {
        let made = || if bytes < LARGE { Some(Memory::new(bytes)) } else { Memory::mapped(bytes) };
        let memory = self.kept(bytes).or_else(made);
        if memory.is_none() {
            let mut held = self.held.lock();
            held.used = held.used.saturating_sub(bytes);
        }
        Some(self.slab(memory?, bytes))
    }

    /// Memory that nobody uses, if some fits; `bytes` count as used in any case.
    fn kept(&self, bytes: usize) -> Option<Memory> {
        let mut held = self.held.lock();
        let most = bytes.saturating_add(bytes / 4).max(4096);
        let fits = |memory: &Memory| (bytes..=most).contains(&memory.bytes().len());
        let found = held.free.iter().rposition(fits).map(|index| held.free.swap_remove(index));
        let shed = match &found {
            Some(_) => Vec::new(),
            None => held.shed(bytes, self.limit.load(Ordering::Relaxed)),
        };
        held.used = held.used.saturating_add(bytes);
        drop(held);
        drop(shed);
        found.or_else(|| reserved(bytes, fits))
    }

    /// Memory of which `bytes` count as used.
    fn slab(self: &Arc<Self>, memory: Memory, bytes: usize) -> Slab {
        self.held.lock().used += memory.bytes().len().saturating_sub(bytes);
        Slab { memory: Some(memory), pool: Arc::clone(self) }
    }

    /// Counts bytes that are elsewhere as used.
    pub(crate) fn claim(self: &Arc<Self>, bytes: usize) -> Claim {
        let mut held = self.held.lock();
        let shed = held.shed(bytes, self.limit.load(Ordering::Relaxed));
        held.used += bytes;
        drop(held);
        drop(shed);
        Claim { bytes, pool: Arc::clone(self) }
    }

    fn give(&self, memory: Memory) {
        let mut held = self.held.lock();
        let bytes = memory.bytes().len();
        held.used = held.used.saturating_sub(bytes);
        if held.used + held.kept() + bytes <= self.limit.load(Ordering::Relaxed) {
            held.free.push(memory);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let Some(mut reserve) = RESERVE.try_lock() else { return };
        let mut kept: usize = reserve.iter().map(|memory| memory.bytes().len()).sum();
        for memory in std::mem::take(&mut self.held.get_mut().free) {
            if matches!(memory, Memory::Large(_)) && kept + memory.bytes().len() <= RESERVED {
                kept += memory.bytes().len();
                reserve.push(memory);
            }
        }
    }
}

/// Memory of a pool that is gone, if some fits. If none does, as much of it is freed as will be
/// made.
fn reserved(bytes: usize, fits: impl Fn(&Memory) -> bool) -> Option<Memory> {
    if bytes < LARGE {
        return None;
    }
    // A forked child may find it locked for ever.
    let mut reserve = RESERVE.try_lock()?;
    if let Some(index) = reserve.iter().rposition(fits) {
        return Some(reserve.swap_remove(index));
    }
    let (mut freed, mut shed) = (0, Vec::new());
    while freed < bytes
        && let Some(memory) = reserve.pop()
    {
        freed += memory.bytes().len();
        shed.push(memory);
    }
    drop(reserve);
    drop(shed);
    None
}

/// Bytes elsewhere that a pool counts.
#[derive(Debug)]
pub(crate) struct Claim {
    bytes: usize,
    pool: Arc<Pool>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut held = self.pool.held.lock();
        held.used = held.used.saturating_sub(self.bytes);
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

    fn kept(pool: &Pool) -> usize {
        pool.held.lock().kept()
    }

    #[test]
    fn memory_comes_back_up_to_the_limit() {
        for bytes in [5_120, 2 << 20] {
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
            assert!(kept(&pool) <= 2 * bytes, "what is past the limit is freed");
            assert_eq!(pool.held.lock().used, 0);
            pool.set_limit(100);
            assert_eq!(kept(&pool), 0);
        }
    }

    #[test]
    fn kept_memory_makes_room_for_used_memory() {
        let pool = Pool::new(3 << 20);
        drop((pool.take(1 << 20), pool.take(1 << 20)));
        assert_eq!(kept(&pool), 2 << 20);
        let claim = pool.claim(2 << 20);
        assert_eq!(kept(&pool), 1 << 20);
        drop(claim);
        let large = pool.take(3 << 20);
        assert_eq!((kept(&pool), pool.held.lock().used), (0, large.bytes().len()));
    }

    #[test]
    fn memory_that_the_system_has_not_is_none_and_counts_as_nothing() {
        let pool = Pool::new(1 << 20);
        assert!(pool.try_take(1 << 50).is_none());
        assert_eq!(pool.held.lock().used, 0);
        let (small, large) = (pool.try_take(100).unwrap(), pool.try_take(1 << 20).unwrap());
        assert_eq!(pool.held.lock().used, small.bytes().len() + large.bytes().len());
    }

    #[test]
    fn the_next_pool_takes_over_the_memory_of_one_that_is_gone() {
        // Of a size of its own: other tests have pools, too.
        const ODD: usize = (5 << 20) + 12_288;
        // Other tests may take it away in between.
        let seen = (0..100).any(|_| {
            let pool = Pool::new(ODD);
            let slab = pool.take(ODD);
            let address = slab.bytes().as_ptr();
            drop((slab, pool));
            Pool::new(ODD).take(ODD).bytes().as_ptr() == address
        });
        assert!(seen, "the reserve is empty");
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

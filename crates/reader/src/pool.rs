// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A pool of reused memory, because new memory costs a page fault for every 4 KiB.
//!
//! Large pieces are mapped and unmapped individually. The allocator would keep them, and the
//! process would exceed its budgets. The memory of a dropped pool is kept for the next reader of
//! this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::buffer::MutableBuffer;
use memmap2::{Advice, MmapMut};
use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Smallest size that is mapped.
const MIN_MAPPED_BYTES: usize = 512 << 10;

/// Smallest size for which huge pages are requested.
const MIN_HUGE_PAGE_BYTES: usize = 8 << 20;

/// A value whose bytes may be read and written directly.
pub(crate) trait PlainValue: Copy + Default + FromBytes + IntoBytes + Immutable {}

impl<T: Copy + Default + FromBytes + IntoBytes + Immutable> PlainValue for T {}

/// Returns aligned bytes as values, without a remainder at the end.
pub(crate) fn as_values<T: PlainValue>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_prefix(bytes).map_or(&[], |(values, _)| values)
}

/// Like [`as_values`], for writing.
pub(crate) fn as_values_mut<T: PlainValue>(bytes: &mut [u8]) -> &mut [T] {
    <[T]>::mut_from_prefix(bytes).map_or(&mut [], |(values, _)| values)
}

/// Grows a buffer to at least `bytes`, rounded up so that any type fits. Its content is undefined.
pub(crate) fn grow_buffer(buffer: &mut MutableBuffer, bytes: usize) {
    let bytes = bytes.next_multiple_of(64);
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
}

#[derive(Debug)]
enum PoolMemory {
    Small(MutableBuffer),
    Large(MmapMut),
}

impl PoolMemory {
    fn new(bytes: usize) -> Self {
        Self::try_map(bytes).unwrap_or_else(|| {
            let mut buffer = MutableBuffer::default();
            grow_buffer(&mut buffer, bytes);
            Self::Small(buffer)
        })
    }

    /// Maps memory; `None` if `bytes` is small or the system has not enough memory.
    fn try_map(bytes: usize) -> Option<Self> {
        let map = (bytes >= MIN_MAPPED_BYTES).then(|| MmapMut::map_anon(bytes).ok()).flatten()?;
        if bytes >= MIN_HUGE_PAGE_BYTES {
            // Kernels without huge pages reject this; the memory works without them.
            drop(map.advise(Advice::HugePage));
        }
        Some(Self::Large(map))
    }

    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Small(buffer) => buffer.as_slice(),
            Self::Large(map) => map,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Small(buffer) => buffer.as_slice_mut(),
            Self::Large(map) => map,
        }
    }
}

/// Memory of dropped pools, for the next one.
static RESERVE_MEMORY: Mutex<Vec<PoolMemory>> = Mutex::new(Vec::new());

/// Most bytes of such memory.
const MAX_RESERVE_BYTES: usize = 256 << 20;

#[derive(Debug, Default)]
struct PoolState {
    free: Vec<PoolMemory>,
    /// Bytes in use.
    used: usize,
}

impl PoolState {
    fn free_bytes(&self) -> usize {
        self.free.iter().map(|memory| memory.as_slice().len()).sum()
    }

    /// Removes free memory until `more` bytes fit under `limit`. The memory is freed when the
    /// caller drops it.
    fn evict_free(&mut self, more: usize, limit: usize) -> Vec<PoolMemory> {
        let mut kept = self.free_bytes();
        let mut shed = Vec::new();
        while self.used.saturating_add(kept).saturating_add(more) > limit {
            let Some(memory) = self.free.pop() else { break };
            kept -= memory.as_slice().len();
            shed.push(memory);
        }
        shed
    }
}

/// A pool of reused memory. Free memory is kept only if it fits under the byte limit together with
/// used memory. The limit does not restrict used memory.
#[derive(Debug)]
pub(crate) struct BufferPool {
    state: Mutex<PoolState>,
    limit: AtomicUsize,
}

impl BufferPool {
    /// Creates a pool with a limit of `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), limit: AtomicUsize::new(limit) })
    }

    /// Sets the limit, and frees memory above it.
    pub(crate) fn set_byte_limit(&self, limit: usize) {
        // Relaxed: a buffer that is taken at this moment may still go by the earlier limit.
        self.limit.store(limit, Ordering::Relaxed);
        let mut held = self.state.lock();
        let shed = held.evict_free(0, limit);
        // Large memory is unmapped without the lock, because that takes long.
        drop(held);
        drop(shed);
    }

    /// Returns the limit in bytes.
    pub(crate) fn byte_limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns at least `bytes` with undefined content, aligned for any value.
    pub(crate) fn take_buffer(self: &Arc<Self>, bytes: usize) -> PooledBuffer {
        let memory = self.take_free_memory(bytes).unwrap_or_else(|| PoolMemory::new(bytes));
        self.wrap_memory(memory, bytes)
    }

    /// Like [`BufferPool::take_buffer`]; `None` if the system has not enough memory.
    pub(crate) fn try_take_buffer(self: &Arc<Self>, bytes: usize) -> Option<PooledBuffer> {
        let made = || {
            if bytes < MIN_MAPPED_BYTES {
                Some(PoolMemory::new(bytes))
            } else {
                PoolMemory::try_map(bytes)
            }
        };
        let memory = self.take_free_memory(bytes).or_else(made);
        if memory.is_none() {
            let mut held = self.state.lock();
            held.used = held.used.saturating_sub(bytes);
        }
        Some(self.wrap_memory(memory?, bytes))
    }

    /// Returns free memory of a suitable size, if there is some. Counts `bytes` as used in both
    /// cases.
    fn take_free_memory(&self, bytes: usize) -> Option<PoolMemory> {
        let mut held = self.state.lock();
        let most = bytes.saturating_add(bytes / 4).max(4096);
        let fits = |memory: &PoolMemory| (bytes..=most).contains(&memory.as_slice().len());
        let found = held.free.iter().rposition(fits).map(|index| held.free.swap_remove(index));
        let shed = match &found {
            Some(_) => Vec::new(),
            None => held.evict_free(bytes, self.limit.load(Ordering::Relaxed)),
        };
        held.used = held.used.saturating_add(bytes);
        drop(held);
        drop(shed);
        found.or_else(|| reuse_dropped_pool_memory(bytes, fits))
    }

    /// Wraps memory; `bytes` of it already count as used.
    fn wrap_memory(self: &Arc<Self>, memory: PoolMemory, bytes: usize) -> PooledBuffer {
        self.state.lock().used += memory.as_slice().len().saturating_sub(bytes);
        PooledBuffer { memory: Some(memory), pool: Arc::clone(self) }
    }

    /// Counts bytes outside of the pool as used.
    pub(crate) fn reserve_bytes(self: &Arc<Self>, bytes: usize) -> PoolReservation {
        let mut held = self.state.lock();
        let shed = held.evict_free(bytes, self.limit.load(Ordering::Relaxed));
        held.used += bytes;
        drop(held);
        drop(shed);
        PoolReservation { bytes, pool: Arc::clone(self) }
    }

    fn return_memory(&self, memory: PoolMemory) {
        let mut held = self.state.lock();
        let bytes = memory.as_slice().len();
        held.used = held.used.saturating_sub(bytes);
        if held.used + held.free_bytes() + bytes <= self.limit.load(Ordering::Relaxed) {
            held.free.push(memory);
        }
    }
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        // In a forked child, another thread of its parent may hold the lock for ever.
        let Some(mut reserve) = RESERVE_MEMORY.try_lock() else { return };
        let mut kept: usize = reserve.iter().map(|memory| memory.as_slice().len()).sum();
        for memory in std::mem::take(&mut self.state.get_mut().free) {
            if matches!(memory, PoolMemory::Large(_))
                && kept + memory.as_slice().len() <= MAX_RESERVE_BYTES
            {
                kept += memory.as_slice().len();
                reserve.push(memory);
            }
        }
    }
}

/// Returns memory of a dropped pool, if some fits. Otherwise frees as many bytes as the caller will
/// allocate.
fn reuse_dropped_pool_memory(
    bytes: usize,
    fits: impl Fn(&PoolMemory) -> bool,
) -> Option<PoolMemory> {
    if bytes < MIN_MAPPED_BYTES {
        return None;
    }
    // In a forked child, the lock may stay locked, so do not wait for it.
    let mut reserve = RESERVE_MEMORY.try_lock()?;
    if let Some(index) = reserve.iter().rposition(fits) {
        return Some(reserve.swap_remove(index));
    }
    let (mut freed, mut shed) = (0, Vec::new());
    while freed < bytes
        && let Some(memory) = reserve.pop()
    {
        freed += memory.as_slice().len();
        shed.push(memory);
    }
    drop(reserve);
    drop(shed);
    None
}

/// Bytes outside of a pool that it counts as used.
#[derive(Debug)]
pub(crate) struct PoolReservation {
    bytes: usize,
    pool: Arc<BufferPool>,
}

impl Drop for PoolReservation {
    fn drop(&mut self) {
        let mut held = self.pool.state.lock();
        held.used = held.used.saturating_sub(self.bytes);
    }
}

/// Memory that returns to its pool when it is dropped.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    memory: Option<PoolMemory>,
    pool: Arc<BufferPool>,
}

impl PooledBuffer {
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], PoolMemory::as_slice)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], PoolMemory::as_mut_slice)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.return_memory(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(pool: &BufferPool) -> usize {
        pool.state.lock().free_bytes()
    }

    #[test]
    fn memory_comes_back_up_to_the_limit() {
        for bytes in [5_120, 2 << 20] {
            let pool = BufferPool::new(2 * bytes);
            let mut slab = pool.take_buffer(bytes);
            assert!(slab.as_slice().len() >= bytes);
            assert_eq!(slab.as_slice().as_ptr().align_offset(64), 0);
            slab.as_mut_slice()[0] = 7;
            let address = slab.as_slice().as_ptr();
            drop(slab);
            let again = pool.take_buffer(bytes - bytes / 10);
            assert_eq!((again.as_slice().as_ptr(), again.as_slice()[0]), (address, 7));
            let (other, third) = (pool.take_buffer(bytes), pool.take_buffer(bytes));
            drop((again, other, third));
            assert!(kept(&pool) <= 2 * bytes, "what is past the limit is freed");
            assert_eq!(pool.state.lock().used, 0);
            pool.set_byte_limit(100);
            assert_eq!(kept(&pool), 0);
        }
    }

    #[test]
    fn kept_memory_makes_room_for_used_memory() {
        let pool = BufferPool::new(3 << 20);
        drop((pool.take_buffer(1 << 20), pool.take_buffer(1 << 20)));
        assert_eq!(kept(&pool), 2 << 20);
        let claim = pool.reserve_bytes(2 << 20);
        assert_eq!(kept(&pool), 1 << 20);
        drop(claim);
        let large = pool.take_buffer(3 << 20);
        assert_eq!((kept(&pool), pool.state.lock().used), (0, large.as_slice().len()));
    }

    #[test]
    fn memory_that_the_system_has_not_is_none_and_counts_as_nothing() {
        let pool = BufferPool::new(1 << 20);
        assert!(pool.try_take_buffer(1 << 50).is_none());
        assert_eq!(pool.state.lock().used, 0);
        let (small, large) =
            (pool.try_take_buffer(100).unwrap(), pool.try_take_buffer(1 << 20).unwrap());
        assert_eq!(pool.state.lock().used, small.as_slice().len() + large.as_slice().len());
    }

    #[test]
    fn the_next_pool_takes_over_the_memory_of_one_that_is_gone() {
        // A size that no other test uses, because other tests have pools, too.
        const ODD: usize = (5 << 20) + 12_288;
        // Another test may take the memory in between.
        let seen = (0..100).any(|_| {
            let pool = BufferPool::new(ODD);
            let slab = pool.take_buffer(ODD);
            let address = slab.as_slice().as_ptr();
            drop((slab, pool));
            BufferPool::new(ODD).take_buffer(ODD).as_slice().as_ptr() == address
        });
        assert!(seen, "the reserve is empty");
    }

    #[test]
    fn bytes_are_values_where_they_are_aligned() {
        let pool = BufferPool::new(0);
        let mut slab = pool.take_buffer(16);
        as_values_mut::<u32>(slab.as_mut_slice())[1] = 9;
        assert_eq!(
            as_values::<u32>(&slab.as_slice()[..11])[..],
            [as_values::<u32>(slab.as_slice())[0], 9]
        );
        assert_eq!(as_values::<u32>(&slab.as_slice()[1..9]), [] as [u32; 0]);
    }
}

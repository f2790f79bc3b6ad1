// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Host memory between a device and the other ranks. The ranks of a host share this memory, so
//! tensors are reduced in place after the copy from the device. The memory is page-locked, so
//! copies run in parallel with other work.

use farandole_kernels::HostMemory;
use parking_lot::Mutex;

/// The smallest block; one is a power of two.
const MIN_BLOCK_BYTES: usize = 64 << 10;
/// Unused bytes that are kept for later.
const MAX_IDLE_BYTES: usize = 512 << 20;

/// The operations of a device that the pool needs.
pub trait PageLocking: Send + Sync {
    /// Locks memory in place; false where that cannot be, which only makes copies slower.
    fn lock_pages(&self, memory: &HostMemory) -> bool;

    /// Unlocks it.
    fn unlock_pages(&self, memory: &HostMemory);
}

/// Blocks that are lent out and come back by being dropped.
pub struct StagingPool<L: PageLocking> {
    page_locking: L,
    blocks: Mutex<Vec<StagingBlock>>,
}

struct StagingBlock {
    memory: HostMemory,
    locked: bool,
}

impl<L: PageLocking> StagingPool<L> {
    /// Returns an empty pool.
    pub fn new(locks: L) -> Self {
        Self { page_locking: locks, blocks: Mutex::new(Vec::new()) }
    }

    /// Lends at least `bytes` bytes, not zeroed; `None` if no memory is left. The block returns to
    /// the pool when the last clone is dropped.
    pub fn lend_memory(&self, bytes: usize) -> Option<HostMemory> {
        // Few different sizes, so that a returned block fits later requests.
        let size = bytes.max(MIN_BLOCK_BYTES).checked_next_power_of_two()?;
        let mut blocks = self.blocks.lock();
        if let Some(block) = blocks
            .iter()
            .find(|block| block.memory.len() == size && block.memory.is_uniquely_owned())
        {
            return Some(block.memory.clone());
        }
        // Frees blocks of other sizes first, so that idle memory stays below the limit.
        self.trim_idle_blocks(&mut blocks, MAX_IDLE_BYTES.saturating_sub(size));
        let memory = HostMemory::new_shareable(size)?;
        let locked = self.page_locking.lock_pages(&memory);
        blocks.push(StagingBlock { memory: memory.clone(), locked });
        Some(memory)
    }

    /// Returns unused memory to the system until at most `keep` bytes of it are left.
    fn trim_idle_blocks(&self, blocks: &mut Vec<StagingBlock>, keep: usize) {
        let idle = |block: &StagingBlock| block.memory.is_uniquely_owned();
        let mut bytes: usize =
            blocks.iter().filter(|block| idle(block)).map(|block| block.memory.len()).sum();
        blocks.retain(|block| {
            let goes = bytes > keep && idle(block);
            if goes {
                bytes -= block.memory.len();
                self.unlock_block(block);
            }
            !goes
        });
    }

    fn unlock_block(&self, block: &StagingBlock) {
        if block.locked {
            self.page_locking.unlock_pages(&block.memory);
        }
    }

    /// Blocks there are, and how many of them are locked.
    pub fn total_and_locked_block_counts(&self) -> (usize, usize) {
        let blocks = self.blocks.lock();
        (blocks.len(), blocks.iter().filter(|block| block.locked).count())
    }
}

impl<L: PageLocking> Drop for StagingPool<L> {
    fn drop(&mut self) {
        for block in self.blocks.get_mut().drain(..) {
            if block.locked {
                self.page_locking.unlock_pages(&block.memory);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Count {
        locked: AtomicUsize,
        limit: usize,
    }

    impl PageLocking for Arc<Count> {
        fn lock_pages(&self, memory: &HostMemory) -> bool {
            let fits = self.locked.load(Ordering::Relaxed) + memory.len() <= self.limit;
            if fits {
                self.locked.fetch_add(memory.len(), Ordering::Relaxed);
            }
            fits
        }

        fn unlock_pages(&self, memory: &HostMemory) {
            self.locked.fetch_sub(memory.len(), Ordering::Relaxed);
        }
    }

    fn pool(limit: usize) -> (Arc<Count>, StagingPool<Arc<Count>>) {
        let count = Arc::new(Count { limit, ..Count::default() });
        (Arc::clone(&count), StagingPool::new(count))
    }

    #[test]
    fn returned_memory_is_lent_again_and_lent_memory_is_not() {
        let (_, pool) = pool(usize::MAX);
        let first = pool.lend_memory(100).unwrap();
        let second = pool.lend_memory(100).unwrap();
        assert!(first.len() >= 100 && first.address() != second.address());
        let (address, clone) = (first.address(), first.clone());
        drop(first);
        assert_ne!(pool.lend_memory(100).unwrap().address(), address, "a clone is still out");
        drop(clone);
        assert_eq!(pool.lend_memory(100).unwrap().address(), address);
        assert_eq!(pool.total_and_locked_block_counts(), (3, 3));
    }

    #[test]
    fn memory_that_cannot_be_locked_is_lent_all_the_same() {
        let (count, pool) = pool(MIN_BLOCK_BYTES);
        let blocks = [pool.lend_memory(1).unwrap(), pool.lend_memory(1).unwrap()];
        assert_eq!(pool.total_and_locked_block_counts(), (2, 1));
        drop((blocks, pool));
        assert_eq!(count.locked.load(Ordering::Relaxed), 0, "everything was unlocked");
    }

    #[test]
    fn idle_memory_does_not_pile_up() {
        let (count, pool) = pool(usize::MAX);
        let mut size = 1 << 20;
        while size <= MAX_IDLE_BYTES {
            drop(pool.lend_memory(size).unwrap());
            size *= 2;
        }
        assert!(count.locked.load(Ordering::Relaxed) <= MAX_IDLE_BYTES);
        assert!(pool.lend_memory(usize::MAX).is_none());
    }

    #[test]
    fn other_ranks_of_the_host_can_work_in_it() {
        let (_, pool) = pool(usize::MAX);
        assert!(pool.lend_memory(1).unwrap().is_shareable());
    }
}

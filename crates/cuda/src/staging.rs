// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Host memory between a device and the other ranks. The ranks of a host can work in it themselves,
//! so that tensors are reduced right where the device has put them; and it is page-locked, so that
//! copies run beside everything else.

use farandole_collectives::Memory;
use parking_lot::Mutex;

/// The smallest block; one is a power of two.
const LEAST: usize = 64 << 10;
/// Unused bytes that are kept for later.
const KEEP: usize = 512 << 20;

/// The operations of a device that the pool needs.
pub trait Locks: Send + Sync {
    /// Locks memory in place; false where that cannot be, which only makes copies slower.
    fn lock(&self, memory: &Memory) -> bool;

    /// Unlocks it.
    fn unlock(&self, memory: &Memory);
}

/// Blocks that are lent out and come back by being dropped.
pub struct Pool<L: Locks> {
    locks: L,
    blocks: Mutex<Vec<Block>>,
}

struct Block {
    memory: Memory,
    locked: bool,
}

impl<L: Locks> Pool<L> {
    /// With nothing in it.
    pub fn new(locks: L) -> Self {
        Self { locks, blocks: Mutex::new(Vec::new()) }
    }

    /// At least so many bytes, not zeroed; `None` when there are none left. It comes back when the
    /// last clone is dropped.
    pub fn lend(&self, bytes: usize) -> Option<Memory> {
        let size = bytes.max(LEAST).checked_next_power_of_two()?;
        let mut blocks = self.blocks.lock();
        if let Some(block) =
            blocks.iter().find(|block| block.memory.len() == size && block.memory.is_sole())
        {
            return Some(block.memory.clone());
        }
        self.trim(&mut blocks, KEEP.saturating_sub(size));
        let memory = Memory::shareable(size)?;
        let locked = self.locks.lock(&memory);
        blocks.push(Block { memory: memory.clone(), locked });
        Some(memory)
    }

    /// Returns unused memory to the system until at most `keep` bytes of it are left.
    fn trim(&self, blocks: &mut Vec<Block>, keep: usize) {
        let idle = |block: &Block| block.memory.is_sole();
        let mut bytes: usize =
            blocks.iter().filter(|block| idle(block)).map(|block| block.memory.len()).sum();
        blocks.retain(|block| {
            let goes = bytes > keep && idle(block);
            if goes {
                bytes -= block.memory.len();
                self.unlock(block);
            }
            !goes
        });
    }

    fn unlock(&self, block: &Block) {
        if block.locked {
            self.locks.unlock(&block.memory);
        }
    }

    /// Blocks there are, and how many of them are locked.
    pub fn blocks(&self) -> (usize, usize) {
        let blocks = self.blocks.lock();
        (blocks.len(), blocks.iter().filter(|block| block.locked).count())
    }
}

impl<L: Locks> Drop for Pool<L> {
    fn drop(&mut self) {
        for block in self.blocks.get_mut().drain(..) {
            if block.locked {
                self.locks.unlock(&block.memory);
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

    impl Locks for Arc<Count> {
        fn lock(&self, memory: &Memory) -> bool {
            let fits = self.locked.load(Ordering::Relaxed) + memory.len() <= self.limit;
            if fits {
                self.locked.fetch_add(memory.len(), Ordering::Relaxed);
            }
            fits
        }

        fn unlock(&self, memory: &Memory) {
            self.locked.fetch_sub(memory.len(), Ordering::Relaxed);
        }
    }

    fn pool(limit: usize) -> (Arc<Count>, Pool<Arc<Count>>) {
        let count = Arc::new(Count { limit, ..Count::default() });
        (Arc::clone(&count), Pool::new(count))
    }

    #[test]
    fn returned_memory_is_lent_again_and_lent_memory_is_not() {
        let (_, pool) = pool(usize::MAX);
        let first = pool.lend(100).unwrap();
        let second = pool.lend(100).unwrap();
        assert!(first.len() >= 100 && first.address() != second.address());
        let (address, clone) = (first.address(), first.clone());
        drop(first);
        assert_ne!(pool.lend(100).unwrap().address(), address, "a clone is still out");
        drop(clone);
        assert_eq!(pool.lend(100).unwrap().address(), address);
        assert_eq!(pool.blocks(), (3, 3));
    }

    #[test]
    fn memory_that_cannot_be_locked_is_lent_all_the_same() {
        let (count, pool) = pool(LEAST);
        let blocks = [pool.lend(1).unwrap(), pool.lend(1).unwrap()];
        assert_eq!(pool.blocks(), (2, 1));
        drop((blocks, pool));
        assert_eq!(count.locked.load(Ordering::Relaxed), 0, "everything was unlocked");
    }

    #[test]
    fn idle_memory_does_not_pile_up() {
        let (count, pool) = pool(usize::MAX);
        let mut size = 1 << 20;
        while size <= KEEP {
            drop(pool.lend(size).unwrap());
            size *= 2;
        }
        assert!(count.locked.load(Ordering::Relaxed) <= KEEP);
        assert!(pool.lend(usize::MAX).is_none());
    }

    #[test]
    fn other_ranks_of_the_host_can_work_in_it() {
        let (_, pool) = pool(usize::MAX);
        assert!(pool.lend(1).unwrap().is_shareable());
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rules of the control plane without a world that runs, for simulators.

use farandole_world::{Rank, World};

use crate::set::{lists_at_a_time, operations};
use crate::tree;

/// The parent of every member in the tree over which announcements go up and lists go down.
pub fn parents(world: &World, members: &[Rank]) -> Vec<Option<u32>> {
    tree::parents(world, members).0
}

/// Lists of operations that are under way at a time among so many hosts.
pub fn lists(hosts: usize) -> u64 {
    lists_at_a_time(hosts)
}

/// Allreduces of tensors of these bytes that are ready at once, in order of readiness: the places
/// of the tensors that share an operation of at most `threshold` bytes.
pub fn fused(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
    operations(bytes, threshold)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_share_operations_as_the_coordinator_fuses_them() {
        assert_eq!(fused(&[2, 3, 2, 1], 4), [vec![0, 2], vec![1, 3]]);
        assert_eq!(fused(&[2, 3], 0), [vec![0], vec![1]]);
        assert!(fused(&[], 4).is_empty());
    }
}

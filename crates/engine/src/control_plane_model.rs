// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Planning rules of the control plane, for simulators: no running world is needed.

use farandole_world::{Rank, World};

use crate::set::{max_executing_lists, plan_fused_operations};

/// Returns the parent of every member in the control tree. Announcements go up this tree, response
/// lists go down.
pub fn control_parents(world: &World, members: &[Rank]) -> Vec<Option<u32>> {
    farandole_negotiation::control_parents(world, members).0
}

/// Returns the largest number of response lists that may be in execution at a time.
pub fn max_lists_in_execution(hosts: usize) -> u64 {
    max_executing_lists(hosts)
}

/// Fuses allreduces that are ready at once into operations of at most `threshold` bytes. `bytes`
/// holds the size of each tensor, in order of readiness. Returns one list per operation, with the
/// indices of its tensors.
pub fn plan_fused_allreduces(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
    plan_fused_operations(bytes, threshold)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_share_operations_as_the_coordinator_fuses_them() {
        assert_eq!(plan_fused_allreduces(&[2, 3, 2, 1], 4), [vec![0, 2], vec![1, 3]]);
        assert_eq!(plan_fused_allreduces(&[2, 3], 0), [vec![0], vec![1]]);
        assert!(plan_fused_allreduces(&[], 4).is_empty());
    }
}

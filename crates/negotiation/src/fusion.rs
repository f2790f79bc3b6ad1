// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Fusion and order: tensors that share an operation, and tensors that come first.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;

use farandole_kernels::{DataType, ReduceOp};

use crate::{CollectiveCall, MemorySite, RequestSignature};

/// Bytes of tensors in a list whose tensors have priorities. Tensors that become ready during a
/// list cannot overtake it, and many small lists cost more than a few large ones.
pub const PRIORITIZED_LIST_BYTES: u64 = 32 << 20;

/// A tensor that all ranks have announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrioritizedTensor {
    /// Tensors of a higher priority come first.
    pub priority: i32,
    /// Its bytes.
    pub bytes: u64,
    /// The group, whose members come one after the other; 0: no group.
    pub group: u64,
}

/// Chooses the tensors of the next list, if some have a priority: the highest first, equal
/// priorities in order of readiness, up to [`PRIORITIZED_LIST_BYTES`] or one larger tensor. A group
/// counts as one tensor, of the highest priority of its members.
///
/// `tensors` are in order of readiness. Returns indices; all of them, in order, if no tensor has a
/// priority other than 0.
pub fn plan_prioritized_list(tensors: &[PrioritizedTensor]) -> Vec<usize> {
    if tensors.iter().all(|tensor| tensor.priority == 0) {
        return (0..tensors.len()).collect();
    }
    // The first index of each unit, its end, and its sums.
    let mut units: Vec<(Range<usize>, PrioritizedTensor)> = Vec::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        match units.last_mut() {
            Some((range, unit)) if tensor.group != 0 && unit.group == tensor.group => {
                range.end = index + 1;
                unit.priority = unit.priority.max(tensor.priority);
                unit.bytes = unit.bytes.saturating_add(tensor.bytes);
            }
            _ => units.push((index..index + 1, *tensor)),
        }
    }
    units.sort_by_key(|(_, unit)| Reverse(unit.priority));
    let (mut sum, mut list) = (0u64, Vec::new());
    for (range, unit) in units {
        sum = sum.saturating_add(unit.bytes);
        if !list.is_empty() && sum > PRIORITIZED_LIST_BYTES {
            break;
        }
        list.extend(range);
    }
    list
}

/// Fuses allreduces that are ready at once into operations of at most `threshold` bytes. `bytes`
/// holds the size of each tensor, in order of readiness. Returns one list per operation, with the
/// indices of its tensors.
pub fn plan_fused_allreduces(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
    let one = 1f64.to_bits();
    let signature = RequestSignature {
        call: CollectiveCall::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one },
        dtype: DataType::U8,
        shape: Vec::new(),
        site: MemorySite::Host,
        group: 0,
        group_size: 0,
    };
    let tensors: Vec<_> = bytes.iter().map(|bytes| (&signature, *bytes)).collect();
    let mut operations: Vec<Vec<usize>> = Vec::new();
    for (index, number) in plan_fused_operations(&tensors, threshold, true).into_iter().enumerate()
    {
        operations.resize_with(operations.len().max(number + 1), Vec::new);
        operations[number].push(index);
    }
    operations
}

/// Returns whether two tensors may share an operation. Without `across`, tensors of a group are
/// fused only with tensors of the same group.
fn can_fuse(one: &RequestSignature, two: &RequestSignature, across: bool) -> bool {
    !one.call.moves_no_data()
        // Each alltoall exchanges the row counts of its tensor.
        && !matches!(one.call, CollectiveCall::Alltoall { .. })
        && one.call == two.call
        && one.dtype == two.dtype
        && one.site == two.site
        && (across || (one.group, one.group_size) == (two.group, two.group_size))
}

/// Number of open operations of one kind that are searched for room before a new one is opened.
const MAX_OPEN_OPERATIONS_PER_KIND: usize = 4;

/// Fuses tensors in order of readiness: each tensor goes into the first of the last few operations
/// of its kind that has room. So a tensor that does not fit does not keep later ones out of this
/// operation.
///
/// `tensors` holds the signature and the bytes of each tensor. Without `across`, tensors of a group
/// share operations only with tensors of the same group. Returns the operation of each tensor;
/// operations are numbered by their first tensors.
pub fn plan_fused_operations(
    tensors: &[(&RequestSignature, u64)],
    threshold: u64,
    across: bool,
) -> Vec<usize> {
    // For each kind, an example, and the operations with room: their numbers with their bytes.
    let mut kinds: Vec<(&RequestSignature, VecDeque<(usize, u64)>)> = Vec::new();
    let mut operations = 0;
    let mut numbers = Vec::with_capacity(tensors.len());
    for (signature, bytes) in tensors {
        let kind = kinds.iter_mut().find(|(example, _)| can_fuse(example, signature, across));
        // A tensor above the threshold finds no room and gets a new operation.
        let room = kind.map(|(_, open)| {
            (open.iter_mut().position(|(_, sum)| sum.saturating_add(*bytes) <= threshold), open)
        });
        match room {
            Some((Some(index), open)) => {
                open[index].1 += bytes;
                numbers.push(open[index].0);
                continue;
            }
            Some((None, open)) => {
                open.push_back((operations, *bytes));
                if open.len() > MAX_OPEN_OPERATIONS_PER_KIND {
                    open.pop_front();
                }
            }
            None => kinds.push((signature, VecDeque::from([(operations, *bytes)]))),
        }
        numbers.push(operations);
        operations += 1;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plans a list of tensors, each given by its priority, bytes and group.
    fn planned(tensors: &[(i32, u64, u64)]) -> Vec<usize> {
        let tensor = |(priority, bytes, group): &_| PrioritizedTensor {
            priority: *priority,
            bytes: *bytes,
            group: *group,
        };
        plan_prioritized_list(&tensors.iter().map(tensor).collect::<Vec<_>>())
    }

    #[test]
    fn tensors_without_priorities_come_in_one_list_in_order() {
        assert_eq!(planned(&[(0, u64::MAX, 0), (0, 5, 0)]), [0, 1]);
    }

    #[test]
    fn a_list_has_the_highest_priorities_and_a_limit_of_bytes() {
        let half = PRIORITIZED_LIST_BYTES / 2;
        assert_eq!(planned(&[(-3, half, 0), (-1, half, 0), (0, half, 0)]), [2, 1]);
        assert_eq!(planned(&[(-3, half, 0), (-3, half, 0), (-3, 1, 0)]), [0, 1]);
        assert_eq!(planned(&[(-1, 3 * half, 0), (-2, 1, 0)]), [0], "too large, but first");
        assert_eq!(planned(&[(-2, 1, 0), (-1, 3 * half, 0)]), [1]);
    }

    #[test]
    fn members_of_a_group_come_in_one_list() {
        let half = PRIORITIZED_LIST_BYTES / 2;
        let group = [(-1, half, 7), (-9, half, 7), (-1, half, 7)];
        assert_eq!(planned(&[&[(-3, 1, 0)], &group[..]].concat()), [1, 2, 3]);
        assert_eq!(planned(&[&[(0, 1, 0)], &group[..]].concat()), [0]);
    }

    #[test]
    fn the_plan_of_a_simulator_fuses_as_the_coordinator_does() {
        assert_eq!(plan_fused_allreduces(&[2, 3, 2, 1], 4), [vec![0, 2], vec![1, 3]]);
        assert_eq!(plan_fused_allreduces(&[2, 3], 0), [vec![0], vec![1]]);
        assert!(plan_fused_allreduces(&[], 4).is_empty());
    }
}

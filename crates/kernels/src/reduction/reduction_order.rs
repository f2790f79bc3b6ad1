// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Order in which inputs are combined. Floating-point sums are not associative, so the parentheses
//! change the result.

/// Binary tree over inputs in their order, as a program for a stack. After input `k` is pushed, the
/// two topmost values are combined `merges[k]` times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReductionOrder {
    merges: Vec<usize>,
    depth: usize,
    sequential: bool,
}

impl ReductionOrder {
    /// Returns the sequential order `((x0 x1) x2) ...`.
    pub fn sequential_order(inputs: usize) -> Self {
        Self::from_merges((0..inputs).map(|k| usize::from(k > 0)).collect())
    }

    /// Returns the order in which neighbours are combined in pairs until one value is left. If the
    /// number is not a power of two, the first inputs are paired beforehand: five inputs give
    /// `((x0 x1) x2) (x3 x4)`, six give `((x0 x1) (x2 x3)) (x4 x5)`.
    pub fn pairwise_order(inputs: usize) -> Self {
        Self::grouped_order(&vec![1; inputs])
    }

    /// Returns the order over the members of hosts with these sizes: sequential within each host,
    /// pairwise between hosts.
    pub fn grouped_order(sizes: &[usize]) -> Self {
        let mut merges = Vec::with_capacity(sizes.iter().sum());
        for (host, size) in sizes.iter().enumerate() {
            let first = merges.len();
            merges.extend((0..*size).map(|k| usize::from(k > 0)));
            if merges.len() > first {
                let last = merges.len() - 1;
                merges[last] += merges_after_leaf(host, sizes.len());
            }
        }
        Self::from_merges(merges)
    }

    fn from_merges(merges: Vec<usize>) -> Self {
        // The height counts before the merges, because an input is on the stack until it is merged.
        let heights = merges.iter().scan(0_usize, |height, merges| {
            let top = *height + 1;
            *height = top.saturating_sub(*merges);
            Some(top)
        });
        let depth = heights.max().unwrap_or(0);
        let line = merges.iter().enumerate().all(|(k, merges)| *merges == usize::from(k > 0));
        Self { merges, depth, sequential: line }
    }

    /// Returns the number of inputs.
    pub fn input_count(&self) -> usize {
        self.merges.len()
    }

    /// Returns whether this is the order of [`ReductionOrder::sequential_order`].
    pub fn is_sequential(&self) -> bool {
        self.sequential
    }

    /// Returns the number of merges after input `k` was pushed.
    pub(super) fn merges_after_input(&self, k: usize) -> usize {
        self.merges.get(k).copied().unwrap_or(0)
    }

    /// Returns the greatest number of values on the stack.
    pub(super) fn stack_depth(&self) -> usize {
        self.depth
    }
}

/// Returns the number of merges after a leaf. Let `p` be the largest power of two up to `count`.
/// The first `2 * (count - p)` leaves are paired and become the first leaves of a full tree of `p`
/// leaves. After a leaf, all subtrees that end with this leaf are merged.
fn merges_after_leaf(leaf: usize, count: usize) -> usize {
    // The same tree as in `halving` between hosts, so both algorithms give the same bits.
    let full = 1 << count.ilog2();
    let folded = 2 * (count - full);
    let (place, first) = if leaf < folded { (leaf / 2, leaf % 2) } else { (leaf - folded / 2, 0) };
    if leaf < folded && first == 0 {
        return 0;
    }
    first + usize::try_from((place + 1).trailing_zeros()).unwrap_or(0).min(full.ilog2() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(order: &ReductionOrder) -> String {
        let mut stack: Vec<String> = Vec::new();
        for k in 0..order.input_count() {
            stack.push(k.to_string());
            assert!(stack.len() <= order.stack_depth());
            for _ in 0..order.merges_after_input(k) {
                let (b, a) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(format!("({a}{b})"));
            }
        }
        assert_eq!(stack.len(), 1, "{order:?}");
        stack.remove(0)
    }

    #[test]
    fn parentheses_are_where_they_should_be() {
        let pairs = ["0", "(01)", "((01)2)", "((01)(23))", "(((01)2)(34))", "(((01)(23))(45))"];
        for (k, expected) in pairs.into_iter().enumerate() {
            assert_eq!(spelled(&ReductionOrder::pairwise_order(k + 1)), expected);
        }
        assert_eq!(spelled(&ReductionOrder::pairwise_order(8)), "(((01)(23))((45)(67)))");
        assert_eq!(spelled(&ReductionOrder::sequential_order(4)), "(((01)2)3)");
        assert_eq!(spelled(&ReductionOrder::grouped_order(&[2, 3])), "((01)((23)4))");
        assert_eq!(spelled(&ReductionOrder::grouped_order(&[3, 1, 2])), "((((01)2)3)(45))");
        for count in 1..40 {
            spelled(&ReductionOrder::pairwise_order(count));
        }
    }

    #[test]
    fn small_groups_are_lines() {
        assert!(
            ReductionOrder::grouped_order(&[5]).is_sequential()
                && ReductionOrder::grouped_order(&[2, 1]).is_sequential()
        );
        assert!(
            ReductionOrder::pairwise_order(3).is_sequential()
                && !ReductionOrder::pairwise_order(4).is_sequential()
        );
        assert!(!ReductionOrder::grouped_order(&[1, 2]).is_sequential());
    }
}

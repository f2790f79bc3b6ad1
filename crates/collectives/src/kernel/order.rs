// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The order of combination: floating-point sums are not associative, so the parentheses are part
//! of the result.

/// A binary tree over inputs in their order, as a program for a stack: after pushing input `k`, the
/// two topmost values are joined `merges[k]` times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    merges: Vec<usize>,
    depth: usize,
    line: bool,
}

impl Order {
    /// `((x0 x1) x2) ...`
    pub fn line(inputs: usize) -> Self {
        Self::of((0..inputs).map(|k| usize::from(k > 0)).collect())
    }

    /// Neighbours in pairs until one is left. What exceeds a power of two is paired first: of five,
    /// `((x0 x1) x2) (x3 x4)`; of six, `((x0 x1) (x2 x3)) (x4 x5)`.
    pub fn pairs(inputs: usize) -> Self {
        Self::groups(&vec![1; inputs])
    }

    /// Returns the order of sums among members of hosts: a line within each host, pairs of hosts.
    pub fn groups(sizes: &[usize]) -> Self {
        let mut merges = Vec::with_capacity(sizes.iter().sum());
        for (host, size) in sizes.iter().enumerate() {
            let first = merges.len();
            merges.extend((0..*size).map(|k| usize::from(k > 0)));
            if merges.len() > first {
                let last = merges.len() - 1;
                merges[last] += joins_after(host, sizes.len());
            }
        }
        Self::of(merges)
    }

    fn of(merges: Vec<usize>) -> Self {
        let heights = merges.iter().scan(0_usize, |height, merges| {
            let top = *height + 1;
            *height = top.saturating_sub(*merges);
            Some(top)
        });
        let depth = heights.max().unwrap_or(0);
        let line = merges.iter().enumerate().all(|(k, merges)| *merges == usize::from(k > 0));
        Self { merges, depth, line }
    }

    /// Inputs it is for.
    pub fn inputs(&self) -> usize {
        self.merges.len()
    }

    /// Returns whether it is what [`Order::line`] makes.
    pub fn is_line(&self) -> bool {
        self.line
    }

    /// Joins after input `k` was pushed.
    pub(super) fn merges(&self, k: usize) -> usize {
        self.merges.get(k).copied().unwrap_or(0)
    }

    /// Values on the stack at most.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }
}

/// Leaves are numbered so that the first `2 * (count - p)` of `count` pair up to the first places
/// of a full tree of `p` leaves, `p` the largest power of two. After a leaf all pairs are joined
/// that it is the end of.
fn joins_after(leaf: usize, count: usize) -> usize {
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

    fn spelled(order: &Order) -> String {
        let mut stack: Vec<String> = Vec::new();
        for k in 0..order.inputs() {
            stack.push(k.to_string());
            assert!(stack.len() <= order.depth());
            for _ in 0..order.merges(k) {
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
            assert_eq!(spelled(&Order::pairs(k + 1)), expected);
        }
        assert_eq!(spelled(&Order::pairs(8)), "(((01)(23))((45)(67)))");
        assert_eq!(spelled(&Order::line(4)), "(((01)2)3)");
        assert_eq!(spelled(&Order::groups(&[2, 3])), "((01)((23)4))");
        assert_eq!(spelled(&Order::groups(&[3, 1, 2])), "((((01)2)3)(45))");
        for count in 1..40 {
            spelled(&Order::pairs(count));
        }
    }

    #[test]
    fn small_groups_are_lines() {
        assert!(Order::groups(&[5]).is_line() && Order::groups(&[2, 1]).is_line());
        assert!(Order::pairs(3).is_line() && !Order::pairs(4).is_line());
        assert!(!Order::groups(&[1, 2]).is_line());
    }
}

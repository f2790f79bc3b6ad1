// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Slurm's short forms: `gpu[01-03,7],login` for nodes, `4(x3),1` for counts.

/// Largest number of nodes in a list: a damaged list must not fill the memory.
const MAX_NODES: usize = 1 << 20;

/// Returns the nodes of a list; `None` if it is not a valid list.
pub fn expand_nodes(list: &str) -> Option<Vec<String>> {
    let mut nodes = Vec::new();
    for entry in split_outside_brackets(list)? {
        let mut prefixes = vec![String::new()];
        let mut rest = entry;
        while let Some((head, tail)) = rest.split_once('[') {
            let (ranges, tail) = tail.split_once(']')?;
            let numbers = expand_numbers(ranges)?;
            // Each bracket multiplies the list, so a few brackets could fill the memory.
            if prefixes.len().checked_mul(numbers.len())? > MAX_NODES {
                return None;
            }
            prefixes = prefixes
                .iter()
                .flat_map(|prefix| {
                    numbers.iter().map(move |number| format!("{prefix}{head}{number}"))
                })
                .collect();
            rest = tail;
        }
        nodes.extend(prefixes.into_iter().map(|prefix| prefix + rest));
    }
    (nodes.len() <= MAX_NODES && !nodes.is_empty() && nodes.iter().all(|node| is_node_name(node)))
        .then_some(nodes)
}

/// Returns the counts of a list such as `4(x3),1`; `None` if it is not a valid list.
pub fn expand_counts(list: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for entry in list.split(',') {
        let (count, times) = match entry.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse::<usize>().ok()?),
            None => (entry, 1),
        };
        // Checked before the list grows: `1(x4294967295)` is a short text.
        if times > MAX_NODES - counts.len() {
            return None;
        }
        counts.extend(std::iter::repeat_n(count.trim().parse::<u32>().ok()?, times));
    }
    Some(counts)
}

fn is_node_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !text.is_empty() && !text.starts_with('-') && text.chars().all(plain)
}

fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut depth, mut start) = (0u32, 0);
    let mut entries = Vec::new();
    for (at, c) in list.char_indices() {
        match c {
            '[' if depth == 0 => depth = 1,
            ']' if depth == 1 => depth = 0,
            '[' | ']' => return None,
            ',' if depth == 0 => {
                entries.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    entries.push(&list[start..]);
    (depth == 0).then_some(entries)
}

/// Expands `01-03,7` to `01`, `02`, `03`, `7`.
fn expand_numbers(ranges: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        // Slurm keeps leading zeros: node01 and node1 are different hosts.
        let width = first.len();
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let count = usize::try_from(to.checked_sub(from)?).ok()?;
        if count >= MAX_NODES - all.len() {
            return None;
        }
        all.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_keep_their_leading_zeros_and_may_stand_anywhere() {
        assert_eq!(expand_nodes("n[08-10],m").unwrap(), ["n08", "n09", "n10", "m"]);
        assert_eq!(
            expand_nodes("r[1-2]n[1,3].org").unwrap(),
            ["r1n1.org", "r1n3.org", "r2n1.org", "r2n3.org"]
        );
        assert_eq!(expand_counts("4(x2),1").unwrap(), [4, 4, 1]);
    }

    #[test]
    fn invalid_lists_and_lists_that_would_fill_the_memory_are_refused() {
        for wrong in [
            "",
            "a[1",
            "a]1[",
            "a[2-1]",
            "a[x]",
            "a,,b",
            "-a",
            "a[1-99999999999]",
            "a[1-9999][1-9999]",
        ] {
            assert_eq!(expand_nodes(wrong), None, "{wrong}");
        }
        for wrong in ["", "x", "4(x", "4(x99999999999)", "4x2"] {
            assert_eq!(expand_counts(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[a-c0-9,\\[\\]()x-]{0,30}") {
            let _ignored = (expand_nodes(&text), expand_counts(&text));
        }
    }
}

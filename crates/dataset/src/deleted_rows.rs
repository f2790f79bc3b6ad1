// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rows of a row group that a table has deleted, and that are still in its file.
//!
//! Rows that are left are *living* rows. The plan counts living rows only, so deleted rows change
//! neither the number of steps nor their division among ranks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Deleted rows of a row group, as lengths of runs: of living rows, of deleted rows, of living rows
/// and so on. The last run is of deleted rows; living rows after it are not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeletedRows {
    runs: Vec<u64>,
}

impl DeletedRows {
    /// Collects ascending positions in the row group.
    pub fn from_positions(positions: impl IntoIterator<Item = u64>) -> Self {
        let (mut runs, mut end) = (Vec::new(), 0);
        for position in positions {
            match runs.last_mut() {
                Some(deleted) if position == end => *deleted += 1,
                // If row 0 is deleted, the first run of living rows has length 0: living and
                // deleted runs must alternate.
                _ => runs.extend([position.saturating_sub(end), 1]),
            }
            end = position + 1;
        }
        Self { runs }
    }

    /// Returns the number of deleted rows; `None` if it is too large for a number.
    pub fn count(&self) -> Option<u64> {
        // A manifest may contain any lengths, so their sum may overflow.
        self.runs.iter().skip(1).step_by(2).try_fold(0_u64, |sum, run| sum.checked_add(*run))
    }

    /// Returns the stored rows that are number `living.start` to `living.end` of the living rows,
    /// as ascending ranges.
    pub fn stored_row_ranges(&self, living: Range<u64>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (mut stored, mut counted) = (0_u64, 0_u64);
        let mut add = |run: u64, counted: u64, stored: u64| {
            let first = living.start.max(counted);
            let end = living.end.min(counted.saturating_add(run));
            if first < end {
                let range = stored + (first - counted)..stored + (end - counted);
                match ranges.last_mut() {
                    // Runs of length 0 in a manifest leave adjacent ranges; one range needs one
                    // read only.
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => ranges.push(range),
                }
            }
        };
        for pair in self.runs.chunks(2) {
            let [alive, gone] = [0, 1].map(|at| pair.get(at).copied().unwrap_or_default());
            if counted >= living.end {
                break;
            }
            add(alive, counted, stored);
            // The manifest checks only the sum of deleted runs; living runs may add up to more than
            // 2^64.
            counted = counted.saturating_add(alive);
            stored = stored.saturating_add(alive).saturating_add(gone);
        }
        if counted < living.end {
            add(living.end - counted, counted, stored);
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::random_permutation;

    #[test]
    fn living_rows_are_found_among_deleted_ones() {
        for seed in 0..300_u64 {
            let rows = 1 + seed % 40;
            let order = random_permutation(seed, u32::try_from(rows).unwrap());
            let gone = usize::try_from((seed * 7) % (rows + 1)).unwrap();
            let mut deleted: Vec<u64> =
                order.iter().take(gone).map(|row| u64::from(*row)).collect();
            deleted.sort_unstable();
            let living: Vec<u64> = (0..rows).filter(|row| !deleted.contains(row)).collect();
            let mask = DeletedRows::from_positions(deleted.iter().copied());
            assert_eq!(mask.count(), Some(deleted.len() as u64));
            for start in 0..=living.len() {
                for end in start..=living.len() {
                    let ranges = mask.stored_row_ranges(start as u64..end as u64);
                    let found: Vec<u64> = ranges.iter().cloned().flatten().collect();
                    assert_eq!(found, living[start..end], "{deleted:?} {start}..{end}");
                    assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "{ranges:?}");
                }
            }
            let text = serde_json::to_string(&mask).unwrap();
            assert_eq!(serde_json::from_str::<DeletedRows>(&text).unwrap(), mask);
        }
    }

    #[test]
    fn a_count_beyond_all_numbers_is_none() {
        let mask = DeletedRows { runs: vec![0, u64::MAX, 1, 1] };
        assert_eq!(mask.count(), None);
    }
}

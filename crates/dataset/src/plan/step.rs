// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Plans the parts of one batch.

use crate::plan::index::to_index;
use crate::plan::{EpochPlan, RankPhase, TailPolicy};

/// Rows of one part, in the part's order (after its permutation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartSlice {
    /// Index of the part in [`EpochPlan::parts`].
    pub part: usize,
    /// First row.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
    /// Distance between two rows in the part.
    pub stride: usize,
    /// Position of the first row in the batch.
    pub batch_start: usize,
    /// Distance between two rows in the batch.
    pub batch_stride: usize,
}

/// One batch of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPlan {
    /// Sources of the rows, by [`PartSlice::batch_start`]. Together they fill the first `valid`
    /// rows of the batch.
    pub pieces: Vec<PartSlice>,
    /// Number of rows that are not padding.
    pub valid: usize,
    /// Number of rows of the batch. Rows after the first `valid` ones repeat the last valid row.
    pub rows: usize,
    /// Part with the row that is repeated, if there is no valid row.
    pub padding: Option<usize>,
}

impl EpochPlan {
    /// Returns the batch of step `step`; empty after the last step.
    pub fn plan_batch(&self, step: u64) -> BatchPlan {
        if step >= self.step_count() {
            return BatchPlan::default();
        }
        // Except with `Join`, ranks have equally many steps: the last batches of a rank with fewer
        // rows may be empty.
        let low = (step * self.batch_size).min(self.rows);
        let high = ((step + 1) * self.batch_size).min(self.rows);
        let mut pieces = Vec::new();
        for stage in
            self.phases.iter().filter(|stage| stage.rows.start < high && low < stage.rows.end)
        {
            stage.push_part_slices(
                low.max(stage.rows.start),
                high.min(stage.rows.end),
                low,
                &mut pieces,
            );
        }
        // No two pieces begin at the same row of the batch: the order is the same in every process.
        pieces.sort_unstable_by_key(|piece| piece.batch_start);
        let valid = to_index(high - low);
        let padded = self.tail == TailPolicy::Pad;
        let rows = if padded { to_index(self.batch_size) } else { valid };
        BatchPlan { pieces, valid, rows, padding: if valid == 0 { self.padding } else { None } }
    }
}

impl RankPhase {
    /// Adds the rank's rows `low..high`, which are all in this phase. The batch begins with row
    /// `first`.
    fn push_part_slices(&self, low: u64, high: u64, first: u64, pieces: &mut Vec<PartSlice>) {
        let turn = self.lanes.len() as u64;
        let start = self.rows.start;
        for (slot, lane) in (start..).zip(&self.lanes) {
            // Lanes take turns, so a lane has every row number `slot + k * turn`. `from` and `to`
            // are such `k`.
            let (from, to) =
                (low.saturating_sub(slot).div_ceil(turn), high.saturating_sub(slot).div_ceil(turn));
            // An epoch may have many segments: a search from the first one would make late batches
            // slower.
            let begin = lane.segments.partition_point(|weave| weave.rows.end <= from);
            for weave in lane.segments.iter().skip(begin).take_while(|weave| weave.rows.start < to)
            {
                let many = weave.open.len() as u64;
                // The parts of a segment take turns in the same way.
                for (number, (part, row)) in (0..many).zip(&weave.open) {
                    let begin = weave.rows.start + number;
                    let end = to.min(weave.rows.end);
                    let done = from.saturating_sub(begin).div_ceil(many);
                    let next = begin + done * many;
                    if next >= end {
                        continue;
                    }
                    pieces.push(PartSlice {
                        part: *part,
                        first: to_index(row + done * weave.stride),
                        count: to_index((end - next).div_ceil(many)),
                        stride: to_index(weave.stride),
                        batch_start: to_index(slot + next * turn - first),
                        batch_stride: to_index(many * turn),
                    });
                }
            }
        }
    }
}

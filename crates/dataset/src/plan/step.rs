// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The parts of one batch.

use crate::plan::{Plan, Stage, Tail, index};

/// Rows of one part, in the part's own order (after its permutation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the part in [`Plan::parts`].
    pub part: usize,
    /// First row.
    pub first: usize,
    /// Their number.
    pub count: usize,
    /// From one to the next.
    pub stride: usize,
    /// Position of the first row in the batch.
    pub at: usize,
    /// From one to the next in the batch.
    pub skip: usize,
}

/// One batch of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Sources of its rows, by [`Piece::at`]; together they fill the first `valid` rows of the
    /// batch.
    pub pieces: Vec<Piece>,
    /// Rows that are no padding.
    pub valid: usize,
    /// Rows of the batch; those past `valid` repeat the last one.
    pub rows: usize,
    /// The part whose only row is repeated, when there is no valid row.
    pub padding: Option<usize>,
}

impl Plan {
    /// Returns the batch of step `step`; empty past the end.
    pub fn step(&self, step: u64) -> Step {
        if step >= self.steps() {
            return Step::default();
        }
        let low = (step * self.batch_size).min(self.rows);
        let high = ((step + 1) * self.batch_size).min(self.rows);
        let mut pieces = Vec::new();
        for stage in
            self.stages.iter().filter(|stage| stage.rows.start < high && low < stage.rows.end)
        {
            stage.pieces(low.max(stage.rows.start), high.min(stage.rows.end), low, &mut pieces);
        }
        pieces.sort_unstable_by_key(|piece| piece.at);
        let valid = index(high - low);
        let padded = self.tail == Tail::Pad;
        let rows = if padded { index(self.batch_size) } else { valid };
        Step { pieces, valid, rows, padding: if valid == 0 { self.padding } else { None } }
    }
}

impl Stage {
    /// Adds the rows `low..high` of a rank, which are all of this stage; the batch begins with row
    /// `first`.
    fn pieces(&self, low: u64, high: u64, first: u64, pieces: &mut Vec<Piece>) {
        let turn = self.slots.len() as u64;
        let start = self.rows.start;
        for (slot, lane) in (start..).zip(&self.slots) {
            let (from, to) =
                (low.saturating_sub(slot).div_ceil(turn), high.saturating_sub(slot).div_ceil(turn));
            let begin = lane.stretches.partition_point(|weave| weave.rows.end <= from);
            for weave in lane.stretches.iter().skip(begin).take_while(|weave| weave.rows.start < to)
            {
                let many = weave.open.len() as u64;
                for (number, (part, row)) in (0..many).zip(&weave.open) {
                    let begin = weave.rows.start + number;
                    let end = to.min(weave.rows.end);
                    let done = from.saturating_sub(begin).div_ceil(many);
                    let next = begin + done * many;
                    if next >= end {
                        continue;
                    }
                    pieces.push(Piece {
                        part: *part,
                        first: index(row + done * weave.stride),
                        count: index((end - next).div_ceil(many)),
                        stride: index(weave.stride),
                        at: index(slot + next * turn - first),
                        skip: index(many * turn),
                    });
                }
            }
        }
    }
}

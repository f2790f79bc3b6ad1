// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What one batch is made of.

use crate::plan::{Plan, Tail, index};

/// Rows of one part, in the part's own order (after its permutation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the part in [`Plan::parts`].
    pub part: usize,
    /// First row.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// From one to the next.
    pub stride: usize,
}

/// One batch of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Where its rows come from, in order.
    pub pieces: Vec<Piece>,
    /// Rows that are no padding.
    pub valid: usize,
    /// Rows of the batch; those past `valid` repeat the last one.
    pub rows: usize,
    /// The part whose only row is repeated, when there is no valid row.
    pub padding: Option<usize>,
}

impl Plan {
    /// The batch of step `step`; empty past the end.
    pub fn step(&self, step: u64) -> Step {
        if step >= self.steps() {
            return Step::default();
        }
        let low = (step * self.batch_size).min(self.rows);
        let high = ((step + 1) * self.batch_size).min(self.rows);
        let turn = self.slots.len() as u64;
        let mut pieces = Vec::new();
        for (slot, lane) in (0..turn).zip(&self.slots) {
            let (mut from, to) =
                (low.saturating_sub(slot).div_ceil(turn), high.saturating_sub(slot).div_ceil(turn));
            let mut at = lane.parts.partition_point(|(first, ..)| *first <= from).saturating_sub(1);
            while from < to {
                let Some((_, part, start)) = lane.parts.get(at) else { break };
                let end = lane.parts.get(at + 1).map_or(to, |(first, ..)| *first).min(to);
                pieces.push(Piece {
                    part: *part,
                    first: index(lane.first + from * self.stride - start),
                    count: index(end - from),
                    stride: index(self.stride),
                });
                (from, at) = (end, at + 1);
            }
        }
        let valid = index(high - low);
        let padded = self.tail == Tail::Pad;
        let rows = if padded { index(self.batch_size) } else { valid };
        Step { pieces, valid, rows, padding: if valid == 0 { self.padding } else { None } }
    }
}

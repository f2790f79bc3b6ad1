// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One batch from its blocks.

use std::sync::Arc;

use farandole_dataset::{Piece, Step};

use crate::batch::Batch;
use crate::block::Block;
use crate::dataset::Field;
use crate::pool::Pool;
use crate::values::{Rows, weave};

/// Puts the batch of `step` together; `blocks` are those of its pieces, in order, and then that of the padding.
pub(crate) fn assemble(fields: &Arc<[Field]>, step: &Step, blocks: &[Arc<Block>], pool: &Arc<Pool>) -> Batch {
    let mut batch = Batch::new(Arc::clone(fields), step.rows, step.valid, pool);
    let padding = step.padding.map(|part| Piece { part, first: 0, count: 1, stride: 1, at: 0, skip: 1 });
    let pieces = step.pieces.iter().chain(&padding);
    let rows: Vec<Rows<'_>> = pieces
        .map(|piece| Rows {
            order: None,
            first: piece.first,
            count: piece.count,
            stride: piece.stride,
            at: piece.at,
            skip: piece.skip,
        })
        .collect();
    let filled = if step.padding.is_some() { 1 } else { step.valid };
    let mut strands = Vec::with_capacity(rows.len());
    for (index, field) in fields.iter().enumerate() {
        let Some(held) = batch.held(index) else { continue };
        let out = batch.slab_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
        strands.clear();
        strands.extend(rows.iter().zip(blocks).filter_map(|(rows, block)| block.strand(index, *rows)));
        weave(&strands, out, field.element);
        repeat_last(out, field.width(), filled, step.rows);
    }
    batch.weigh();
    batch
}

/// Fills rows `filled..rows` with the one before.
fn repeat_last(out: &mut [u8], width: usize, filled: usize, rows: usize) {
    let Some(last) = filled.checked_sub(1) else { return };
    for row in filled..rows {
        out.copy_within(last * width..filled * width, row * width);
    }
}

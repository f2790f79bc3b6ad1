// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One batch from its blocks.

use std::sync::Arc;

use farandole_dataset::{Piece, Step};

use crate::batch::Batch;
use crate::block::Block;
use crate::dataset::Field;
use crate::pool::Pool;
use crate::values::Rows;

/// Puts the batch of `step` together; `blocks` are those of its pieces, in order, and then that of the padding.
pub(crate) fn assemble(fields: &Arc<[Field]>, step: &Step, blocks: &[Arc<Block>], pool: &Arc<Pool>) -> Batch {
    let mut batch = Batch::new(Arc::clone(fields), step.rows, step.valid, pool);
    let padding = step.padding.map(|part| Piece { part, first: 0, count: 1, stride: 1 });
    for (index, field) in fields.iter().enumerate() {
        let Some(held) = batch.held(index) else { continue };
        let out = batch.slab_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
        let (width, mut row) = (field.width(), 0);
        for (piece, block) in step.pieces.iter().chain(&padding).zip(blocks) {
            let rows = Rows { order: None, first: piece.first, count: piece.count, stride: piece.stride };
            let slots = out.get_mut(row * width..(row + piece.count) * width).unwrap_or_default();
            block.copy(index, rows, slots, field.element);
            row += piece.count;
        }
        repeat_last(out, width, row, step.rows);
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One batch from its blocks.

use std::sync::Arc;

use farandole_dataset::{Piece, Step};

use crate::batch::Batch;
use crate::block::Block;
use crate::dataset::Field;
use crate::values::Rows;

/// Puts the batch of `step` together; `blocks` are those of its pieces, in order, and then that of the padding.
pub(crate) fn assemble(fields: &Arc<[Field]>, step: &Step, blocks: &[Arc<Block>]) -> Batch {
    let mut batch = Batch::new(Arc::clone(fields), step.rows, step.valid);
    let padding = step.padding.map(|part| Piece { part, first: 0, count: 1, stride: 1 });
    for (index, field) in fields.iter().enumerate() {
        let (Some(held), Some(width)) = (batch.held(index), field.element.width()) else { continue };
        let start = held.start / width;
        let mut row = 0;
        for (piece, block) in step.pieces.iter().chain(&padding).zip(blocks) {
            let rows = Rows { order: None, first: piece.first, count: piece.count, stride: piece.stride };
            block.copy(index, rows, &mut batch.slab, field.element, start + row * field.elements());
            row += piece.count;
        }
        repeat_last(&mut batch, held.start, field.width(), row, step.rows);
    }
    batch.weigh();
    batch
}

/// Fills rows `filled..rows` with the one before.
fn repeat_last(batch: &mut Batch, start: usize, width: usize, filled: usize, rows: usize) {
    if filled == 0 || filled >= rows {
        return;
    }
    let last = start + (filled - 1) * width;
    for row in filled..rows {
        batch.slab.as_slice_mut().copy_within(last..last + width, start + row * width);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One batch from its blocks, all at once or some of them at a time.

use std::sync::Arc;

use farandole_dataset::{Piece, Step};

use crate::batch::Batch;
use crate::block::Block;
use crate::column::{Field, Selected};
use crate::error::Result;
use crate::pool::Pool;
use crate::texts::Texts;
use crate::values::{Rows, weave};

/// Rows to copy.
pub(crate) struct Copying {
    pub(crate) pieces: Vec<Piece>,
    /// The block of each piece.
    pub(crate) blocks: Vec<Arc<Block>>,
    /// Whether the batch is complete then.
    pub(crate) last: bool,
}

/// A batch that is being put together.
pub(crate) struct Draft {
    /// Its step.
    pub(crate) number: u64,
    /// Rows that are not copied yet.
    pub(crate) missing: Vec<Piece>,
    rows: usize,
    valid: usize,
    /// The batch in progress.
    begun: Option<(Batch, Vec<Option<Texts>>)>,
}

impl Draft {
    /// The batch of a step, with nothing in it.
    pub(crate) fn new(number: u64, step: Step) -> Self {
        let padding =
            step.padding.map(|part| Piece { part, first: 0, count: 1, stride: 1, at: 0, skip: 1 });
        let missing = step.pieces.into_iter().chain(padding).collect();
        Self { number, missing, rows: step.rows, valid: step.valid, begun: None }
    }

    /// Copies rows; returns the batch with the last ones.
    ///
    /// # Errors
    /// Memory for padded lists that cannot be had.
    pub(crate) fn copy(
        &mut self,
        (fields, selected): (&Arc<[Field]>, &[Selected]),
        copying: &Copying,
        pool: &Arc<Pool>,
    ) -> Result<Option<Batch>> {
        let (rows, valid) = (self.rows, self.valid);
        let (mut batch, mut texts) = self.begun.take().unwrap_or_else(|| {
            let texts = fields.iter().map(|field| field.is_text().then(|| Texts::new(rows)));
            (Batch::new(Arc::clone(fields), rows, valid, pool), texts.collect())
        });
        let places: Vec<Rows<'_>> = copying.pieces.iter().map(place).collect();
        let mut strands = Vec::with_capacity(places.len());
        for ((index, field), texts) in fields.iter().enumerate().zip(&mut texts) {
            let from = places.iter().zip(&copying.blocks);
            if let Some(texts) = texts {
                for (array, rows) in from.filter_map(|(rows, block)| block.texts(index, *rows)) {
                    texts.note(array, rows);
                }
                if !copying.last {
                    texts.settle();
                }
                continue;
            }
            let Some(held) = batch.held(index) else { continue };
            let out =
                batch.slab_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
            strands.clear();
            strands.extend(from.filter_map(|(rows, block)| block.strand(index, *rows)));
            weave(&strands, out, field.element);
            if copying.last {
                repeat_last(out, field.width(), valid.max(1), rows);
            }
        }
        if copying.last {
            batch.weigh();
            let finish = |(texts, column): (Option<Texts>, &Selected)| {
                let padding = column.padding.as_deref();
                let gathered = texts.map(|texts| texts.finish(padding, pool)).transpose();
                gathered.map_err(|lack| lack.of(&column.field.name))
            };
            batch.texts = texts.into_iter().zip(selected).map(finish).collect::<Result<_>>()?;
            Ok(Some(batch))
        } else {
            self.begun = Some((batch, texts));
            Ok(None)
        }
    }
}

fn place(piece: &Piece) -> Rows<'static> {
    let Piece { first, count, stride, at, skip, .. } = *piece;
    Rows { order: None, first, count, stride, at, skip }
}

/// Fills rows `filled..rows` with the one before.
fn repeat_last(out: &mut [u8], width: usize, filled: usize, rows: usize) {
    let Some(last) = filled.checked_sub(1) else { return };
    for row in filled..rows {
        out.copy_within(last * width..filled * width, row * width);
    }
}

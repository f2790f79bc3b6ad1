// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Puts one batch together from its blocks, in one copy or in several.

use std::sync::Arc;

use farandole_dataset::{BatchPlan, PartSlice};

use crate::batch::Batch;
use crate::block::DecodedBlock;
use crate::column::{BatchField, SelectedColumn};
use crate::error::Result;
use crate::pool::BufferPool;
use crate::values::{RowCopyPlan, copy_interleaved};
use crate::variable_length::VariableLengthBuilder;

/// Rows to copy into a batch.
pub(crate) struct RowCopy {
    pub(crate) pieces: Vec<PartSlice>,
    /// Block of each piece, in the same order.
    pub(crate) blocks: Vec<Arc<DecodedBlock>>,
    /// Whether the batch is complete after this copy.
    pub(crate) last: bool,
}

/// A batch that is being put together.
pub(crate) struct BatchDraft {
    /// Step of the batch.
    pub(crate) number: u64,
    /// Rows that are not copied yet.
    pub(crate) missing: Vec<PartSlice>,
    rows: usize,
    valid: usize,
    /// The batch and the columns without a fixed size, after the first copy.
    begun: Option<(Batch, Vec<Option<VariableLengthBuilder>>)>,
}

impl BatchDraft {
    /// Returns the empty draft of a step's batch.
    pub(crate) fn new(number: u64, step: BatchPlan) -> Self {
        let padding = step.padding.map(|part| PartSlice {
            part,
            first: 0,
            count: 1,
            stride: 1,
            batch_start: 0,
            batch_stride: 1,
        });
        let missing = step.pieces.into_iter().chain(padding).collect();
        Self { number, missing, rows: step.rows, valid: step.valid, begun: None }
    }

    /// Copies rows, and returns the batch if it is complete.
    ///
    /// # Errors
    /// The memory for padded lists cannot be allocated.
    pub(crate) fn copy_rows(
        &mut self,
        (fields, selected): (&Arc<[BatchField]>, &[SelectedColumn]),
        copying: &RowCopy,
        pool: &Arc<BufferPool>,
    ) -> Result<Option<Batch>> {
        let (rows, valid) = (self.rows, self.valid);
        let (mut batch, mut texts) = self.begun.take().unwrap_or_else(|| {
            let texts = fields
                .iter()
                .map(|field| field.is_variable_length().then(|| VariableLengthBuilder::new(rows)));
            (Batch::new(Arc::clone(fields), rows, valid, pool), texts.collect())
        });
        let places: Vec<RowCopyPlan<'_>> = copying.pieces.iter().map(to_row_copy_plan).collect();
        let mut strands = Vec::with_capacity(places.len());
        for ((index, field), texts) in fields.iter().enumerate().zip(&mut texts) {
            let from = places.iter().zip(&copying.blocks);
            if let Some(texts) = texts {
                for (array, rows) in
                    from.filter_map(|(rows, block)| block.variable_length_rows(index, *rows))
                {
                    texts.add_rows(array, rows);
                }
                if !copying.last {
                    texts.copy_rows_added_so_far();
                }
                continue;
            }
            let Some(held) = batch.column_extent(index) else { continue };
            let out =
                batch.buffer_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
            strands.clear();
            strands.extend(from.filter_map(|(rows, block)| block.column_rows(index, *rows)));
            copy_interleaved(&strands, out, field.element);
            if copying.last {
                repeat_last_row(out, field.row_width(), valid.max(1), rows);
            }
        }
        if copying.last {
            batch.write_weights();
            let finish = |(texts, column): (Option<VariableLengthBuilder>, &SelectedColumn)| {
                let padding = column.padding.as_deref();
                let gathered = texts.map(|texts| texts.finish_column(padding, pool)).transpose();
                gathered.map_err(|lack| lack.into_column_error(&column.field.name))
            };
            batch.texts = texts.into_iter().zip(selected).map(finish).collect::<Result<_>>()?;
            Ok(Some(batch))
        } else {
            self.begun = Some((batch, texts));
            Ok(None)
        }
    }
}

fn to_row_copy_plan(piece: &PartSlice) -> RowCopyPlan<'static> {
    let PartSlice { first, count, stride, batch_start: at, batch_stride: skip, .. } = *piece;
    RowCopyPlan { order: None, first, count, stride, output_start: at, output_stride: skip }
}

/// Fills rows `filled..rows` with copies of row `filled - 1`.
fn repeat_last_row(out: &mut [u8], width: usize, filled: usize, rows: usize) {
    let Some(last) = filled.checked_sub(1) else { return };
    for row in filled..rows {
        out.copy_within(last * width..filled * width, row * width);
    }
}

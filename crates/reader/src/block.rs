// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded rows of one part of the plan.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::BinaryViewArray;
use farandole_dataset::{ElementType, PlanPart, random_permutation};

use crate::batch::align_up;
use crate::cache::BlockCache;
use crate::column::SelectedColumn;
use crate::dataset::ParquetDataset;
use crate::decode::DecodePlan;
use crate::error::{Error, Result};
use crate::footer::FetchedRanges;
use crate::pages::DecodeScratch;
use crate::pool::{BufferPool, PooledBuffer};
use crate::value_origin::ValueOrigin;
use crate::values::{ColumnSource, RowCopyPlan, find_value_out_of_range, shuffle_column};
use crate::variable_length::VariableLengthValues;

/// Widest rows, in bytes, that are shuffled when they are decoded. Wider rows are moved only once,
/// into the batch.
const MAX_NARROW_ROW_BYTES: usize = 64;

/// Limit, in bytes of all columns, up to which a part is fetched in one request: opening a file
/// costs more than reading so few bytes.
const MAX_JOINT_FETCH_BYTES: u64 = 1 << 20;

/// One column of a block.
#[derive(Debug)]
struct BlockColumn {
    /// Range of the column in `slab`.
    bytes: Range<usize>,
    element: ElementType,
    elements: usize,
    /// Whether the rows are still in file order.
    in_file_order: bool,
    /// Values of a column that has no fixed size.
    texts: Option<VariableLengthValues>,
}

/// Decoded rows of a part. Row `i` of the block is row `order[i]` of the part.
#[derive(Debug)]
pub(crate) struct DecodedBlock {
    slab: PooledBuffer,
    columns: Vec<BlockColumn>,
    order: Option<Vec<u32>>,
}

/// Decodes parts into blocks.
pub(crate) struct BlockDecoder<'a> {
    pub(crate) dataset: &'a ParquetDataset,
    pub(crate) selected: &'a [SelectedColumn],
    pub(crate) pool: &'a Arc<BufferPool>,
    pub(crate) cache: Option<&'a BlockCache>,
}

impl BlockDecoder<'_> {
    /// Decodes a part or reads it from the cache, and shuffles its narrow columns. Bytes that are
    /// not in `fetched` are fetched column by column, or all together if they are few.
    ///
    /// # Errors
    /// Bytes that cannot be fetched or decoded.
    pub(crate) fn decode_block(
        &self,
        part: &PlanPart,
        fetched: Option<(DecodePlan, FetchedRanges)>,
        bench: &mut DecodeScratch,
    ) -> Result<DecodedBlock> {
        let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
        let order = part
            .shuffle
            .map(|seed| random_permutation(seed, u32::try_from(rows).unwrap_or(u32::MAX)));
        let (plan, bytes) = fetched.unzip();
        let cached = self.cache.filter(|cache| plan.is_none() && cache.contains_part(part));
        let plan = match (plan, cached) {
            (None, None) => {
                Some(DecodePlan::new(self.dataset, self.selected, part, self.pool.byte_limit())?)
            }
            (plan, _) => plan,
        };
        let bytes = match (bytes, &plan) {
            (None, Some(plan)) if plan.stored_bytes() <= MAX_JOINT_FETCH_BYTES => {
                Some(plan.fetch_all_columns(self.dataset, part)?)
            }
            (bytes, _) => bytes,
        };
        let mut columns = lay_out_columns(self.selected, rows, order.is_some());
        let narrow = |(column, column_layout): (&SelectedColumn, &BlockColumn)| {
            if column_layout.in_file_order { 0 } else { column.field.row_width() }
        };
        let widest = self.selected.iter().zip(&columns).map(narrow).max().unwrap_or(0);
        let mut raw = self.pool.take_buffer(rows.saturating_mul(widest));
        let mut slab = self.pool.take_buffer(columns.last().map_or(0, |column| column.bytes.end));
        for ((index, column), column_layout) in self.selected.iter().enumerate().zip(&mut columns) {
            if column.field.is_variable_length() {
                let plan = plan.as_ref().ok_or(Error::Ended)?;
                column_layout.texts = Some(plan.decode_variable_length(
                    self.dataset,
                    (column, index),
                    part,
                    bytes.as_ref(),
                )?);
                continue;
            }
            let out = slab.as_mut_slice().get_mut(column_layout.bytes.clone()).unwrap_or_default();
            let stored = rows.saturating_mul(column.field.row_width());
            let data = if column_layout.in_file_order {
                &mut *out
            } else {
                raw.as_mut_slice().get_mut(..stored).unwrap_or_default()
            };
            match (&plan, cached) {
                (Some(plan), _) => {
                    plan.decode_column(
                        self.dataset,
                        (column, index),
                        part,
                        bytes.as_ref(),
                        (bench, &mut *data),
                    )?;
                    if let Some(cache) = self.cache {
                        cache.write_column(part, index, data);
                    }
                }
                (None, Some(cache)) => cache.read_column(part, index, data)?,
                (None, None) => return Err(Error::Ended),
            }
            self.check_output_range(column, part, data)?;
            if let (Some(order), false) = (&order, column_layout.in_file_order) {
                let (element, elements) = (column.field.element, column.field.elements_per_row());
                let data = raw.as_slice().get(..stored).unwrap_or_default();
                shuffle_column(
                    ColumnSource { data, element, elements },
                    order,
                    out,
                    column.output_element,
                );
            }
        }
        // Last: other processes read the columns as soon as they see the mark.
        if let (Some(cache), Some(_)) = (self.cache, &plan) {
            cache.mark_complete(part);
        }
        Ok(DecodedBlock { slab, columns, order })
    }
}

impl BlockDecoder<'_> {
    /// Checks that the values of a column fit into the type of its batches.
    fn check_output_range(
        &self,
        column: &SelectedColumn,
        part: &PlanPart,
        data: &[u8],
    ) -> Result<()> {
        let (from, to) = (column.field.element, column.output_element);
        // Where infinities are accepted, a number beyond the range of floats is one.
        if column.allow_nan && to.is_float() {
            return Ok(());
        }
        let Some((at, value)) = find_value_out_of_range(data, from, to) else { return Ok(()) };
        let files = &self.dataset.manifest().files;
        let path = files.get(part.file).map_or("", |file| &file.path);
        let file = self.dataset.store().display_path(path);
        let stored = self.dataset.stored_row_ranges(part);
        let origin = ValueOrigin {
            file: &file,
            group: part.group,
            column: &column.field.name,
            stored_rows: &stored,
        };
        let row = at / column.field.elements_per_row().max(1);
        let reason = format!("{value} is not in the range of {}", to.numpy_name());
        Err(origin.unrepresentable_error(row, reason))
    }
}

/// Returns the layout of the columns in a block of `rows` rows. If `shuffled` is false, all columns
/// stay in file order.
fn lay_out_columns(selected: &[SelectedColumn], rows: usize, shuffled: bool) -> Vec<BlockColumn> {
    let mut end = 0_usize;
    let column_layout = |column: &SelectedColumn| {
        let lazy = !shuffled || column.field.row_width() > MAX_NARROW_ROW_BYTES;
        let element = if lazy { column.field.element } else { column.output_element };
        let width = if lazy { column.field.row_width() } else { column.output_row_width() };
        let bytes = end..end.saturating_add(rows.saturating_mul(width));
        end = align_up(bytes.end);
        BlockColumn {
            bytes,
            element,
            elements: column.field.elements_per_row(),
            in_file_order: lazy,
            texts: None,
        }
    };
    selected.iter().map(column_layout).collect()
}

impl DecodedBlock {
    /// Returns the bytes of values without a fixed size.
    pub(crate) fn variable_length_bytes(&self) -> u64 {
        let texts = self.columns.iter().filter_map(|column| column.texts.as_ref());
        texts.map(|texts| texts.held_bytes).fold(0, u64::saturating_add)
    }

    /// Returns rows of column `index`, if its values have no fixed size.
    pub(crate) fn variable_length_rows<'a>(
        &'a self,
        index: usize,
        rows: RowCopyPlan<'a>,
    ) -> Option<(&'a BinaryViewArray, RowCopyPlan<'a>)> {
        let texts = self.columns.get(index)?.texts.as_ref()?;
        Some((&texts.values, RowCopyPlan { order: self.order.as_deref(), ..rows }))
    }

    /// Estimates the bytes of a part's block, without values that have no fixed size.
    pub(crate) fn estimate_bytes(part: &PlanPart, selected: &[SelectedColumn]) -> u64 {
        let widths =
            selected.iter().map(|column| column.field.row_width().max(column.output_row_width()));
        let row = widths.fold(4, usize::saturating_add);
        (part.rows.end - part.rows.start).saturating_mul(row as u64)
    }

    /// Returns rows of column `index`.
    pub(crate) fn column_rows<'a>(
        &'a self,
        index: usize,
        rows: RowCopyPlan<'a>,
    ) -> Option<(ColumnSource<'a>, RowCopyPlan<'a>)> {
        let column = self.columns.get(index)?;
        let order = if column.in_file_order { self.order.as_deref() } else { None };
        let data = self.slab.as_slice().get(column.bytes.clone())?;
        let source = ColumnSource { data, element: column.element, elements: column.elements };
        Some((source, RowCopyPlan { order, ..rows }))
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Batches: aligned buffers with names.

use std::sync::Arc;

use farandole_dataset::ElementType;

use crate::column::BatchField;
use crate::pool::{BufferPool, PooledBuffer, as_values_mut};
use crate::variable_length::VariableLengthColumn;

/// Alignment of the start of each column, in bytes.
// The alignment that Arrow recommends, and the size of a cache line.
pub(crate) const COLUMN_ALIGNMENT: usize = 64;

/// Bytes of one weight.
const WEIGHT_BYTES: usize = 4;

/// Byte range of one column within a batch, and its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnExtent {
    /// First byte, a multiple of 64.
    pub start: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// Type of the elements.
    pub element: ElementType,
}

/// Rows of all columns, in one allocation.
#[derive(Debug)]
pub struct Batch {
    slab: PooledBuffer,
    bytes: usize,
    /// Columns without a fixed size; `None` for other columns.
    pub(crate) texts: Vec<Option<VariableLengthColumn>>,
    pub(crate) fields: Arc<[BatchField]>,
    pub(crate) rows: usize,
    pub(crate) valid: usize,
}

impl Batch {
    pub(crate) fn new(
        fields: Arc<[BatchField]>,
        rows: usize,
        valid: usize,
        pool: &Arc<BufferPool>,
    ) -> Self {
        let bytes = Self::bytes_for_rows(&fields, rows);
        Self { slab: pool.take_buffer(bytes), bytes, texts: Vec::new(), fields, rows, valid }
    }

    /// Returns the bytes of a batch of `rows` rows, without columns that have no fixed size.
    pub(crate) fn bytes_for_rows(fields: &[BatchField], rows: usize) -> usize {
        let column = |width: usize| align_up(rows.saturating_mul(width));
        let columns = fields.iter().map(|field| column(field.row_width()));
        columns.fold(column(WEIGHT_BYTES), usize::saturating_add)
    }

    /// Returns the bytes that this batch takes in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let texts = self.texts.iter().flatten().map(VariableLengthColumn::total_bytes);
        texts.fold(self.bytes as u64, u64::saturating_add)
    }

    /// Writes the weights: 1 for valid rows, 0 for padding.
    pub(crate) fn write_weights(&mut self) {
        let Some(held) = self.column_extent(self.fields.len()) else { return };
        let valid = self.valid;
        let bytes =
            self.buffer_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
        for (row, weight) in as_values_mut::<f32>(bytes).iter_mut().enumerate() {
            *weight = if row < valid { 1.0 } else { 0.0 };
        }
    }

    /// Returns the number of rows of every column, including padding.
    pub fn row_count(&self) -> usize {
        self.rows
    }

    /// Returns the number of rows that are not padding. They come first.
    pub fn valid_rows(&self) -> usize {
        self.valid
    }

    /// Returns the fields of the columns.
    pub fn fields(&self) -> &[BatchField] {
        &self.fields
    }

    /// Returns the place of column number `index`. After the last column come the weights, as
    /// float32: 1 for rows, 0 for padding.
    pub fn column_extent(&self, index: usize) -> Option<ColumnExtent> {
        let before = self.fields.get(..index)?;
        let start = before.iter().map(|field| align_up(self.rows * field.row_width())).sum();
        let (element, width) =
            self.fields.get(index).map_or((ElementType::Float32, WEIGHT_BYTES), |field| {
                (field.element, field.row_width())
            });
        Some(ColumnExtent { start, bytes: self.rows * width, element })
    }

    /// Returns the bytes of column number `index`; none if its values have no fixed size. After the
    /// last column come the weights.
    pub fn column_bytes(&self, index: usize) -> Option<&[u8]> {
        let held = self.column_extent(index)?;
        self.slab.as_slice().get(held.start..held.start + held.bytes)
    }

    /// Returns offsets and values of a column of strings or bytes. The offsets are 64-bit integers:
    /// the start of each value, and the end of the last one. The values follow each other without
    /// gaps.
    ///
    /// If rows are padded, the values are the padded ones, but the offsets refer to the values
    /// without padding.
    pub fn variable_length_values(&self, index: usize) -> Option<(&[u8], &[u8])> {
        let texts = self.texts.get(index)?.as_ref()?;
        Some((texts.offset_bytes(), texts.value_bytes()))
    }

    /// Returns the number of values in a row of a padded column.
    pub fn padded_length(&self, index: usize) -> Option<usize> {
        self.texts.get(index)?.as_ref()?.length
    }

    /// Like [`Batch::variable_length_values`], for owners that pass the memory on.
    pub fn offsets_and_values_to_share(&mut self, index: usize) -> Option<(&mut [u8], &mut [u8])> {
        Some(self.texts.get_mut(index)?.as_mut()?.offsets_and_values_mut())
    }

    /// Returns all bytes, for owners that pass the memory on.
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        self.slab.as_mut_slice().get_mut(..self.bytes).unwrap_or_default()
    }
}

pub(crate) fn align_up(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(COLUMN_ALIGNMENT).unwrap_or(usize::MAX)
}

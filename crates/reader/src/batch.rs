// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Batches: aligned buffers with names.

use std::sync::Arc;

use arrow::buffer::MutableBuffer;
use farandole_dataset::Element;

use crate::dataset::Field;

/// Columns start at multiples of this.
pub(crate) const ALIGN: usize = 64;

/// Bytes of one weight.
const WEIGHT: usize = 4;

/// Where one column is within a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// First byte, a multiple of 64.
    pub start: usize,
    /// Bytes.
    pub bytes: usize,
    /// What they are.
    pub element: Element,
}

/// Rows of all columns, in one allocation.
#[derive(Debug)]
pub struct Batch {
    pub(crate) slab: MutableBuffer,
    pub(crate) fields: Arc<[Field]>,
    pub(crate) rows: usize,
    pub(crate) valid: usize,
}

impl Batch {
    pub(crate) fn new(fields: Arc<[Field]>, rows: usize, valid: usize) -> Self {
        let columns: usize = fields.iter().map(|field| padded(rows * field.width())).sum();
        let bytes = columns + padded(rows * WEIGHT);
        Self { slab: MutableBuffer::from_len_zeroed(bytes), fields, rows, valid }
    }

    /// Writes the weights.
    pub(crate) fn weigh(&mut self) {
        let Some(held) = self.held(self.fields.len()) else { return };
        let weights = self.slab.typed_data_mut::<f32>();
        if let Some(weights) = weights.get_mut(held.start / WEIGHT..held.start / WEIGHT + self.valid) {
            weights.fill(1.0);
        }
    }

    /// Rows in every column, padding included.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows that are no padding; they come first.
    pub fn valid_rows(&self) -> usize {
        self.valid
    }

    /// What the columns are.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Where column number `index` is; the one after the last are the weights, float32: 1, and 0 for padding.
    pub fn held(&self, index: usize) -> Option<Held> {
        let before = self.fields.get(..index)?;
        let start = before.iter().map(|field| padded(self.rows * field.width())).sum();
        let (element, width) =
            self.fields.get(index).map_or((Element::Float32, WEIGHT), |field| (field.element, field.width()));
        Some(Held { start, bytes: self.rows * width, element })
    }

    /// The bytes of a column.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        let held = self.held(index)?;
        self.slab.as_slice().get(held.start..held.start + held.bytes)
    }

    /// All bytes, for owners that hand them out.
    pub fn slab_mut(&mut self) -> &mut [u8] {
        self.slab.as_slice_mut()
    }
}

pub(crate) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Batches: aligned buffers with names.

use std::sync::Arc;

use farandole_dataset::Element;

use crate::column::Field;
use crate::pool::{Pool, Slab, typed_mut};
use crate::texts::Gathered;

/// Columns start at multiples of this.
pub(crate) const ALIGN: usize = 64;

/// Bytes of one weight.
const WEIGHT: usize = 4;

/// The place of one column within a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// First byte, a multiple of 64.
    pub start: usize,
    /// Bytes.
    pub bytes: usize,
    /// Type of the elements.
    pub element: Element,
}

/// Rows of all columns, in one allocation.
#[derive(Debug)]
pub struct Batch {
    slab: Slab,
    bytes: usize,
    /// The values of columns without a fixed size.
    pub(crate) texts: Vec<Option<Gathered>>,
    pub(crate) fields: Arc<[Field]>,
    pub(crate) rows: usize,
    pub(crate) valid: usize,
}

impl Batch {
    pub(crate) fn new(fields: Arc<[Field]>, rows: usize, valid: usize, pool: &Arc<Pool>) -> Self {
        let bytes = Self::bytes_of(&fields, rows);
        Self { slab: pool.take(bytes), bytes, texts: Vec::new(), fields, rows, valid }
    }

    /// Bytes that so many rows take.
    pub(crate) fn bytes_of(fields: &[Field], rows: usize) -> usize {
        let column = |width: usize| padded(rows.saturating_mul(width));
        let columns = fields.iter().map(|field| column(field.width()));
        columns.fold(column(WEIGHT), usize::saturating_add)
    }

    /// Bytes that this batch takes in memory.
    pub(crate) fn size(&self) -> u64 {
        let texts = self.texts.iter().flatten().map(Gathered::size);
        texts.fold(self.bytes as u64, u64::saturating_add)
    }

    /// Writes the weights.
    pub(crate) fn weigh(&mut self) {
        let Some(held) = self.held(self.fields.len()) else { return };
        let valid = self.valid;
        let bytes =
            self.slab_mut().get_mut(held.start..held.start + held.bytes).unwrap_or_default();
        for (row, weight) in typed_mut::<f32>(bytes).iter_mut().enumerate() {
            *weight = if row < valid { 1.0 } else { 0.0 };
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

    /// Returns the fields of the columns.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Returns the place of column number `index`; the one after the last are the weights, float32:
    /// 1, and 0 for padding.
    pub fn held(&self, index: usize) -> Option<Held> {
        let before = self.fields.get(..index)?;
        let start = before.iter().map(|field| padded(self.rows * field.width())).sum();
        let (element, width) = self
            .fields
            .get(index)
            .map_or((Element::Float32, WEIGHT), |field| (field.element, field.width()));
        Some(Held { start, bytes: self.rows * width, element })
    }

    /// The bytes of a column.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        let held = self.held(index)?;
        self.slab.bytes().get(held.start..held.start + held.bytes)
    }

    /// The values of a column of texts or bytes, one after the other: where each begins, and the
    /// last one ends, as 64-bit integers, and what they are. If rows are padded, the values are the
    /// padded ones, and the places are those of the values without padding.
    pub fn texts(&self, index: usize) -> Option<(&[u8], &[u8])> {
        let texts = self.texts.get(index)?.as_ref()?;
        Some((texts.ends(), texts.values()))
    }

    /// Values of a row of a column whose rows are padded.
    pub fn length(&self, index: usize) -> Option<usize> {
        self.texts.get(index)?.as_ref()?.length
    }

    /// As [`Batch::texts`], for owners that hand them out.
    pub fn texts_mut(&mut self, index: usize) -> Option<(&mut [u8], &mut [u8])> {
        Some(self.texts.get_mut(index)?.as_mut()?.parts_mut())
    }

    /// All bytes, for owners that hand them out.
    pub fn slab_mut(&mut self) -> &mut [u8] {
        self.slab.bytes_mut().get_mut(..self.bytes).unwrap_or_default()
    }
}

pub(crate) fn padded(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
}

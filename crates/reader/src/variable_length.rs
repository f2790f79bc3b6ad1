// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Strings, bytes and lists of any length, which are stored outside of a batch's buffer.

use std::sync::Arc;

use arrow::array::{Array, BinaryViewArray, BinaryViewBuilder};
use arrow::buffer::Buffer;

use crate::padding::{AllocationFailure, RowPadding};
use crate::pool::{BufferPool, PooledBuffer, as_values_mut};
use crate::values::RowCopyPlan;

/// Bytes of one offset of [`VariableLengthColumn`].
const OFFSET_BYTES: usize = 8;

/// Bytes beyond twice the values' own size that views may keep in memory; with more, the values are
/// copied.
const MAX_EXTRA_HELD_BYTES: usize = 64 << 10;

/// Views of a block's values, which stay in the memory of their pages.
#[derive(Debug)]
pub(crate) struct VariableLengthValues {
    pub(crate) values: BinaryViewArray,
    /// Bytes that the views keep in memory.
    pub(crate) held_bytes: u64,
}

impl VariableLengthValues {
    /// Wraps values that keep `file` bytes of their file in memory, and their decoded pages. If
    /// that is much more than the values' own bytes, the values are copied.
    pub(crate) fn new(values: BinaryViewArray, file: usize) -> Self {
        let decoded = distinct_buffer_bytes(values.data_buffers());
        let own = values.lengths().map(|length| length as usize).fold(0, usize::saturating_add);
        let (values, held) = match file.max(decoded) {
            held if held > own.saturating_mul(2).saturating_add(MAX_EXTRA_HELD_BYTES) => {
                (values.gc(), own)
            }
            held => (values, held),
        };
        let places = values.len() * size_of::<u128>();
        Self { held_bytes: held.saturating_add(places) as u64, values }
    }
}

/// Returns the bytes of buffers, each counted once.
fn distinct_buffer_bytes(buffers: &[Buffer]) -> usize {
    let mut seen: Vec<(usize, usize)> =
        buffers.iter().map(|buffer| (buffer.as_ptr().addr(), buffer.len())).collect();
    seen.sort_unstable();
    seen.dedup();
    seen.iter().map(|(_, length)| length).fold(0, |sum, length| sum.saturating_add(*length))
}

/// A column of a batch: values of any length without gaps, or padded rows.
#[derive(Debug)]
pub(crate) struct VariableLengthColumn {
    offsets: PooledBuffer,
    values: PooledBuffer,
    rows: usize,
    bytes: usize,
    /// Number of values in a row, if rows are padded.
    pub(crate) length: Option<usize>,
}

impl VariableLengthColumn {
    /// Returns the start of each value and the end of the last one, as 64-bit integers without
    /// padding.
    pub(crate) fn offset_bytes(&self) -> &[u8] {
        self.offsets.as_slice().get(..(self.rows + 1) * OFFSET_BYTES).unwrap_or_default()
    }

    pub(crate) fn value_bytes(&self) -> &[u8] {
        self.values.as_slice().get(..self.bytes).unwrap_or_default()
    }

    /// Returns the bytes of offsets and values together.
    pub(crate) fn total_bytes(&self) -> u64 {
        (self.offset_bytes().len() + self.value_bytes().len()) as u64
    }

    /// Returns offsets and values for writing.
    pub(crate) fn offsets_and_values_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let ends = self
            .offsets
            .as_mut_slice()
            .get_mut(..(self.rows + 1) * OFFSET_BYTES)
            .unwrap_or_default();
        (ends, self.values.as_mut_slice().get_mut(..self.bytes).unwrap_or_default())
    }
}

/// A column of a batch in progress: for each row, the array and the index of its value.
#[derive(Debug)]
pub(crate) struct VariableLengthBuilder {
    arrays: Vec<BinaryViewArray>,
    places: Vec<Option<(usize, usize)>>,
}

impl VariableLengthBuilder {
    /// Creates a column of `rows` rows that are all missing.
    pub(crate) fn new(rows: usize) -> Self {
        Self { arrays: Vec::new(), places: vec![None; rows] }
    }

    /// Adds rows of an array.
    pub(crate) fn add_rows(&mut self, array: &BinaryViewArray, rows: RowCopyPlan<'_>) {
        for (row, at) in rows.row_pairs() {
            if let Some(place) = self.places.get_mut(at) {
                *place = Some((self.arrays.len(), row));
            }
        }
        self.arrays.push(array.clone());
    }

    /// Copies the known rows, so that the source arrays can be dropped.
    pub(crate) fn copy_rows_added_so_far(&mut self) {
        let mut known = BinaryViewBuilder::new();
        for place in self.places.iter().flatten() {
            known.append_value(value_at(&self.arrays, *place));
        }
        for (row, place) in self.places.iter_mut().flatten().enumerate() {
            *place = (0, row);
        }
        self.arrays = vec![known.finish()];
    }

    /// Returns the column. Missing rows repeat the row before.
    ///
    /// # Errors
    /// The memory for padded rows cannot be allocated.
    pub(crate) fn finish_column(
        mut self,
        padding: Option<&RowPadding>,
        pool: &Arc<BufferPool>,
    ) -> Result<VariableLengthColumn, AllocationFailure> {
        let mut last = None;
        for place in &mut self.places {
            *place = place.or(last);
            last = *place;
        }
        let rows = self.places.len();
        let values = || {
            self.places
                .iter()
                .map(|place| place.map_or(&[][..], |place| value_at(&self.arrays, place)))
        };
        let mut ends = pool.take_buffer((rows + 1) * OFFSET_BYTES);
        let (mut end, mut longest) = (0_usize, 0);
        let slots = as_values_mut::<i64>(ends.as_mut_slice());
        for (slot, length) in
            slots.iter_mut().zip(std::iter::once(0).chain(values().map(<[u8]>::len)))
        {
            (end, longest) = (end + length, longest.max(length));
            *slot = i64::try_from(end).unwrap_or(i64::MAX);
        }
        if let Some(padding) = padding {
            let (values, bytes, length) = padding.pad_rows(values(), rows, longest, pool)?;
            return Ok(VariableLengthColumn {
                offsets: ends,
                values,
                rows,
                bytes,
                length: Some(length),
            });
        }
        let mut whole = pool.take_buffer(end);
        let (out, mut at) = (whole.as_mut_slice(), 0);
        for value in values() {
            if let Some(slot) = out.get_mut(at..at + value.len()) {
                slot.copy_from_slice(value);
            }
            at += value.len();
        }
        Ok(VariableLengthColumn { offsets: ends, values: whole, rows, bytes: end, length: None })
    }
}

fn value_at(arrays: &[BinaryViewArray], (array, row): (usize, usize)) -> &[u8] {
    arrays.get(array).filter(|array| row < array.len()).map_or(&[][..], |array| array.value(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: RowCopyPlan<'_> = RowCopyPlan {
        order: None,
        first: 0,
        count: 2,
        stride: 1,
        output_start: 0,
        output_stride: 1,
    };

    #[test]
    fn texts_come_in_the_order_of_the_batch_whenever_they_are_noted() {
        let some = BinaryViewArray::from_iter_values(["a", "bb", "", "one that is long"]);
        let others = BinaryViewArray::from_iter_values(["x", "yyy"]);
        let pool = BufferPool::new(1 << 20);
        for settled in [false, true] {
            let mut texts = VariableLengthBuilder::new(7);
            texts.add_rows(
                &others,
                RowCopyPlan { order: Some(&[1, 0]), output_start: 1, output_stride: 2, ..PLAIN },
            );
            if settled {
                texts.copy_rows_added_so_far();
            }
            texts.add_rows(&some, RowCopyPlan { stride: 2, output_stride: 2, ..PLAIN });
            texts.add_rows(&some, RowCopyPlan { first: 1, count: 1, output_start: 4, ..PLAIN });
            texts.add_rows(&some, RowCopyPlan { first: 3, count: 1, output_start: 5, ..PLAIN });
            let column = texts.finish_column(None, &pool).unwrap();
            assert_eq!(column.value_bytes(), b"ayyyxbbone that is longone that is long");
            let ends: Vec<i64> = column
                .offset_bytes()
                .chunks_exact(8)
                .map(|end| i64::from_le_bytes(end.try_into().unwrap()))
                .collect();
            assert_eq!(ends, [0, 1, 4, 4, 5, 7, 23, 39]);
        }
        let none = VariableLengthBuilder::new(0).finish_column(None, &pool).unwrap();
        assert_eq!((none.offset_bytes(), none.value_bytes()), (&[0; 8][..], &[][..]));
    }

    #[test]
    fn values_that_are_a_small_part_of_what_they_keep_in_memory_are_copied() {
        let all = BinaryViewArray::from_iter_values((0..1000).map(|_| [7_u8; 1000]));
        let bytes = distinct_buffer_bytes(all.data_buffers());
        let whole = VariableLengthValues::new(all.clone(), 0);
        assert_eq!(whole.held_bytes, bytes as u64 + 16_000);
        assert_eq!(whole.values.value(3).as_ptr(), all.value(3).as_ptr());
        let few = VariableLengthValues::new(all.slice(3, 2), 0);
        assert_eq!(few.held_bytes, 2032);
        assert_eq!(few.values.value(1), [7; 1000]);
        assert_ne!(few.values.value(0).as_ptr(), all.value(3).as_ptr());
        assert_eq!(
            VariableLengthValues::new(all, 4 << 20).held_bytes,
            1_016_000,
            "of a file that has much more"
        );
    }
}

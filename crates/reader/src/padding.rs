// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Padding of lists of numbers to one length.

use std::sync::Arc;

use crate::error::Error;
use crate::pool::{BufferPool, PooledBuffer, as_values_mut};

/// Rule that makes rows of one length from the rows of a ragged column. A row is the bytes of its
/// values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPadding {
    /// Bytes of the value that fills the end of a short row. Every value has this width.
    pub fill: Vec<u8>,
    /// Most values of a row; further ones are cut off. At least 1.
    pub max_values: usize,
    /// Divisor of the padded length, unless the length is `max_values`.
    pub step: usize,
    /// Whether the length is always `max_values`, even if all rows are shorter.
    pub fixed: bool,
}

/// Failure to allocate this number of bytes.
#[derive(Debug)]
pub(crate) struct AllocationFailure(pub(crate) usize);

impl RowPadding {
    /// Returns the reason why the rule is invalid, if it is.
    pub(crate) fn find_defect(&self) -> Option<&'static str> {
        if self.fill.is_empty() {
            Some("the value that fills a row has no bytes")
        } else if self.max_values == 0 || self.step == 0 {
            Some("rows are padded to one value at least, in steps of one value at least")
        } else {
            None
        }
    }

    /// Returns the least and the most bytes of `rows` rows.
    pub(crate) fn min_and_max_padded_bytes(&self, rows: usize) -> (usize, usize) {
        let bytes = |length: usize| rows.saturating_mul(length).saturating_mul(self.fill.len());
        (bytes(self.padded_length(0)), bytes(self.max_values))
    }

    /// Returns the first length that is not a multiple of a value's width, and the width.
    pub(crate) fn find_partial_value(
        &self,
        lengths: impl Iterator<Item = u32>,
    ) -> Option<(usize, usize)> {
        let width = self.fill.len().max(1);
        let length = lengths.map(|length| length as usize).find(|length| length % width != 0);
        length.map(|length| (length, width))
    }

    /// Returns the padded length in values for a batch whose longest row has `longest` values.
    fn padded_length(&self, longest: usize) -> usize {
        if self.fixed {
            return self.max_values;
        }
        longest.max(1).div_ceil(self.step).saturating_mul(self.step).min(self.max_values)
    }

    /// Pads rows to one length. Returns their memory, their size in bytes, and the length in
    /// values. The bytes of each row must be whole values.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(crate) fn pad_rows<'a>(
        &self,
        values: impl Iterator<Item = &'a [u8]>,
        rows: usize,
        longest: usize,
        pool: &Arc<BufferPool>,
    ) -> Result<(PooledBuffer, usize, usize), AllocationFailure> {
        let width = self.fill.len();
        let length = self.padded_length(longest / width);
        let row = length.saturating_mul(width);
        let bytes = row.checked_mul(rows).ok_or(AllocationFailure(usize::MAX))?;
        let mut slab = pool.try_take_buffer(bytes).ok_or(AllocationFailure(bytes))?;
        let out = slab.as_mut_slice().get_mut(..bytes).unwrap_or_default();
        for (slot, value) in out.chunks_exact_mut(row).zip(values) {
            let (kept, rest) = slot.split_at_mut(value.len().min(row));
            kept.copy_from_slice(value.get(..kept.len()).unwrap_or_default());
            fill_with_value(rest, &self.fill);
        }
        Ok((slab, bytes, length))
    }
}

impl AllocationFailure {
    /// Converts the failure into the error of a column.
    pub(crate) fn into_column_error(self, column: &str) -> Error {
        Error::Memory { column: column.to_owned(), bytes: self.0 }
    }
}

/// Fills memory with a value. The memory starts at a multiple of the value's width.
fn fill_with_value(out: &mut [u8], value: &[u8]) {
    match *value {
        [first, ..] if value.iter().all(|byte| *byte == first) => out.fill(first),
        [a, b, c, d] => as_values_mut::<u32>(out).fill(u32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => {
            as_values_mut::<u64>(out).fill(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
        }
        _ => out.chunks_exact_mut(value.len().max(1)).for_each(|slot| slot.copy_from_slice(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padding(fill: &[u8], most: usize, step: usize) -> RowPadding {
        RowPadding { fill: fill.to_vec(), max_values: most, step, fixed: false }
    }

    fn padded(how: &RowPadding, rows: &[&[u8]]) -> Result<(Vec<u8>, usize), AllocationFailure> {
        let pool = BufferPool::new(1 << 20);
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or_default();
        let (slab, bytes, length) =
            how.pad_rows(rows.iter().copied(), rows.len(), longest, &pool)?;
        Ok((slab.as_slice()[..bytes].to_vec(), length))
    }

    #[test]
    fn rows_are_filled_up_or_cut_to_a_length_that_fits_the_longest() {
        let rows: [&[u8]; 3] = [&[1, 2, 3], &[], &[4]];
        assert_eq!(
            padded(&padding(&[9], 8, 2), &rows).unwrap(),
            (b"\x01\x02\x03\x09\x09\x09\x09\x09\x04\x09\x09\x09".to_vec(), 4)
        );
        assert_eq!(padded(&padding(&[9], 2, 1), &rows).unwrap(), (vec![1, 2, 9, 9, 4, 9], 2));
        assert_eq!(padded(&padding(&[9], 5, 4), &rows).unwrap().1, 4);
        assert_eq!(padded(&padding(&[9], 3, 2), &rows).unwrap().1, 3);
        assert_eq!(padded(&padding(&[9], 8, 3), &[&[], &[]]).unwrap(), (vec![9; 6], 3));
        assert_eq!(
            padded(&RowPadding { fixed: true, ..padding(&[9], 4, 1) }, &[&[1]]).unwrap(),
            (vec![1, 9, 9, 9], 4)
        );
        assert_eq!(padded(&padding(&[9], 8, 3), &[]).unwrap(), (vec![], 3));
    }

    #[test]
    fn values_of_every_width_are_filled() {
        for width in 1..=8 {
            let fill: Vec<u8> = (1..=width).collect();
            let (bytes, length) = padded(&padding(&fill, 3, 1), &[&fill.repeat(3), &[]]).unwrap();
            assert_eq!((bytes, length), (fill.repeat(6), 3));
        }
    }

    #[test]
    fn rows_of_half_values_and_of_too_many_bytes_are_refused() {
        assert_eq!(padding(&[0; 4], 8, 1).find_partial_value([4, 6, 7].into_iter()), Some((6, 4)));
        assert_eq!(padding(&[0; 4], 8, 1).find_partial_value([4, 0, 8].into_iter()), None);
        let endless = RowPadding { fixed: true, ..padding(&[0; 8], 1 << 50, 1) };
        assert!(
            matches!(padded(&endless, &[&[0; 8]]), Err(AllocationFailure(bytes)) if bytes == 1 << 53)
        );
        let endless = RowPadding { max_values: usize::MAX, ..endless };
        assert!(matches!(padded(&endless, &[&[], &[]]), Err(AllocationFailure(_))));
    }

    #[test]
    fn rows_take_the_shortest_length_at_least_and_the_longest_at_most() {
        let bytes = |most, step, fixed| {
            RowPadding { fixed, ..padding(&[0; 4], most, step) }.min_and_max_padded_bytes(3)
        };
        assert_eq!(bytes(8, 1, false), (12, 96));
        assert_eq!(bytes(8, 3, false), (36, 96));
        assert_eq!(bytes(8, 8, false), (96, 96));
        assert_eq!(bytes(8, 9, false), (96, 96));
        assert_eq!(bytes(8, 1, true), (96, 96));
        assert_eq!(bytes(usize::MAX, 1, true), (usize::MAX, usize::MAX));
    }
}

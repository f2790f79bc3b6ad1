// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lists of numbers that become rows of one length.

use std::sync::Arc;

use crate::error::Error;
use crate::pool::{Pool, Slab, typed_mut};

/// Rules by which the rows of a column, each the bytes of its values, become rows of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padding {
    /// The value after the last one of a row, as bytes; its width is that of every value.
    pub fill: Vec<u8>,
    /// Values of a row that are kept, one at least.
    pub most: usize,
    /// Lengths are multiples of this, up to `most`.
    pub step: usize,
    /// Whether the length is `most`, also where all rows are shorter.
    pub fixed: bool,
}

/// Memory of so many bytes, which cannot be had.
#[derive(Debug)]
pub(crate) struct Lack(pub(crate) usize);

impl Padding {
    /// Returns what is wrong with it, if anything is.
    pub(crate) fn wrong(&self) -> Option<&'static str> {
        if self.fill.is_empty() {
            Some("the value that fills a row has no bytes")
        } else if self.most == 0 || self.step == 0 {
            Some("rows are padded to one value at least, in steps of one value at least")
        } else {
            None
        }
    }

    /// Bytes that so many rows take at least, and at most.
    pub(crate) fn bytes_of(&self, rows: usize) -> (usize, usize) {
        let bytes = |length: usize| rows.saturating_mul(length).saturating_mul(self.fill.len());
        (bytes(self.length(0)), bytes(self.most))
    }

    /// The first length that is no multiple of a value's bytes, and these.
    pub(crate) fn torn(&self, lengths: impl Iterator<Item = u32>) -> Option<(usize, usize)> {
        let width = self.fill.len().max(1);
        let length = lengths.map(|length| length as usize).find(|length| length % width != 0);
        length.map(|length| (length, width))
    }

    /// Values of every row of a batch, the longest row of which has `longest`.
    fn length(&self, longest: usize) -> usize {
        if self.fixed {
            return self.most;
        }
        longest.max(1).div_ceil(self.step).saturating_mul(self.step).min(self.most)
    }

    /// Rows of one length: their memory, their bytes, and the length in values. The values of each
    /// row are whole.
    ///
    /// # Errors
    /// Memory that cannot be had.
    pub(crate) fn padded<'a>(
        &self,
        values: impl Iterator<Item = &'a [u8]>,
        rows: usize,
        longest: usize,
        pool: &Arc<Pool>,
    ) -> Result<(Slab, usize, usize), Lack> {
        let width = self.fill.len();
        let length = self.length(longest / width);
        let row = length.saturating_mul(width);
        let bytes = row.checked_mul(rows).ok_or(Lack(usize::MAX))?;
        let mut slab = pool.try_take(bytes).ok_or(Lack(bytes))?;
        let out = slab.bytes_mut().get_mut(..bytes).unwrap_or_default();
        for (slot, value) in out.chunks_exact_mut(row).zip(values) {
            let (kept, rest) = slot.split_at_mut(value.len().min(row));
            kept.copy_from_slice(value.get(..kept.len()).unwrap_or_default());
            repeat(rest, &self.fill);
        }
        Ok((slab, bytes, length))
    }
}

impl Lack {
    /// The error of a column.
    pub(crate) fn of(self, column: &str) -> Error {
        Error::Memory { column: column.to_owned(), bytes: self.0 }
    }
}

/// Fills memory that begins at a multiple of the value's width with the value.
fn repeat(out: &mut [u8], value: &[u8]) {
    match *value {
        [first, ..] if value.iter().all(|byte| *byte == first) => out.fill(first),
        [a, b, c, d] => typed_mut::<u32>(out).fill(u32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => {
            typed_mut::<u64>(out).fill(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
        }
        _ => out.chunks_exact_mut(value.len().max(1)).for_each(|slot| slot.copy_from_slice(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padding(fill: &[u8], most: usize, step: usize) -> Padding {
        Padding { fill: fill.to_vec(), most, step, fixed: false }
    }

    fn padded(how: &Padding, rows: &[&[u8]]) -> Result<(Vec<u8>, usize), Lack> {
        let pool = Pool::new(1 << 20);
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or_default();
        let (slab, bytes, length) = how.padded(rows.iter().copied(), rows.len(), longest, &pool)?;
        Ok((slab.bytes()[..bytes].to_vec(), length))
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
            padded(&Padding { fixed: true, ..padding(&[9], 4, 1) }, &[&[1]]).unwrap(),
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
        assert_eq!(padding(&[0; 4], 8, 1).torn([4, 6, 7].into_iter()), Some((6, 4)));
        assert_eq!(padding(&[0; 4], 8, 1).torn([4, 0, 8].into_iter()), None);
        let endless = Padding { fixed: true, ..padding(&[0; 8], 1 << 50, 1) };
        assert!(matches!(padded(&endless, &[&[0; 8]]), Err(Lack(bytes)) if bytes == 1 << 53));
        let endless = Padding { most: usize::MAX, ..endless };
        assert!(matches!(padded(&endless, &[&[], &[]]), Err(Lack(_))));
    }

    #[test]
    fn rows_take_the_shortest_length_at_least_and_the_longest_at_most() {
        let bytes =
            |most, step, fixed| Padding { fixed, ..padding(&[0; 4], most, step) }.bytes_of(3);
        assert_eq!(bytes(8, 1, false), (12, 96));
        assert_eq!(bytes(8, 3, false), (36, 96));
        assert_eq!(bytes(8, 8, false), (96, 96));
        assert_eq!(bytes(8, 9, false), (96, 96));
        assert_eq!(bytes(8, 1, true), (96, 96));
        assert_eq!(bytes(usize::MAX, 1, true), (usize::MAX, usize::MAX));
    }
}

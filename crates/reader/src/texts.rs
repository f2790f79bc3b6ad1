// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Strings, bytes and lists of any length, which are stored beside the memory of a batch.

use std::sync::Arc;

use arrow::array::{Array, BinaryViewArray, BinaryViewBuilder};
use arrow::buffer::Buffer;

use crate::padding::{Lack, Padding};
use crate::pool::{Pool, Slab, typed_mut};
use crate::values::Rows;

/// Bytes of one place of [`Gathered`].
const PLACE: usize = 8;

/// Bytes that values may keep in memory beyond twice their own, before they are copied.
const SLACK: usize = 64 << 10;

/// Values of a block, which lie where they were read.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) values: BinaryViewArray,
    /// Bytes that they keep in memory.
    pub(crate) held: u64,
}

impl Stored {
    /// Takes values over that keep `file` bytes of their file in memory, and what they were decoded
    /// to. If that is much more than the values have, they are copied.
    pub(crate) fn new(values: BinaryViewArray, file: usize) -> Self {
        let decoded = distinct(values.data_buffers());
        let own = values.lengths().map(|length| length as usize).fold(0, usize::saturating_add);
        let (values, held) = match file.max(decoded) {
            held if held > own.saturating_mul(2).saturating_add(SLACK) => (values.gc(), own),
            held => (values, held),
        };
        let places = values.len() * size_of::<u128>();
        Self { held: held.saturating_add(places) as u64, values }
    }
}

/// Bytes of buffers, each counted once.
fn distinct(buffers: &[Buffer]) -> usize {
    let mut seen: Vec<(usize, usize)> =
        buffers.iter().map(|buffer| (buffer.as_ptr().addr(), buffer.len())).collect();
    seen.sort_unstable();
    seen.dedup();
    seen.iter().map(|(_, length)| length).fold(0, |sum, length| sum.saturating_add(*length))
}

/// A column of a batch: values one after the other, or rows of one length.
#[derive(Debug)]
pub(crate) struct Gathered {
    ends: Slab,
    values: Slab,
    rows: usize,
    bytes: usize,
    /// Values of a row, if rows are padded.
    pub(crate) length: Option<usize>,
}

impl Gathered {
    /// Returns where each value begins, and the last one ends, as 64-bit integers; padded or not.
    pub(crate) fn ends(&self) -> &[u8] {
        self.ends.bytes().get(..(self.rows + 1) * PLACE).unwrap_or_default()
    }

    pub(crate) fn values(&self) -> &[u8] {
        self.values.bytes().get(..self.bytes).unwrap_or_default()
    }

    /// Bytes of both.
    pub(crate) fn size(&self) -> u64 {
        (self.ends().len() + self.values().len()) as u64
    }

    /// Both, to be written.
    pub(crate) fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let ends = self.ends.bytes_mut().get_mut(..(self.rows + 1) * PLACE).unwrap_or_default();
        (ends, self.values.bytes_mut().get_mut(..self.bytes).unwrap_or_default())
    }
}

/// A column of a batch that is being put together: which value of which array each row becomes.
#[derive(Debug)]
pub(crate) struct Texts {
    arrays: Vec<BinaryViewArray>,
    places: Vec<Option<(usize, usize)>>,
}

impl Texts {
    /// A column of so many rows, none of which is known.
    pub(crate) fn new(rows: usize) -> Self {
        Self { arrays: Vec::new(), places: vec![None; rows] }
    }

    /// Notes rows of an array.
    pub(crate) fn note(&mut self, array: &BinaryViewArray, rows: Rows<'_>) {
        for (row, at) in rows.pairs() {
            if let Some(place) = self.places.get_mut(at) {
                *place = Some((self.arrays.len(), row));
            }
        }
        self.arrays.push(array.clone());
    }

    /// Copies the known rows, and releases the arrays that they came from.
    pub(crate) fn settle(&mut self) {
        let mut known = BinaryViewBuilder::new();
        for place in self.places.iter().flatten() {
            known.append_value(value(&self.arrays, *place));
        }
        for (row, place) in self.places.iter_mut().flatten().enumerate() {
            *place = (0, row);
        }
        self.arrays = vec![known.finish()];
    }

    /// The column; rows that nobody has noted repeat the one before.
    ///
    /// # Errors
    /// Memory for padded rows that cannot be had.
    pub(crate) fn finish(
        mut self,
        padding: Option<&Padding>,
        pool: &Arc<Pool>,
    ) -> Result<Gathered, Lack> {
        let mut last = None;
        for place in &mut self.places {
            *place = place.or(last);
            last = *place;
        }
        let rows = self.places.len();
        let values = || {
            self.places
                .iter()
                .map(|place| place.map_or(&[][..], |place| value(&self.arrays, place)))
        };
        let mut ends = pool.take((rows + 1) * PLACE);
        let (mut end, mut longest) = (0_usize, 0);
        let slots = typed_mut::<i64>(ends.bytes_mut());
        for (slot, length) in
            slots.iter_mut().zip(std::iter::once(0).chain(values().map(<[u8]>::len)))
        {
            (end, longest) = (end + length, longest.max(length));
            *slot = i64::try_from(end).unwrap_or(i64::MAX);
        }
        if let Some(padding) = padding {
            let (values, bytes, length) = padding.padded(values(), rows, longest, pool)?;
            return Ok(Gathered { ends, values, rows, bytes, length: Some(length) });
        }
        let mut whole = pool.take(end);
        let (out, mut at) = (whole.bytes_mut(), 0);
        for value in values() {
            if let Some(slot) = out.get_mut(at..at + value.len()) {
                slot.copy_from_slice(value);
            }
            at += value.len();
        }
        Ok(Gathered { ends, values: whole, rows, bytes: end, length: None })
    }
}

fn value(arrays: &[BinaryViewArray], (array, row): (usize, usize)) -> &[u8] {
    arrays.get(array).filter(|array| row < array.len()).map_or(&[][..], |array| array.value(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Rows<'_> = Rows { order: None, first: 0, count: 2, stride: 1, at: 0, skip: 1 };

    #[test]
    fn texts_come_in_the_order_of_the_batch_whenever_they_are_noted() {
        let some = BinaryViewArray::from_iter_values(["a", "bb", "", "one that is long"]);
        let others = BinaryViewArray::from_iter_values(["x", "yyy"]);
        let pool = Pool::new(1 << 20);
        for settled in [false, true] {
            let mut texts = Texts::new(7);
            texts.note(&others, Rows { order: Some(&[1, 0]), at: 1, skip: 2, ..PLAIN });
            if settled {
                texts.settle();
            }
            texts.note(&some, Rows { stride: 2, skip: 2, ..PLAIN });
            texts.note(&some, Rows { first: 1, count: 1, at: 4, ..PLAIN });
            texts.note(&some, Rows { first: 3, count: 1, at: 5, ..PLAIN });
            let column = texts.finish(None, &pool).unwrap();
            assert_eq!(column.values(), b"ayyyxbbone that is longone that is long");
            let ends: Vec<i64> = column
                .ends()
                .chunks_exact(8)
                .map(|end| i64::from_le_bytes(end.try_into().unwrap()))
                .collect();
            assert_eq!(ends, [0, 1, 4, 4, 5, 7, 23, 39]);
        }
        let none = Texts::new(0).finish(None, &pool).unwrap();
        assert_eq!((none.ends(), none.values()), (&[0; 8][..], &[][..]));
    }

    #[test]
    fn values_that_are_a_small_part_of_what_they_keep_in_memory_are_copied() {
        let all = BinaryViewArray::from_iter_values((0..1000).map(|_| [7_u8; 1000]));
        let bytes = distinct(all.data_buffers());
        let whole = Stored::new(all.clone(), 0);
        assert_eq!(whole.held, bytes as u64 + 16_000);
        assert_eq!(whole.values.value(3).as_ptr(), all.value(3).as_ptr());
        let few = Stored::new(all.slice(3, 2), 0);
        assert_eq!(few.held, 2032);
        assert_eq!(few.values.value(1), [7; 1000]);
        assert_ne!(few.values.value(0).as_ptr(), all.value(3).as_ptr());
        assert_eq!(Stored::new(all, 4 << 20).held, 1_016_000, "of a file that has much more");
    }
}

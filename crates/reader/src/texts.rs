// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Strings and bytes of any length, which are stored beside the memory of a batch.

use arrow::array::{Array, LargeBinaryArray, LargeBinaryBuilder};

use crate::values::Rows;

/// A column of a batch that is being put together: which value of which array each row becomes.
#[derive(Debug)]
pub(crate) struct Texts {
    arrays: Vec<LargeBinaryArray>,
    places: Vec<Option<(usize, usize)>>,
}

impl Texts {
    /// A column of so many rows, none of which is known.
    pub(crate) fn new(rows: usize) -> Self {
        Self { arrays: Vec::new(), places: vec![None; rows] }
    }

    /// Notes rows of an array.
    pub(crate) fn note(&mut self, array: &LargeBinaryArray, rows: Rows<'_>) {
        for (row, at) in rows.pairs() {
            if let Some(place) = self.places.get_mut(at) {
                *place = Some((self.arrays.len(), row));
            }
        }
        self.arrays.push(array.clone());
    }

    /// Copies the known rows, and releases the arrays that they came from.
    pub(crate) fn settle(&mut self) {
        let known = gather(&self.arrays, self.places.iter().flatten());
        for (row, place) in self.places.iter_mut().flatten().enumerate() {
            *place = (0, row);
        }
        self.arrays = vec![known];
    }

    /// The column; rows without an entry repeat the one before.
    pub(crate) fn finish(mut self) -> LargeBinaryArray {
        let mut last = None;
        for place in &mut self.places {
            *place = place.or(last);
            last = *place;
        }
        gather(&self.arrays, self.places.iter().flatten())
    }
}

fn gather<'a>(
    arrays: &[LargeBinaryArray],
    places: impl Iterator<Item = &'a (usize, usize)> + Clone,
) -> LargeBinaryArray {
    let value = |(array, row): &(usize, usize)| {
        arrays.get(*array).filter(|array| *row < array.len()).map_or(&[][..], |array| array.value(*row))
    };
    let bytes = places.clone().map(|place| value(place).len()).sum();
    let mut builder = LargeBinaryBuilder::with_capacity(places.clone().count(), bytes);
    places.for_each(|place| builder.append_value(value(place)));
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Rows<'_> = Rows { order: None, first: 0, count: 2, stride: 1, at: 0, skip: 1 };

    #[test]
    fn texts_come_in_the_order_of_the_batch_whenever_they_are_noted() {
        let some = LargeBinaryArray::from_iter_values(["a", "bb", ""]);
        let others = LargeBinaryArray::from_iter_values(["x", "yyy"]);
        for settled in [false, true] {
            let mut texts = Texts::new(6);
            texts.note(&others, Rows { order: Some(&[1, 0]), at: 1, skip: 2, ..PLAIN });
            if settled {
                texts.settle();
            }
            texts.note(&some, Rows { stride: 2, skip: 2, ..PLAIN });
            texts.note(&some, Rows { first: 1, count: 1, at: 4, ..PLAIN });
            let column = texts.finish();
            let told: Vec<&[u8]> = column.iter().flatten().collect();
            assert_eq!(told, [&b"a"[..], b"yyy", b"", b"x", b"bb", b"bb"]);
        }
        assert_eq!(Texts::new(0).finish().len(), 0);
    }
}

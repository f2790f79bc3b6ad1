// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Moving and converting values.

use farandole_dataset::Element;

use crate::pool::{Value, typed, typed_mut};

/// Returns whether [`gather`] can turn `from` into `to`.
pub(crate) fn castable(from: Element, to: Element) -> bool {
    from == to
        || (from.width().is_some()
            && matches!(to, Element::Float32 | Element::Float64 | Element::Int64))
}

/// Rows to take: of a block, in an order or as they lie; and which rows they become.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) order: Option<&'a [u32]>,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) stride: usize,
    /// Position of the first value, and the distance to the next one.
    pub(crate) at: usize,
    pub(crate) skip: usize,
}

impl<'a> Rows<'a> {
    /// All rows of an order, one after the other.
    fn all(order: &'a [u32]) -> Self {
        Self { order: Some(order), first: 0, count: order.len(), stride: 1, at: 0, skip: 1 }
    }

    fn contiguous(&self) -> bool {
        self.order.is_none() && self.stride == 1
    }

    /// Returns whether these rows go right behind those of `other`, wherever they go.
    fn beside(&self, other: &Self) -> bool {
        self.at == other.at + 1 && (self.count, self.skip) == (other.count, other.skip)
    }

    /// Returns the slots of rows of `width` elements, `span` neighbouring rows at a time.
    fn slots<'b, T>(
        &self,
        width: usize,
        span: usize,
        out: &'b mut [T],
    ) -> impl Iterator<Item = &'b mut [T]> {
        let out = out.get_mut(self.at * width..).unwrap_or_default();
        let slots = out.chunks_mut((self.skip * width).max(1)).take(self.count);
        slots.filter_map(move |slot| slot.get_mut(..span * width))
    }

    /// Rows of the block, and which ones they become.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        self.indices().zip((self.at..).step_by(self.skip.max(1)))
    }

    fn indices(&self) -> Indices<'a> {
        Indices { order: self.order, at: self.first, left: self.count, stride: self.stride }
    }
}

struct Indices<'a> {
    order: Option<&'a [u32]>,
    at: usize,
    left: usize,
    stride: usize,
}

impl Iterator for Indices<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let at = self.at;
        self.at += self.stride;
        self.order.map_or(Some(at), |order| order.get(at).map(|row| *row as usize))
    }
}

/// A column to copy from: rows of `elements` values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) element: Element,
    pub(crate) elements: usize,
}

/// Copies rows of several sources of one kind to `out`, as elements `to`.
pub(crate) fn weave(strands: &[(Source<'_>, Rows<'_>)], out: &mut [u8], to: Element) {
    let plain = |(source, rows): &(Source<'_>, Rows<'_>)| {
        source.element == to && source.elements == 1 && rows.contiguous() && rows.skip >= BAND
    };
    let mut rest = strands;
    while let Some((strand, after)) = rest.split_first() {
        if let Some((band, after)) = rest.split_first_chunk::<BAND>()
            && band.iter().all(plain)
            && band.windows(2).all(|pair| pair[1].1.beside(&pair[0].1))
            && match to.width().unwrap_or(1) {
                1 => twist::<u8>(band, out),
                2 => twist::<u16>(band, typed_mut(out)),
                4 => twist::<u32>(band, typed_mut(out)),
                _ => twist::<u64>(band, typed_mut(out)),
            }
        {
            rest = after;
            continue;
        }
        gather(strand.0, strand.1, out, to);
        rest = after;
    }
}

/// Strands that are woven at once: as many values are written together.
const BAND: usize = 4;

/// Writes one value of each strand after the other; whether all of them could be had.
fn twist<T: Value>(band: &[(Source<'_>, Rows<'_>); BAND], out: &mut [T]) -> bool {
    let [a, b, c, d] = band.map(|(source, rows)| {
        typed::<T>(source.data).get(rows.first..rows.first + rows.count).unwrap_or_default()
    });
    let rows = band[0].1;
    if [a, b, c, d].iter().any(|values| values.len() != rows.count) {
        return false;
    }
    let values = a.iter().zip(b).zip(c.iter().zip(d));
    for (slot, ((a, b), (c, d))) in rows.slots(1, BAND, out).zip(values) {
        slot.copy_from_slice(&[*a, *b, *c, *d]);
    }
    true
}

/// Copies `rows` of `source` to where they go in `out`, as elements `to`.
fn gather(source: Source<'_>, rows: Rows<'_>, out: &mut [u8], to: Element) {
    let elements = source.elements;
    if source.element == to {
        let width = to.width().unwrap_or(1);
        if elements > 1 || (rows.contiguous() && rows.skip == 1) {
            return copy_rows(source.data, elements * width, rows, out);
        }
        return match width {
            1 => copy_values(source.data, rows, out),
            2 => copy_values::<u16>(typed(source.data), rows, typed_mut(out)),
            4 => copy_values::<u32>(typed(source.data), rows, typed_mut(out)),
            _ => copy_values::<u64>(typed(source.data), rows, typed_mut(out)),
        };
    }
    match to {
        Element::Float32 => cast_from::<f32>(source, rows, typed_mut(out)),
        Element::Float64 => cast_from::<f64>(source, rows, typed_mut(out)),
        _ => cast_from::<i64>(source, rows, typed_mut(out)),
    }
}

/// Writes a whole column in another order to `out`, as elements `to`.
pub(crate) fn shuffle(source: Source<'_>, order: &[u32], out: &mut [u8], to: Element) {
    if source.element == to && source.elements == 1 {
        match to.width().unwrap_or(1) {
            1 => pick(source.data, order, out),
            2 => pick::<u16>(typed(source.data), order, typed_mut(out)),
            4 => pick::<u32>(typed(source.data), order, typed_mut(out)),
            _ => pick::<u64>(typed(source.data), order, typed_mut(out)),
        }
    } else {
        gather(source, Rows::all(order), out, to);
    }
}

fn pick<T: Copy>(source: &[T], order: &[u32], out: &mut [T]) {
    for (slot, row) in out.iter_mut().zip(order) {
        if let Some(value) = source.get(*row as usize) {
            *slot = *value;
        }
    }
}

fn copy_values<T: Copy>(source: &[T], rows: Rows<'_>, out: &mut [T]) {
    for (slot, row) in rows.slots(1, 1, out).zip(rows.indices()) {
        if let (Some(value), [slot]) = (source.get(row), slot) {
            *slot = *value;
        }
    }
}

fn copy_rows(source: &[u8], width: usize, rows: Rows<'_>, out: &mut [u8]) {
    if rows.contiguous() && rows.skip == 1 {
        let slots = out.get_mut(rows.at * width..(rows.at + rows.count) * width);
        let part = source.get(rows.first * width..(rows.first + rows.count) * width);
        if let (Some(slots), Some(part)) = (slots, part) {
            slots.copy_from_slice(part);
        }
        return;
    }
    for (slot, row) in rows.slots(width, 1, out).zip(rows.indices()) {
        if let Some(values) = source.get(row * width..(row + 1) * width) {
            slot.copy_from_slice(values);
        }
    }
}

/// Conversion as `as` does it: floats to the nearest, integers from floats towards zero and within
/// their range.
trait To<T> {
    fn to(self) -> T;
}

macro_rules! conversions {
    ($($from:ty => $($to:ty),+;)+) => {
        $($(impl To<$to> for $from {
            #[inline]
            #[expect(clippy::cast_possible_truncation, reason = "conversions are asked for")]
            fn to(self) -> $to {
                self as $to
            }
        })+)+
    };
}

conversions! {
    f64 => f32, i64;
    f32 => i64;
}

macro_rules! widening {
    ($($from:ty),+) => {
        $(
            impl To<f32> for $from {
                #[inline]
                fn to(self) -> f32 { self as f32 }
            }
            impl To<f64> for $from {
                #[inline]
                fn to(self) -> f64 { self as f64 }
            }
        )+
    };
}

widening!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! integers {
    ($($from:ty),+) => {
        $(impl To<i64> for $from {
            #[inline]
            fn to(self) -> i64 { i64::from(self) }
        })+
    };
}

integers!(i8, i16, i32, u8, u16, u32);

impl To<i64> for u64 {
    #[inline]
    fn to(self) -> i64 {
        self.cast_signed()
    }
}

impl To<f64> for f32 {
    #[inline]
    fn to(self) -> f64 {
        f64::from(self)
    }
}

/// Same type: only reached through the table below.
macro_rules! identity {
    ($($kind:ty),+) => {
        $(impl To<$kind> for $kind {
            #[inline]
            fn to(self) -> $kind { self }
        })+
    };
}

identity!(f32, f64, i64);

fn cast_from<T>(source: Source<'_>, rows: Rows<'_>, out: &mut [T])
where
    i8: To<T>,
    i16: To<T>,
    i32: To<T>,
    i64: To<T>,
    u8: To<T>,
    u16: To<T>,
    u32: To<T>,
    u64: To<T>,
    f32: To<T>,
    f64: To<T>,
{
    match source.element {
        Element::Int8 => cast_rows::<i8, T>(source, rows, out),
        Element::Int16 => cast_rows::<i16, T>(source, rows, out),
        Element::Int32 => cast_rows::<i32, T>(source, rows, out),
        Element::Int64 => cast_rows::<i64, T>(source, rows, out),
        Element::Bool | Element::UInt8 => cast_rows::<u8, T>(source, rows, out),
        Element::UInt16 => cast_rows::<u16, T>(source, rows, out),
        Element::UInt32 => cast_rows::<u32, T>(source, rows, out),
        Element::UInt64 => cast_rows::<u64, T>(source, rows, out),
        Element::Float32 => cast_rows::<f32, T>(source, rows, out),
        Element::Float64 => cast_rows::<f64, T>(source, rows, out),
        Element::Utf8 | Element::Binary => {}
    }
}

fn cast_rows<S: Value + To<T>, T>(source: Source<'_>, rows: Rows<'_>, out: &mut [T]) {
    let values: &[S] = typed(source.data);
    let elements = source.elements;
    for (slots, row) in rows.slots(elements, 1, out).zip(rows.indices()) {
        if let Some(row) = values.get(row * elements..(row + 1) * elements) {
            for (slot, value) in slots.iter_mut().zip(row) {
                *slot = (*value).to();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    const ALL: Rows<'_> = Rows { order: None, first: 0, count: 4, stride: 1, at: 0, skip: 1 };

    fn run<T: Value>(source: Source<'_>, rows: Rows<'_>, to: Element) -> Vec<T> {
        let mut out = vec![T::default(); rows.count * source.elements];
        gather(source, rows, out.as_mut_bytes(), to);
        out
    }

    #[test]
    fn rows_are_taken_by_order_and_stride() {
        let data = [10_i32, 11, 12, 13];
        let source = Source { data: data.as_bytes(), element: Element::Int32, elements: 1 };
        assert_eq!(run::<i32>(source, ALL, Element::Int32), data);
        let rows = Rows { order: Some(&[3, 1, 2, 0]), first: 1, count: 2, stride: 2, ..ALL };
        assert_eq!(run::<i32>(source, rows, Element::Int32), [11, 10]);
        let pairs = Source { elements: 2, ..source };
        let rows = Rows::all(&[1, 0]);
        assert_eq!(run::<i32>(pairs, rows, Element::Int32), [12, 13, 10, 11]);
    }

    #[test]
    fn strands_are_woven_however_they_lie() {
        let data: Vec<i32> = (0..40).collect();
        let source = Source { data: data.as_bytes(), element: Element::Int32, elements: 1 };
        let order = [7, 6, 5, 4, 3, 2, 1, 0];
        // Seven strands of three rows: a band, one that is ordered, one of a single row too many,
        // one by stride.
        let strand = |at: usize| Rows { first: 5 * at, count: 3, at, skip: 7, ..ALL };
        let mut rows: Vec<Rows<'_>> = (0..7).map(strand).collect();
        rows[4] = Rows { order: Some(&order), first: 0, ..rows[4] };
        rows[0].count = 4;
        rows[6] = Rows { first: 10, stride: 2, ..rows[6] };
        let strands: Vec<_> = rows.iter().map(|rows| (source, *rows)).collect();
        let expected = |row: usize| match row % 7 {
            4 => order[row / 7].cast_signed(),
            6 => data[10 + row / 7 * 2],
            at => data[5 * at + row / 7],
        };
        let expected: Vec<i32> = (0..22).map(expected).collect();
        let mut out = [-1_i32; 22];
        weave(&strands, out.as_mut_bytes(), Element::Int32);
        assert_eq!(out[..], expected);
        let mut floats = [-1.0_f32; 22];
        weave(&strands, floats.as_mut_bytes(), Element::Float32);
        let near =
            |(float, whole): (&f32, &i32)| (f64::from(*float) - f64::from(*whole)).abs() < 0.5;
        assert!(floats.iter().zip(&expected).all(near), "{floats:?}");
        // All alike: bands of four and a rest.
        let strands: Vec<_> = (0..7).map(|at| (source, strand(at))).collect();
        weave(&strands, out.as_mut_bytes(), Element::Int32);
        let alike: Vec<i32> = (0..21).map(|row| data[5 * (row % 7) + row / 7]).collect();
        assert_eq!(out[..21], alike);
    }

    #[test]
    fn whole_columns_are_shuffled_and_converted() {
        let data = [10_i32, 11, 12, 13];
        let source = Source { data: data.as_bytes(), element: Element::Int32, elements: 1 };
        let (order, mut out) = ([2, 0, 3, 1], [0_i32; 4]);
        shuffle(source, &order, out.as_mut_bytes(), Element::Int32);
        assert_eq!(out, [12, 10, 13, 11]);
        let mut floats = [0.0_f32; 4];
        shuffle(source, &order, floats.as_mut_bytes(), Element::Float32);
        assert_eq!(floats, [12.0, 10.0, 13.0, 11.0]);
        shuffle(Source { elements: 2, ..source }, &[1, 0], out.as_mut_bytes(), Element::Int32);
        assert_eq!(out, [12, 13, 10, 11]);
    }

    #[test]
    fn values_are_converted_on_the_way() {
        let data = [1.5_f64, -2.5, 1e10, f64::NAN];
        let source = Source { data: data.as_bytes(), element: Element::Float64, elements: 1 };
        assert_eq!(run::<f32>(source, ALL, Element::Float32)[..3], [1.5, -2.5, 1e10]);
        assert_eq!(run::<i64>(source, ALL, Element::Int64), [1, -2, 10_000_000_000, 0]);
        let source = Source { data: &[0, 1, 1, 0], element: Element::Bool, elements: 2 };
        let rows = Rows { first: 1, count: 1, ..ALL };
        assert_eq!(run::<f32>(source, rows, Element::Float32), [1.0, 0.0]);
        assert!(
            !castable(Element::Float64, Element::Int8) && castable(Element::Int8, Element::Int8)
        );
    }
}

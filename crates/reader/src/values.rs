// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies and converts values.

use farandole_dataset::ElementType;

use crate::pool::{PlainValue, as_values, as_values_mut};

/// Returns whether [`copy_selection`] can convert `from` to `to`.
pub(crate) fn is_castable(from: ElementType, to: ElementType) -> bool {
    from == to
        || (from.byte_width().is_some()
            && matches!(to, ElementType::Float32 | ElementType::Float64 | ElementType::Int64))
}

/// Returns the position of the first value of `data` that `to` cannot represent, and the value.
/// Integers are rounded to the nearest float, doubles to the nearest single, and the fractions of
/// floats are cut; all of that is asked for. Whatever leaves the range of `to` is not.
pub(crate) fn find_value_out_of_range(
    data: &[u8],
    from: ElementType,
    to: ElementType,
) -> Option<(usize, String)> {
    fn find<T: PlainValue + ToString>(
        data: &[u8],
        fits: impl Fn(T) -> bool,
    ) -> Option<(usize, String)> {
        // No early exit within a piece, so that the compiler can vectorize the loop.
        let odd = |piece: &[T]| piece.iter().fold(false, |any, value| any | !fits(*value));
        let values = as_values::<T>(data);
        let piece = values.chunks(1024).position(odd)?;
        let mut places = values.iter().enumerate().skip(piece * 1024);
        places.find(|(_, value)| !fits(**value)).map(|(at, value)| (at, value.to_string()))
    }
    const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
    #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
    match (from, to) {
        (ElementType::Float64, ElementType::Float32) => {
            find(data, |value: f64| !value.is_finite() || (value as f32).is_finite())
        }
        (ElementType::Float64, ElementType::Int64) => {
            find(data, |value: f64| (-TWO_TO_63..TWO_TO_63).contains(&value))
        }
        (ElementType::Float32, ElementType::Int64) => {
            find(data, |value: f32| (-TWO_TO_63..TWO_TO_63).contains(&f64::from(value)))
        }
        (ElementType::UInt64, ElementType::Int64) => find(data, |value: u64| value >> 63 == 0),
        _ => None,
    }
}

/// Rows to copy from a block, in a given order or in block order, and their positions in the
/// output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCopyPlan<'a> {
    pub(crate) order: Option<&'a [u32]>,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) stride: usize,
    /// Position of the first row in the output, and the distance to the next one.
    pub(crate) output_start: usize,
    pub(crate) output_stride: usize,
}

impl<'a> RowCopyPlan<'a> {
    /// Selects all rows of an order, one after the other.
    fn all_in_order(order: &'a [u32]) -> Self {
        Self {
            order: Some(order),
            first: 0,
            count: order.len(),
            stride: 1,
            output_start: 0,
            output_stride: 1,
        }
    }

    fn is_contiguous(&self) -> bool {
        self.order.is_none() && self.stride == 1
    }

    /// Returns whether each of these rows is written directly after a row of `other`.
    fn is_written_right_after(&self, other: &Self) -> bool {
        self.output_start == other.output_start + 1
            && (self.count, self.output_stride) == (other.count, other.output_stride)
    }

    /// Returns the slots in `out` for rows of `width` elements, `span` neighbouring rows at a time.
    fn output_slots<'b, T>(
        &self,
        width: usize,
        span: usize,
        out: &'b mut [T],
    ) -> impl Iterator<Item = &'b mut [T]> {
        let out = out.get_mut(self.output_start * width..).unwrap_or_default();
        let slots = out.chunks_mut((self.output_stride * width).max(1)).take(self.count);
        slots.filter_map(move |slot| slot.get_mut(..span * width))
    }

    /// Returns pairs of a row of the block and its position in the output.
    pub(crate) fn row_pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        self.source_rows().zip((self.output_start..).step_by(self.output_stride.max(1)))
    }

    fn source_rows(&self) -> SourceRows<'a> {
        SourceRows { order: self.order, at: self.first, left: self.count, stride: self.stride }
    }
}

struct SourceRows<'a> {
    order: Option<&'a [u32]>,
    at: usize,
    left: usize,
    stride: usize,
}

impl Iterator for SourceRows<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let at = self.at;
        self.at += self.stride;
        self.order.map_or(Some(at), |order| order.get(at).map(|row| *row as usize))
    }
}

/// A column to copy from, with `elements` values in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnSource<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) element: ElementType,
    pub(crate) elements: usize,
}

/// Copies rows of several sources to `out`, as elements `to`.
pub(crate) fn copy_interleaved(
    strands: &[(ColumnSource<'_>, RowCopyPlan<'_>)],
    out: &mut [u8],
    to: ElementType,
) {
    let plain = |(source, rows): &(ColumnSource<'_>, RowCopyPlan<'_>)| {
        source.element == to
            && source.elements == 1
            && rows.is_contiguous()
            && rows.output_stride >= INTERLEAVE_WIDTH
    };
    let mut rest = strands;
    while let Some((strand, after)) = rest.split_first() {
        if let Some((band, after)) = rest.split_first_chunk::<INTERLEAVE_WIDTH>()
            && band.iter().all(plain)
            && band.windows(2).all(|pair| pair[1].1.is_written_right_after(&pair[0].1))
            && match to.byte_width().unwrap_or(1) {
                1 => interleave_values::<u8>(band, out),
                2 => interleave_values::<u16>(band, as_values_mut(out)),
                4 => interleave_values::<u32>(band, as_values_mut(out)),
                _ => interleave_values::<u64>(band, as_values_mut(out)),
            }
        {
            rest = after;
            continue;
        }
        copy_selection(strand.0, strand.1, out, to);
        rest = after;
    }
}

/// Number of sources that are interleaved at a time; so many values are written together.
const INTERLEAVE_WIDTH: usize = 4;

/// Writes one value of each source in turn; returns whether all sources have enough values.
fn interleave_values<T: PlainValue>(
    band: &[(ColumnSource<'_>, RowCopyPlan<'_>); INTERLEAVE_WIDTH],
    out: &mut [T],
) -> bool {
    let [a, b, c, d] = band.map(|(source, rows)| {
        as_values::<T>(source.data).get(rows.first..rows.first + rows.count).unwrap_or_default()
    });
    let rows = band[0].1;
    if [a, b, c, d].iter().any(|values| values.len() != rows.count) {
        return false;
    }
    let values = a.iter().zip(b).zip(c.iter().zip(d));
    for (slot, ((a, b), (c, d))) in rows.output_slots(1, INTERLEAVE_WIDTH, out).zip(values) {
        slot.copy_from_slice(&[*a, *b, *c, *d]);
    }
    true
}

/// Copies `rows` of `source` to their positions in `out`, as elements `to`.
fn copy_selection(
    source: ColumnSource<'_>,
    rows: RowCopyPlan<'_>,
    out: &mut [u8],
    to: ElementType,
) {
    let elements = source.elements;
    if source.element == to {
        let width = to.byte_width().unwrap_or(1);
        if elements > 1 || (rows.is_contiguous() && rows.output_stride == 1) {
            return copy_rows(source.data, elements * width, rows, out);
        }
        return match width {
            1 => copy_values(source.data, rows, out),
            2 => copy_values::<u16>(as_values(source.data), rows, as_values_mut(out)),
            4 => copy_values::<u32>(as_values(source.data), rows, as_values_mut(out)),
            _ => copy_values::<u64>(as_values(source.data), rows, as_values_mut(out)),
        };
    }
    match to {
        ElementType::Float32 => cast_column::<f32>(source, rows, as_values_mut(out)),
        ElementType::Float64 => cast_column::<f64>(source, rows, as_values_mut(out)),
        _ => cast_column::<i64>(source, rows, as_values_mut(out)),
    }
}

/// Writes a whole column in another order to `out`, as elements `to`.
pub(crate) fn shuffle_column(
    source: ColumnSource<'_>,
    order: &[u32],
    out: &mut [u8],
    to: ElementType,
) {
    if source.element == to && source.elements == 1 {
        match to.byte_width().unwrap_or(1) {
            1 => copy_in_order(source.data, order, out),
            2 => copy_in_order::<u16>(as_values(source.data), order, as_values_mut(out)),
            4 => copy_in_order::<u32>(as_values(source.data), order, as_values_mut(out)),
            _ => copy_in_order::<u64>(as_values(source.data), order, as_values_mut(out)),
        }
    } else {
        copy_selection(source, RowCopyPlan::all_in_order(order), out, to);
    }
}

fn copy_in_order<T: Copy>(source: &[T], order: &[u32], out: &mut [T]) {
    for (slot, row) in out.iter_mut().zip(order) {
        if let Some(value) = source.get(*row as usize) {
            *slot = *value;
        }
    }
}

fn copy_values<T: Copy>(source: &[T], rows: RowCopyPlan<'_>, out: &mut [T]) {
    for (slot, row) in rows.output_slots(1, 1, out).zip(rows.source_rows()) {
        if let (Some(value), [slot]) = (source.get(row), slot) {
            *slot = *value;
        }
    }
}

fn copy_rows(source: &[u8], width: usize, rows: RowCopyPlan<'_>, out: &mut [u8]) {
    if rows.is_contiguous() && rows.output_stride == 1 {
        let slots =
            out.get_mut(rows.output_start * width..(rows.output_start + rows.count) * width);
        let part = source.get(rows.first * width..(rows.first + rows.count) * width);
        if let (Some(slots), Some(part)) = (slots, part) {
            slots.copy_from_slice(part);
        }
        return;
    }
    for (slot, row) in rows.output_slots(width, 1, out).zip(rows.source_rows()) {
        if let Some(values) = source.get(row * width..(row + 1) * width) {
            slot.copy_from_slice(values);
        }
    }
}

/// Conversion with the semantics of `as`: numbers are rounded to the nearest float, and floats
/// become integers by truncation. [`find_value_out_of_range`] has refused values beyond the range.
trait CastTo<T> {
    fn cast_to(self) -> T;
}

macro_rules! conversions {
    ($($from:ty => $($to:ty),+;)+) => {
        $($(impl CastTo<$to> for $from {
            #[inline]
            #[expect(clippy::cast_possible_truncation, reason = "conversions are asked for")]
            fn cast_to(self) -> $to {
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
            impl CastTo<f32> for $from {
                #[inline]
                fn cast_to(self) -> f32 { self as f32 }
            }
            impl CastTo<f64> for $from {
                #[inline]
                fn cast_to(self) -> f64 { self as f64 }
            }
        )+
    };
}

widening!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! integers {
    ($($from:ty),+) => {
        $(impl CastTo<i64> for $from {
            #[inline]
            fn cast_to(self) -> i64 { i64::from(self) }
        })+
    };
}

integers!(i8, i16, i32, u8, u16, u32);

impl CastTo<i64> for u64 {
    #[inline]
    fn cast_to(self) -> i64 {
        self.cast_signed()
    }
}

impl CastTo<f64> for f32 {
    #[inline]
    fn cast_to(self) -> f64 {
        f64::from(self)
    }
}

/// Conversion to the same type; only the generic code below needs it.
macro_rules! identity {
    ($($kind:ty),+) => {
        $(impl CastTo<$kind> for $kind {
            #[inline]
            fn cast_to(self) -> $kind { self }
        })+
    };
}

identity!(f32, f64, i64);

fn cast_column<T>(source: ColumnSource<'_>, rows: RowCopyPlan<'_>, out: &mut [T])
where
    i8: CastTo<T>,
    i16: CastTo<T>,
    i32: CastTo<T>,
    i64: CastTo<T>,
    u8: CastTo<T>,
    u16: CastTo<T>,
    u32: CastTo<T>,
    u64: CastTo<T>,
    f32: CastTo<T>,
    f64: CastTo<T>,
{
    match source.element {
        ElementType::Int8 => cast_rows::<i8, T>(source, rows, out),
        ElementType::Int16 => cast_rows::<i16, T>(source, rows, out),
        ElementType::Int32 => cast_rows::<i32, T>(source, rows, out),
        ElementType::Int64 => cast_rows::<i64, T>(source, rows, out),
        ElementType::Bool | ElementType::UInt8 => cast_rows::<u8, T>(source, rows, out),
        ElementType::UInt16 => cast_rows::<u16, T>(source, rows, out),
        ElementType::UInt32 => cast_rows::<u32, T>(source, rows, out),
        ElementType::UInt64 => cast_rows::<u64, T>(source, rows, out),
        ElementType::Float32 => cast_rows::<f32, T>(source, rows, out),
        ElementType::Float64 => cast_rows::<f64, T>(source, rows, out),
        ElementType::Utf8 | ElementType::Binary => {}
    }
}

fn cast_rows<S: PlainValue + CastTo<T>, T>(
    source: ColumnSource<'_>,
    rows: RowCopyPlan<'_>,
    out: &mut [T],
) {
    let values: &[S] = as_values(source.data);
    let elements = source.elements;
    for (slots, row) in rows.output_slots(elements, 1, out).zip(rows.source_rows()) {
        if let Some(row) = values.get(row * elements..(row + 1) * elements) {
            for (slot, value) in slots.iter_mut().zip(row) {
                *slot = (*value).cast_to();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    const ALL: RowCopyPlan<'_> = RowCopyPlan {
        order: None,
        first: 0,
        count: 4,
        stride: 1,
        output_start: 0,
        output_stride: 1,
    };

    fn run<T: PlainValue>(
        source: ColumnSource<'_>,
        rows: RowCopyPlan<'_>,
        to: ElementType,
    ) -> Vec<T> {
        let mut out = vec![T::default(); rows.count * source.elements];
        copy_selection(source, rows, out.as_mut_bytes(), to);
        out
    }

    #[test]
    fn rows_are_taken_by_order_and_stride() {
        let data = [10_i32, 11, 12, 13];
        let source =
            ColumnSource { data: data.as_bytes(), element: ElementType::Int32, elements: 1 };
        assert_eq!(run::<i32>(source, ALL, ElementType::Int32), data);
        let rows = RowCopyPlan { order: Some(&[3, 1, 2, 0]), first: 1, count: 2, stride: 2, ..ALL };
        assert_eq!(run::<i32>(source, rows, ElementType::Int32), [11, 10]);
        let pairs = ColumnSource { elements: 2, ..source };
        let rows = RowCopyPlan::all_in_order(&[1, 0]);
        assert_eq!(run::<i32>(pairs, rows, ElementType::Int32), [12, 13, 10, 11]);
    }

    #[test]
    fn strands_are_woven_however_they_lie() {
        let data: Vec<i32> = (0..40).collect();
        let source =
            ColumnSource { data: data.as_bytes(), element: ElementType::Int32, elements: 1 };
        let order = [7, 6, 5, 4, 3, 2, 1, 0];
        // Seven strands of three rows: a band, one that is ordered, one of a single row too many,
        // one by stride.
        let strand = |at: usize| RowCopyPlan {
            first: 5 * at,
            count: 3,
            output_start: at,
            output_stride: 7,
            ..ALL
        };
        let mut rows: Vec<RowCopyPlan<'_>> = (0..7).map(strand).collect();
        rows[4] = RowCopyPlan { order: Some(&order), first: 0, ..rows[4] };
        rows[0].count = 4;
        rows[6] = RowCopyPlan { first: 10, stride: 2, ..rows[6] };
        let strands: Vec<_> = rows.iter().map(|rows| (source, *rows)).collect();
        let expected = |row: usize| match row % 7 {
            4 => order[row / 7].cast_signed(),
            6 => data[10 + row / 7 * 2],
            at => data[5 * at + row / 7],
        };
        let expected: Vec<i32> = (0..22).map(expected).collect();
        let mut out = [-1_i32; 22];
        copy_interleaved(&strands, out.as_mut_bytes(), ElementType::Int32);
        assert_eq!(out[..], expected);
        let mut floats = [-1.0_f32; 22];
        copy_interleaved(&strands, floats.as_mut_bytes(), ElementType::Float32);
        let near =
            |(float, whole): (&f32, &i32)| (f64::from(*float) - f64::from(*whole)).abs() < 0.5;
        assert!(floats.iter().zip(&expected).all(near), "{floats:?}");
        // All alike: bands of four and a rest.
        let strands: Vec<_> = (0..7).map(|at| (source, strand(at))).collect();
        copy_interleaved(&strands, out.as_mut_bytes(), ElementType::Int32);
        let alike: Vec<i32> = (0..21).map(|row| data[5 * (row % 7) + row / 7]).collect();
        assert_eq!(out[..21], alike);
    }

    #[test]
    fn whole_columns_are_shuffled_and_converted() {
        let data = [10_i32, 11, 12, 13];
        let source =
            ColumnSource { data: data.as_bytes(), element: ElementType::Int32, elements: 1 };
        let (order, mut out) = ([2, 0, 3, 1], [0_i32; 4]);
        shuffle_column(source, &order, out.as_mut_bytes(), ElementType::Int32);
        assert_eq!(out, [12, 10, 13, 11]);
        let mut floats = [0.0_f32; 4];
        shuffle_column(source, &order, floats.as_mut_bytes(), ElementType::Float32);
        assert_eq!(floats, [12.0, 10.0, 13.0, 11.0]);
        shuffle_column(
            ColumnSource { elements: 2, ..source },
            &[1, 0],
            out.as_mut_bytes(),
            ElementType::Int32,
        );
        assert_eq!(out, [12, 13, 10, 11]);
    }

    #[test]
    fn values_are_converted_on_the_way() {
        let data = [1.5_f64, -2.5, 1e10, f64::NAN];
        let source =
            ColumnSource { data: data.as_bytes(), element: ElementType::Float64, elements: 1 };
        assert_eq!(run::<f32>(source, ALL, ElementType::Float32)[..3], [1.5, -2.5, 1e10]);
        assert_eq!(run::<i64>(source, ALL, ElementType::Int64), [1, -2, 10_000_000_000, 0]);
        let found = |from, to| find_value_out_of_range(data.as_bytes(), from, to);
        assert_eq!(found(ElementType::Float64, ElementType::Int64), Some((3, "NaN".to_owned())));
        assert_eq!(found(ElementType::Float64, ElementType::Float32), None);
        assert_eq!(
            found(ElementType::UInt64, ElementType::Int64),
            Some((1, (-2.5_f64).to_bits().to_string()))
        );
        let large = [1.0, 1e300].map(f64::to_le_bytes).concat();
        let found = find_value_out_of_range(&large, ElementType::Float64, ElementType::Float32);
        assert_eq!(found.map(|(at, _)| at), Some(1));
        let source = ColumnSource { data: &[0, 1, 1, 0], element: ElementType::Bool, elements: 2 };
        let rows = RowCopyPlan { first: 1, count: 1, ..ALL };
        assert_eq!(run::<f32>(source, rows, ElementType::Float32), [1.0, 0.0]);
        assert!(
            !is_castable(ElementType::Float64, ElementType::Int8)
                && is_castable(ElementType::Int8, ElementType::Int8)
        );
    }
}

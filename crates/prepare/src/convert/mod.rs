// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The conversion of each Arrow type.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, FixedSizeBinaryArray, PrimitiveArray, Scalar,
    StringArray, StructArray,
};
use arrow::buffer::Buffer;
use arrow::compute::cast;
use arrow::compute::kernels::zip::zip;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Float32Type, Float64Type, Int8Type, Int32Type,
};
use arrow::error::ArrowError;
use farandole_dataset::Element;

use crate::error::{Error, Result};

/// A converted column of one batch: scalars as they are stored, vectors as fixed-size binary.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) array: ArrayRef,
    pub(crate) element: Element,
    pub(crate) shape: Vec<u64>,
}

/// The origin of a column, for messages, and the remedy for missing values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) column: &'a str,
    pub(crate) partition: u64,
    pub(crate) row: u64,
    /// The replacement of nulls and NaN, and whether it was given for this column alone.
    pub(crate) fill: Option<(&'a str, bool)>,
    /// Takes NaN that is not filled, and infinities, as values like any others.
    pub(crate) allow_nan: bool,
}

impl Origin<'_> {
    fn ragged(&self, expected: impl ToString, found: impl ToString) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        Error::Ragged {
            column,
            expected: expected.to_string(),
            found: found.to_string(),
            partition,
        }
    }

    fn refuse(&self, found: &DataType) -> Error {
        Error::Type { column: self.column.to_owned(), found: found.to_string() }
    }

    fn arrow(&self, source: ArrowError) -> Error {
        Error::Arrow { column: self.column.to_owned(), source }
    }

    fn cast(&self, array: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
        cast(array, to).map_err(|source| self.arrow(source))
    }

    /// Returns the number of rows of `values` at the places `at`, and the first of them; every row
    /// has `per_row` values.
    fn rows(&self, per_row: usize, at: impl Iterator<Item = usize>) -> (usize, u64) {
        let mut rows: Vec<usize> = at.map(|value| value / per_row.max(1)).collect();
        rows.dedup();
        (rows.len(), self.row + rows.first().copied().unwrap_or_default() as u64)
    }

    /// Something is missing in `values`, of which every row of the column has `per_row`.
    fn missing(
        &self,
        what: &'static str,
        values: usize,
        per_row: usize,
        at: impl Iterator<Item = usize>,
    ) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        let (missing, row) = self.rows(per_row, at);
        Error::Missing { column, what, missing, rows: values / per_row.max(1), partition, row }
    }

    /// No nulls among what cannot be filled.
    fn whole(&self, array: &dyn Array, what: &'static str, per_row: usize) -> Result<()> {
        match array.logical_nulls().filter(|nulls| nulls.null_count() > 0) {
            None => Ok(()),
            Some(nulls) => {
                let at = nulls.iter().enumerate().filter(|(_, valid)| !valid).map(|(at, _)| at);
                Err(self.missing(what, array.len(), per_row, at))
            }
        }
    }

    /// Returns the array with its nulls filled.
    fn filled(&self, array: &ArrayRef, what: &'static str, per_row: usize) -> Result<ArrayRef> {
        let Some(nulls) = array.logical_nulls().filter(|nulls| nulls.null_count() > 0) else {
            return Ok(Arc::clone(array));
        };
        let Some(value) = self.value(array.data_type())? else {
            self.whole(array, what, per_row)?;
            return Ok(Arc::clone(array));
        };
        let valid = BooleanArray::new(nulls.into_inner(), None);
        zip(&valid, array, &Scalar::new(value)).map_err(|source| self.arrow(source))
    }

    /// Returns the fill as one value of a type; `None` without one, and where one that is meant for
    /// all columns is none here.
    fn value(&self, kind: &DataType) -> Result<Option<ArrayRef>> {
        let Some((text, named)) = self.fill else { return Ok(None) };
        let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
        let is_text = matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
        let value =
            cast(&texts, kind).ok().filter(|value| value.null_count() == 0 && (named || !is_text));
        match value {
            None if named => Err(Error::Fill {
                column: self.column.to_owned(),
                kind: kind.to_string(),
                fill: text.to_owned(),
            }),
            value => Ok(value),
        }
    }

    /// Floats with their NaN filled.
    fn numbers<T>(&self, array: &PrimitiveArray<T>, per_row: usize) -> Result<Option<ArrayRef>>
    where
        T: ArrowPrimitiveType,
        T::Native: Into<f64> + std::str::FromStr,
    {
        let is_nan = |value: T::Native| value.into().is_nan();
        // Looked at in pieces without a way out: so it is done many values at a time.
        let odd = |value: T::Native| !value.into().is_finite();
        let any =
            |piece: &[T::Native]| piece.iter().fold(false, |found, value| found | odd(*value));
        if !array.values().chunks(1024).any(any) {
            return Ok(None);
        }
        let places = |wanted: fn(f64) -> bool| {
            let values = array.values().iter().enumerate();
            values.filter(move |(_, value)| wanted((**value).into())).map(|(at, _)| at)
        };
        if !self.allow_nan && places(f64::is_infinite).next().is_some() {
            let (column, partition) = (self.column.to_owned(), self.partition);
            let (infinite, row) = self.rows(per_row, places(f64::is_infinite));
            return Err(Error::Infinite {
                column,
                infinite,
                rows: array.len() / per_row.max(1),
                partition,
                row,
            });
        }
        match self.fill.and_then(|(text, _)| text.trim().parse::<T::Native>().ok()) {
            Some(fill) => {
                let whole = array.unary::<_, T>(|value| if is_nan(value) { fill } else { value });
                Ok(Some(Arc::new(whole)))
            }
            None if self.allow_nan => Ok(None),
            None => Err(self.missing("NaN", array.len(), per_row, places(f64::is_nan))),
        }
    }
}

/// Converts a column. `shape` is the one that earlier batches had, and the answer for a batch
/// without rows.
pub(crate) fn convert(
    origin: Origin<'_>,
    array: &ArrayRef,
    shape: Option<&[u64]>,
) -> Result<Converted> {
    let converted = match array.data_type() {
        DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..) => {
            lists(origin, array)?
        }
        kind if is_vector(kind) => {
            origin.whole(array, "nulls", 1)?;
            vectors(origin, array.as_struct(), shape)?
        }
        _ => {
            let (array, element) = scalar(origin, array, None)?;
            Converted { array, element, shape: Vec::new() }
        }
    };
    match shape {
        Some(before) if array.is_empty() => Ok(Converted { shape: before.to_vec(), ..converted }),
        Some(before) if before != converted.shape => {
            Err(origin.ragged(side(before), side(&converted.shape)))
        }
        _ => Ok(converted),
    }
}

/// Returns whether it is a Spark ML vector as it arrives in Arrow.
pub(crate) fn is_vector(kind: &DataType) -> bool {
    matches!(kind, DataType::Struct(fields) if fields.iter().map(|field| field.name().as_str()).eq(VECTOR))
}

/// `12`, or `3 x 4`.
pub(crate) fn side(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}

/// Fields of a Spark ML vector as it arrives in Arrow.
const VECTOR: [&str; 4] = ["type", "size", "indices", "values"];

/// Converts values that are no lists; within lists, every row of the column has `per_row` of them.
fn scalar(
    origin: Origin<'_>,
    array: &ArrayRef,
    per_row: Option<usize>,
) -> Result<(ArrayRef, Element)> {
    let (to, element) = match array.data_type() {
        DataType::Boolean => (DataType::Boolean, Element::Bool),
        DataType::Int8 => (DataType::Int8, Element::Int8),
        DataType::Int16 => (DataType::Int16, Element::Int16),
        DataType::Int32 => (DataType::Int32, Element::Int32),
        DataType::Int64 => (DataType::Int64, Element::Int64),
        DataType::UInt8 => (DataType::UInt8, Element::UInt8),
        DataType::UInt16 => (DataType::UInt16, Element::UInt16),
        DataType::UInt32 => (DataType::UInt32, Element::UInt32),
        DataType::UInt64 => (DataType::UInt64, Element::UInt64),
        DataType::Float16 | DataType::Float32 => (DataType::Float32, Element::Float32),
        DataType::Float64
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => (DataType::Float64, Element::Float64),
        DataType::Date32
        | DataType::Timestamp(..)
        | DataType::Duration(_)
        | DataType::Time32(_)
        | DataType::Time64(_) => (DataType::Int64, Element::Int64),
        // Its unit is the millisecond; dates are days in all columns.
        DataType::Date64 => {
            return scalar(origin, &origin.cast(array, &DataType::Date32)?, per_row);
        }
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            (DataType::Utf8, Element::Utf8)
        }
        DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::FixedSizeBinary(_) => (DataType::Binary, Element::Binary),
        DataType::Dictionary(_, value) => {
            return scalar(origin, &origin.cast(array, value)?, per_row);
        }
        DataType::RunEndEncoded(_, value) => {
            return scalar(origin, &origin.cast(array, value.data_type())?, per_row);
        }
        other => return Err(origin.refuse(other)),
    };
    let what = if per_row.is_some() { "nulls inside arrays" } else { "nulls" };
    let array = origin.filled(array, what, per_row.unwrap_or(1))?;
    let array = if *array.data_type() == to { array } else { origin.cast(&array, &to)? };
    let filled = match element {
        Element::Float32 => {
            origin.numbers(array.as_primitive::<Float32Type>(), per_row.unwrap_or(1))?
        }
        Element::Float64 => {
            origin.numbers(array.as_primitive::<Float64Type>(), per_row.unwrap_or(1))?
        }
        _ => None,
    };
    Ok((filled.unwrap_or(array), element))
}

/// Lists of numbers, nested or not, all of one length.
fn lists(origin: Origin<'_>, array: &ArrayRef) -> Result<Converted> {
    let (mut values, mut shape, mut per_row) = (Arc::clone(array), Vec::new(), 1);
    loop {
        let what = if shape.is_empty() { "nulls" } else { "nulls inside arrays" };
        let (inner, length) = match values.data_type() {
            DataType::List(_) => {
                origin.whole(&values, what, per_row)?;
                let list = values.as_list::<i32>();
                uniform(
                    origin,
                    list.values(),
                    list.value_offsets().iter().map(|offset| i64::from(*offset)),
                )?
            }
            DataType::LargeList(_) => {
                origin.whole(&values, what, per_row)?;
                let list = values.as_list::<i64>();
                uniform(origin, list.values(), list.value_offsets().iter().copied())?
            }
            DataType::FixedSizeList(_, length) => {
                origin.whole(&values, what, per_row)?;
                let list = values.as_fixed_size_list();
                (Arc::clone(list.values()), i64::from(*length))
            }
            _ => break,
        };
        shape.push(u64::try_from(length).unwrap_or_default());
        per_row *= usize::try_from(length).unwrap_or_default();
        values = inner;
    }
    let (values, element) = scalar(origin, &values, Some(per_row))?;
    let Some(width) = element.width() else { return Err(origin.refuse(array.data_type())) };
    let bytes = if element == Element::Bool {
        Buffer::from_iter(values.as_boolean().values().iter().map(u8::from))
    } else {
        fixed_bytes(&values)
            .map(|(buffer, _)| buffer)
            .ok_or_else(|| origin.refuse(array.data_type()))?
    };
    let length = shape.iter().product::<u64>();
    pack(
        origin,
        bytes,
        element,
        shape,
        usize::try_from(length).unwrap_or(usize::MAX).saturating_mul(width),
        array.len(),
    )
}

/// Values of a list array whose offsets are `offsets`, and the one length of its rows.
fn uniform(
    origin: Origin<'_>,
    values: &ArrayRef,
    offsets: impl Iterator<Item = i64>,
) -> Result<(ArrayRef, i64)> {
    let offsets: Vec<i64> = offsets.collect();
    let (first, last) =
        (offsets.first().copied().unwrap_or_default(), offsets.last().copied().unwrap_or_default());
    let length = offsets.get(1).map_or(0, |second| second - first);
    if let Some(other) =
        offsets.windows(2).map(|pair| pair[1] - pair[0]).find(|other| *other != length)
    {
        return Err(origin.ragged(length, other));
    }
    let at = |offset: i64| usize::try_from(offset).unwrap_or_default();
    Ok((values.slice(at(first), at(last) - at(first)), length))
}

/// Spark ML vectors, dense and sparse mixed, as float64.
fn vectors(origin: Origin<'_>, array: &StructArray, shape: Option<&[u64]>) -> Result<Converted> {
    let refuse = || origin.refuse(array.data_type());
    let kinds = array.column(0).as_primitive_opt::<Int8Type>().ok_or_else(refuse)?;
    let sizes = array.column(1).as_primitive_opt::<Int32Type>().ok_or_else(refuse)?;
    let indices = array.column(2).as_list_opt::<i32>().ok_or_else(refuse)?;
    let values = array.column(3).as_list_opt::<i32>().ok_or_else(refuse)?;
    let index_values =
        indices.values().as_primitive_opt::<Int32Type>().ok_or_else(refuse)?.values();
    let value_values =
        values.values().as_primitive_opt::<Float64Type>().ok_or_else(refuse)?.values();
    let mut length = shape.and_then(<[u64]>::first).copied();
    let mut out: Vec<f64> = Vec::new();
    let range = |offsets: &[i32], row: usize| {
        let edge = |at: usize| {
            offsets.get(at).and_then(|offset| usize::try_from(*offset).ok()).unwrap_or_default()
        };
        edge(row)..edge(row + 1)
    };
    for row in 0..array.len() {
        let given = value_values.get(range(values.value_offsets(), row)).unwrap_or_default();
        let sparse = kinds.value(row) == 0;
        let size = if sparse { i64::from(sizes.value(row)) } else { given.len() as i64 };
        let here = u64::try_from(size).unwrap_or_default();
        let expected = *length.get_or_insert(here);
        if here != expected {
            return Err(origin.ragged(expected, here));
        }
        if !sparse {
            out.extend_from_slice(given);
            continue;
        }
        let start = out.len();
        out.resize(start + usize::try_from(here).unwrap_or_default(), 0.0);
        let places = index_values.get(range(indices.value_offsets(), row)).unwrap_or_default();
        for (index, value) in places.iter().zip(given) {
            let slot =
                usize::try_from(*index).ok().and_then(|index| out.get_mut(start..)?.get_mut(index));
            let broken = || Error::Sparse {
                column: origin.column.to_owned(),
                size,
                index: i64::from(*index),
            };
            *slot.ok_or_else(broken)? = *value;
        }
    }
    let length = length.unwrap_or_default();
    let per_row = usize::try_from(length).unwrap_or(usize::MAX);
    let mut out = PrimitiveArray::<Float64Type>::from(out);
    if let Some(filled) = origin.numbers(&out, per_row)? {
        out = filled.as_primitive().clone();
    }
    let bytes = out.values().inner().clone();
    pack(origin, bytes, Element::Float64, vec![length], per_row.saturating_mul(8), array.len())
}

/// Returns the rows of `width` bytes as fixed-size binary.
fn pack(
    origin: Origin<'_>,
    bytes: Buffer,
    element: Element,
    shape: Vec<u64>,
    width: usize,
    rows: usize,
) -> Result<Converted> {
    if width == 0 && rows > 0 {
        return Err(Error::Type {
            column: origin.column.to_owned(),
            found: "rows of no values".to_owned(),
        });
    }
    // A batch without rows does not know its width; its keeper takes the width of another batch.
    let size = i32::try_from(width.max(1)).map_err(|_| Error::Type {
        column: origin.column.to_owned(),
        found: format!("rows of {width} bytes"),
    })?;
    let array =
        FixedSizeBinaryArray::try_new(size, bytes, None).map_err(|source| origin.arrow(source))?;
    Ok(Converted { array: Arc::new(array), element, shape })
}

/// Returns the bytes of a primitive or fixed-size binary array, and the width of a row.
pub(crate) fn fixed_bytes(array: &ArrayRef) -> Option<(Buffer, usize)> {
    let data = array.to_data();
    let width = match data.data_type() {
        DataType::FixedSizeBinary(width) => usize::try_from(*width).ok()?,
        other => other.primitive_width()?,
    };
    let buffer = data.buffers().first()?;
    Some((buffer.slice_with_length(data.offset() * width, data.len() * width), width))
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What becomes of each Arrow type.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeBinaryArray, StructArray};
use arrow::buffer::Buffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int8Type, Int32Type};
use farandole_dataset::Element;

use crate::error::{Error, Result};

/// A converted column of one batch: scalars as they are stored, vectors as fixed-size binary.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) array: ArrayRef,
    pub(crate) element: Element,
    pub(crate) shape: Vec<u64>,
}

/// Where a column comes from, for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) column: &'a str,
    pub(crate) partition: u64,
    pub(crate) row: u64,
}

impl Origin<'_> {
    fn ragged(&self, expected: impl ToString, found: impl ToString) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        Error::Ragged { column, expected: expected.to_string(), found: found.to_string(), partition }
    }

    fn refuse(&self, found: &DataType) -> Error {
        Error::Type { column: self.column.to_owned(), found: found.to_string() }
    }

    fn cast(&self, array: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
        cast(array, to).map_err(|source| Error::Arrow { column: self.column.to_owned(), source })
    }

    fn no_nulls(&self, array: &dyn Array) -> Result<()> {
        match array.logical_null_count() {
            0 => Ok(()),
            nulls => Err(Error::Nulls {
                column: self.column.to_owned(),
                nulls,
                rows: array.len(),
                partition: self.partition,
                row: self.row,
            }),
        }
    }
}

/// Converts a column. `shape` is the one that earlier batches had, and the answer for a batch without rows.
pub(crate) fn convert(origin: Origin<'_>, array: &ArrayRef, shape: Option<&[u64]>) -> Result<Converted> {
    origin.no_nulls(array)?;
    let converted = match array.data_type() {
        DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..) => lists(origin, array)?,
        DataType::Struct(fields) if fields.iter().map(|field| field.name().as_str()).eq(VECTOR) => {
            vectors(origin, array.as_struct(), shape)?
        }
        _ => {
            let (array, element) = scalar(origin, array)?;
            Converted { array, element, shape: Vec::new() }
        }
    };
    match shape {
        Some(before) if array.is_empty() => Ok(Converted { shape: before.to_vec(), ..converted }),
        Some(before) if before != converted.shape => Err(origin.ragged(side(before), side(&converted.shape))),
        _ => Ok(converted),
    }
}

/// `12`, or `3 x 4`.
pub(crate) fn side(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}

/// Fields of a Spark ML vector as it arrives in Arrow.
const VECTOR: [&str; 4] = ["type", "size", "indices", "values"];

fn scalar(origin: Origin<'_>, array: &ArrayRef) -> Result<(ArrayRef, Element)> {
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
        | DataType::Date64
        | DataType::Timestamp(..)
        | DataType::Duration(_)
        | DataType::Time64(_) => (DataType::Int64, Element::Int64),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => (DataType::Utf8, Element::Utf8),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            (DataType::Binary, Element::Binary)
        }
        DataType::Dictionary(_, value) => {
            return scalar(origin, &origin.cast(array, value)?);
        }
        other => return Err(origin.refuse(other)),
    };
    let same = *array.data_type() == to;
    Ok((if same { Arc::clone(array) } else { origin.cast(array, &to)? }, element))
}

/// Lists of numbers, nested or not, all of one length.
fn lists(origin: Origin<'_>, array: &ArrayRef) -> Result<Converted> {
    let (mut values, mut shape) = (Arc::clone(array), Vec::new());
    loop {
        let (inner, length) = match values.data_type() {
            DataType::List(_) => {
                let list = values.as_list::<i32>();
                uniform(origin, list.values(), list.value_offsets().iter().map(|offset| i64::from(*offset)))?
            }
            DataType::LargeList(_) => {
                let list = values.as_list::<i64>();
                uniform(origin, list.values(), list.value_offsets().iter().copied())?
            }
            DataType::FixedSizeList(_, length) => {
                let list = values.as_fixed_size_list();
                (Arc::clone(list.values()), i64::from(*length))
            }
            _ => break,
        };
        shape.push(u64::try_from(length).unwrap_or_default());
        origin.no_nulls(&inner)?;
        values = inner;
    }
    let (values, element) = scalar(origin, &values)?;
    let Some(width) = element.width() else { return Err(origin.refuse(array.data_type())) };
    let bytes = if element == Element::Bool {
        Buffer::from_iter(values.as_boolean().values().iter().map(u8::from))
    } else {
        fixed_bytes(&values).map(|(buffer, _)| buffer).ok_or_else(|| origin.refuse(array.data_type()))?
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
    if let Some(other) = offsets.windows(2).map(|pair| pair[1] - pair[0]).find(|other| *other != length) {
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
    let index_values = indices.values().as_primitive_opt::<Int32Type>().ok_or_else(refuse)?.values();
    let value_values = values.values().as_primitive_opt::<Float64Type>().ok_or_else(refuse)?.values();
    let mut length = shape.and_then(<[u64]>::first).copied();
    let mut out: Vec<f64> = Vec::new();
    let range = |offsets: &[i32], row: usize| {
        let edge =
            |at: usize| offsets.get(at).and_then(|offset| usize::try_from(*offset).ok()).unwrap_or_default();
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
            let slot = usize::try_from(*index).ok().and_then(|index| out.get_mut(start..)?.get_mut(index));
            let broken =
                || Error::Sparse { column: origin.column.to_owned(), size, index: i64::from(*index) };
            *slot.ok_or_else(broken)? = *value;
        }
    }
    let length = length.unwrap_or_default();
    let width = usize::try_from(length).unwrap_or(usize::MAX).saturating_mul(8);
    pack(origin, Buffer::from_vec(out), Element::Float64, vec![length], width, array.len())
}

/// Rows of `width` bytes as fixed-size binary.
fn pack(
    origin: Origin<'_>,
    bytes: Buffer,
    element: Element,
    shape: Vec<u64>,
    width: usize,
    rows: usize,
) -> Result<Converted> {
    if width == 0 && rows > 0 {
        return Err(Error::Type { column: origin.column.to_owned(), found: "rows of no values".to_owned() });
    }
    let arrow = |source| Error::Arrow { column: origin.column.to_owned(), source };
    // A batch without rows does not know its width; whoever keeps it takes the width of another batch.
    let size = i32::try_from(width.max(1)).map_err(|_| Error::Type {
        column: origin.column.to_owned(),
        found: format!("rows of {width} bytes"),
    })?;
    let array = FixedSizeBinaryArray::try_new(size, bytes, None).map_err(arrow)?;
    Ok(Converted { array: Arc::new(array), element, shape })
}

/// The bytes of a primitive or fixed-size binary array, and the width of a row.
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

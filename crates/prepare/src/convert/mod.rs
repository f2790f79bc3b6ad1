// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts each Arrow type.

mod context;
mod fill;
#[cfg(test)]
mod tests;
mod times_and_decimals;

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeBinaryArray, PrimitiveArray, StructArray};
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int8Type, Int32Type};
use farandole_dataset::ElementType;

pub(crate) use context::ConversionContext;

use crate::error::{Error, Result};

/// A converted column of one batch: scalars as they are stored, vectors as fixed-size binary.
#[derive(Debug)]
pub(crate) struct ConvertedColumn {
    pub(crate) array: ArrayRef,
    pub(crate) element: ElementType,
    pub(crate) shape: Vec<u64>,
}

/// Converts a column. `shape` is the shape in earlier batches; a batch without rows takes it over.
pub(crate) fn convert_column(
    origin: ConversionContext<'_>,
    array: &ArrayRef,
    shape: Option<&[u64]>,
) -> Result<ConvertedColumn> {
    let converted = match array.data_type() {
        DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..) => {
            convert_lists(origin, array)?
        }
        kind if is_vector(kind) => {
            // The fields of a null struct contain arbitrary values.
            origin.check_no_nulls(array, "nulls", 1)?;
            convert_vectors(origin, array.as_struct(), shape)?
        }
        _ => {
            let (array, element) = convert_scalars(origin, array, None)?;
            ConvertedColumn { array, element, shape: Vec::new() }
        }
    };
    match shape {
        Some(before) if array.is_empty() => {
            Ok(ConvertedColumn { shape: before.to_vec(), ..converted })
        }
        Some(before) if before != converted.shape => {
            Err(origin.ragged_error(format_shape(before), format_shape(&converted.shape)))
        }
        _ => Ok(converted),
    }
}

/// Returns whether the type is a Spark ML vector in Arrow.
pub(crate) fn is_vector(kind: &DataType) -> bool {
    // Arrow has no user-defined types, so Spark's vectors are recognized by their fields.
    matches!(kind, DataType::Struct(fields) if fields.iter().map(|field| field.name().as_str()).eq(VECTOR_FIELDS))
}

/// Returns a shape as text: `12` or `3 x 4`.
pub(crate) fn format_shape(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}

/// Fields of a Spark ML vector in Arrow.
const VECTOR_FIELDS: [&str; 4] = ["type", "size", "indices", "values"];

/// Converts values that are not lists. Within lists, every row of the column has `per_row` values.
fn convert_scalars(
    origin: ConversionContext<'_>,
    array: &ArrayRef,
    per_row: Option<usize>,
) -> Result<(ArrayRef, ElementType)> {
    let (to, element) = match array.data_type() {
        DataType::Boolean => (DataType::Boolean, ElementType::Bool),
        DataType::Int8 => (DataType::Int8, ElementType::Int8),
        DataType::Int16 => (DataType::Int16, ElementType::Int16),
        DataType::Int32 => (DataType::Int32, ElementType::Int32),
        DataType::Int64 => (DataType::Int64, ElementType::Int64),
        DataType::UInt8 => (DataType::UInt8, ElementType::UInt8),
        DataType::UInt16 => (DataType::UInt16, ElementType::UInt16),
        DataType::UInt32 => (DataType::UInt32, ElementType::UInt32),
        DataType::UInt64 => (DataType::UInt64, ElementType::UInt64),
        DataType::Float16 | DataType::Float32 => (DataType::Float32, ElementType::Float32),
        DataType::Float64
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => (DataType::Float64, ElementType::Float64),
        DataType::Date32
        | DataType::Date64
        | DataType::Timestamp(..)
        | DataType::Duration(_)
        | DataType::Time32(_)
        | DataType::Time64(_) => (DataType::Int64, ElementType::Int64),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            (DataType::Utf8, ElementType::Utf8)
        }
        DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::FixedSizeBinary(_) => (DataType::Binary, ElementType::Binary),
        DataType::Dictionary(_, value) => {
            return convert_scalars(origin, &origin.cast_array(array, value)?, per_row);
        }
        DataType::RunEndEncoded(_, value) => {
            return convert_scalars(origin, &origin.cast_array(array, value.data_type())?, per_row);
        }
        other => return Err(origin.unsupported_type_error(other)),
    };
    let what = if per_row.is_some() { "nulls inside arrays" } else { "nulls" };
    let per_row = per_row.unwrap_or(1);
    let converted = match times_and_decimals::times_as_integers(origin, array, per_row)? {
        Some(times) => times,
        None => match times_and_decimals::decimals_as_floats(array) {
            Some(floats) => floats,
            None => origin.cast_array(array, &to)?,
        },
    };
    // Values are filled after the conversion, because the type of the source may round the fill.
    let array = origin.fill_nulls(&converted, array.data_type(), what, per_row)?;
    let filled = match element {
        ElementType::Float32 => origin.fill_nans(array.as_primitive::<Float32Type>(), per_row)?,
        ElementType::Float64 => origin.fill_nans(array.as_primitive::<Float64Type>(), per_row)?,
        _ => None,
    };
    Ok((filled.unwrap_or(array), element))
}

/// Converts lists of numbers, nested or not, that all have the same length.
fn convert_lists(origin: ConversionContext<'_>, array: &ArrayRef) -> Result<ConvertedColumn> {
    let (mut values, mut shape, mut per_row) = (Arc::clone(array), Vec::new(), 1);
    loop {
        let what = if shape.is_empty() { "nulls" } else { "nulls inside arrays" };
        let (inner, length) = match values.data_type() {
            DataType::List(_) => {
                origin.check_no_nulls(&values, what, per_row)?;
                let list = values.as_list::<i32>();
                uniform_list_values(
                    origin,
                    list.values(),
                    list.value_offsets().iter().map(|offset| i64::from(*offset)),
                )?
            }
            DataType::LargeList(_) => {
                origin.check_no_nulls(&values, what, per_row)?;
                let list = values.as_list::<i64>();
                uniform_list_values(origin, list.values(), list.value_offsets().iter().copied())?
            }
            DataType::FixedSizeList(_, length) => {
                origin.check_no_nulls(&values, what, per_row)?;
                let list = values.as_fixed_size_list();
                (Arc::clone(list.values()), i64::from(*length))
            }
            _ => break,
        };
        shape.push(u64::try_from(length).unwrap_or_default());
        per_row *= usize::try_from(length).unwrap_or_default();
        values = inner;
    }
    let (values, element) = convert_scalars(origin, &values, Some(per_row))?;
    let Some(width) = element.byte_width() else {
        return Err(origin.unsupported_type_error(array.data_type()));
    };
    // Arrow packs eight booleans into a byte; a batch has a byte for each.
    let bytes = if element == ElementType::Bool {
        Buffer::from_iter(values.as_boolean().values().iter().map(u8::from))
    } else {
        fixed_width_bytes(&values)
            .map(|(buffer, _)| buffer)
            .ok_or_else(|| origin.unsupported_type_error(array.data_type()))?
    };
    let length = shape.iter().product::<u64>();
    rows_as_fixed_binary(
        origin,
        bytes,
        element,
        shape,
        usize::try_from(length).unwrap_or(usize::MAX).saturating_mul(width),
        array.len(),
    )
}

/// Returns the values of a list array with these offsets, and the common length of its rows.
fn uniform_list_values(
    origin: ConversionContext<'_>,
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
        return Err(origin.ragged_error(length, other));
    }
    let at = |offset: i64| usize::try_from(offset).unwrap_or_default();
    // A slice of a list array shares all values: its offsets need not begin at 0.
    Ok((values.slice(at(first), at(last) - at(first)), length))
}

/// Converts Spark ML vectors, dense or sparse, to float64.
fn convert_vectors(
    origin: ConversionContext<'_>,
    array: &StructArray,
    shape: Option<&[u64]>,
) -> Result<ConvertedColumn> {
    let refuse = || origin.unsupported_type_error(array.data_type());
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
        // In Spark's `VectorUDT`, 0 is sparse and 1 is dense; a dense vector has no `size`.
        let sparse = kinds.value(row) == 0;
        let size = if sparse { i64::from(sizes.value(row)) } else { given.len() as i64 };
        let here = u64::try_from(size).unwrap_or_default();
        let expected = *length.get_or_insert(here);
        if here != expected {
            return Err(origin.ragged_error(expected, here));
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
    if let Some(filled) = origin.fill_nans(&out, per_row)? {
        out = filled.as_primitive().clone();
    }
    let bytes = out.values().inner().clone();
    rows_as_fixed_binary(
        origin,
        bytes,
        ElementType::Float64,
        vec![length],
        per_row.saturating_mul(8),
        array.len(),
    )
}

/// Returns rows of `width` bytes as fixed-size binary.
fn rows_as_fixed_binary(
    origin: ConversionContext<'_>,
    bytes: Buffer,
    element: ElementType,
    shape: Vec<u64>,
    width: usize,
    rows: usize,
) -> Result<ConvertedColumn> {
    if width == 0 && rows > 0 {
        return Err(Error::Type {
            column: origin.column.to_owned(),
            found: "rows of no values".to_owned(),
        });
    }
    // The width of a batch without rows is unknown. It is not written, so 1 is as good as any.
    let size = i32::try_from(width.max(1)).map_err(|_| Error::Type {
        column: origin.column.to_owned(),
        found: format!("rows of {width} bytes"),
    })?;
    let array = FixedSizeBinaryArray::try_new(size, bytes, None)
        .map_err(|source| origin.arrow_error(source))?;
    Ok(ConvertedColumn { array: Arc::new(array), element, shape })
}

/// Returns the bytes of a primitive or fixed-size binary array, and the width of a row.
pub(crate) fn fixed_width_bytes(array: &ArrayRef) -> Option<(Buffer, usize)> {
    let data = array.to_data();
    let width = match data.data_type() {
        DataType::FixedSizeBinary(width) => usize::try_from(*width).ok()?,
        other => other.primitive_width()?,
    };
    let buffer = data.buffers().first()?;
    // A slice of an array shares the buffer and begins at `offset`.
    Some((buffer.slice_with_length(data.offset() * width, data.len() * width), width))
}

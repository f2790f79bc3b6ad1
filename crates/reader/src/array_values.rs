// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts arrays of the Parquet library to the values of a column.

use arrow::array::{Array, ArrayRef, AsArray, PrimitiveArray};
use arrow::buffer::Buffer;
use arrow::compute::cast;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type,
    Float64Type, Int64Type, i256,
};
use farandole_dataset::{ElementType, nearest_float64, parse_decimal_float64};

use crate::column::SelectedColumn;
use crate::error::{Error, Result};
use crate::fill::null_fill_bytes;
use crate::time_rule::TimeRule;
use crate::value_origin::ValueOrigin;

/// Returns the values of an array as elements of the column; `time` is the rule of dates and times.
pub(crate) fn convert_array(
    array: &ArrayRef,
    selected: &SelectedColumn,
    time: Option<TimeRule>,
    origin: &ValueOrigin<'_>,
) -> Result<Buffer> {
    let field = &selected.field;
    let nulls = array.logical_null_count();
    if nulls > 0 && selected.fill.is_none() {
        return Err(origin.nulls_error(nulls));
    }
    let arrow_error = |source| Error::Arrow {
        column: origin.column.to_owned(),
        file: origin.file.to_owned(),
        source,
    };
    let bytes = if let Some(rule) = time {
        let stored = cast(array, &DataType::Int64).map_err(arrow_error)?;
        convert_times(stored.as_primitive(), rule, origin)?
    } else if field.element == ElementType::Bool && field.shape.is_empty() {
        Buffer::from_iter(array.as_boolean().values().iter().map(u8::from))
    } else if let Some(floats) = decimals_as_floats(array) {
        floats
    } else {
        let wanted = match field.element {
            ElementType::Float32 if field.shape.is_empty() => &DataType::Float32,
            _ => array.data_type(),
        };
        let converted = cast(array, wanted).map_err(arrow_error)?;
        let data = converted.to_data();
        let row = match data.data_type() {
            DataType::FixedSizeBinary(width) => usize::try_from(*width).unwrap_or_default(),
            other => other.primitive_width().unwrap_or_default(),
        };
        let buffer = data
            .buffers()
            .first()
            .map(|b| b.slice_with_length(data.offset() * row, data.len() * row));
        buffer.unwrap_or_else(|| Buffer::from(&[][..]))
    };
    if nulls == 0 {
        return Ok(bytes);
    }
    let width = field.row_width();
    let (fill, mut bytes) = (null_fill_bytes(selected, width), bytes.to_vec());
    for (slot, row) in bytes.chunks_exact_mut(width.max(1)).zip(0..array.len()) {
        if array.is_null(row) {
            slot.copy_from_slice(&fill);
        }
    }
    Ok(Buffer::from_vec(bytes))
}

fn convert_times(
    stored: &PrimitiveArray<Int64Type>,
    rule: TimeRule,
    origin: &ValueOrigin<'_>,
) -> Result<Buffer> {
    let convert = |(row, value): (usize, Option<i64>)| {
        // The value of a null is arbitrary, and may not be a time.
        value
            .map_or(Ok(0), |value| rule.convert(value))
            .map_err(|reason| origin.unrepresentable_error(row, reason))
    };
    Ok(Buffer::from_vec(stored.iter().enumerate().map(convert).collect::<Result<Vec<i64>>>()?))
}

/// Returns decimals as the nearest float64; `None` for other arrays.
fn decimals_as_floats(array: &ArrayRef) -> Option<Buffer> {
    fn convert<T: ArrowPrimitiveType>(
        array: &ArrayRef,
        to_float: impl Fn(T::Native) -> f64,
    ) -> Buffer {
        array.as_primitive::<T>().unary::<_, Float64Type>(to_float).values().inner().clone()
    }
    Some(match *array.data_type() {
        DataType::Decimal32(_, scale) => {
            convert::<Decimal32Type>(array, |v| nearest_float64(v.into(), scale.into()))
        }
        DataType::Decimal64(_, scale) => {
            convert::<Decimal64Type>(array, |v| nearest_float64(v.into(), scale.into()))
        }
        DataType::Decimal128(_, scale) => {
            convert::<Decimal128Type>(array, |v| nearest_float64(v, scale.into()))
        }
        DataType::Decimal256(_, scale) => {
            convert::<Decimal256Type>(array, |v| wide_decimal_float64(v, scale.into()))
        }
        _ => return None,
    })
}

/// Returns the float64 that is nearest to a decimal of up to 76 digits.
pub(crate) fn wide_decimal_float64(unscaled: i256, scale: i32) -> f64 {
    unscaled.to_i128().map_or_else(
        || parse_decimal_float64(&unscaled.to_string(), scale),
        |unscaled| nearest_float64(unscaled, scale),
    )
}

/// Returns one value repeated `rows` times; `None` if the element cannot represent it.
pub(crate) fn repeat_value(value: &str, element: ElementType, rows: usize) -> Option<Buffer> {
    macro_rules! repeat {
        ($kind:ty) => {
            Buffer::from_vec(vec![value.parse::<$kind>().ok()?; rows])
        };
    }
    Some(match element {
        ElementType::Bool => Buffer::from_vec(vec![u8::from(value.parse::<bool>().ok()?); rows]),
        ElementType::Int8 => repeat!(i8),
        ElementType::Int16 => repeat!(i16),
        ElementType::Int32 => repeat!(i32),
        ElementType::Int64 => repeat!(i64),
        ElementType::UInt8 => repeat!(u8),
        ElementType::UInt16 => repeat!(u16),
        ElementType::UInt32 => repeat!(u32),
        ElementType::UInt64 => repeat!(u64),
        ElementType::Float32 => repeat!(f32),
        ElementType::Float64 => repeat!(f64),
        ElementType::Utf8 | ElementType::Binary => return None,
    })
}

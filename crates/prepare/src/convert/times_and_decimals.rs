// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Dates, times and decimals as numbers. The reader converts files in the same way.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, PrimitiveArray};
use arrow::compute::cast;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type,
    Float64Type, Int64Type, TimeUnit as ArrowUnit,
};
use farandole_dataset::{TimeUnit, day_of_milliseconds, nearest_float64, parse_decimal_float64};

use super::context::ConversionContext;
use crate::error::Result;

/// Returns dates as days, and times as microseconds; `None` for other types. Every row of the
/// column has `per_row` values.
pub(super) fn times_as_integers(
    origin: ConversionContext<'_>,
    array: &ArrayRef,
    per_row: usize,
) -> Result<Option<ArrayRef>> {
    let unit = match array.data_type() {
        DataType::Date32 => return origin.cast_array(array, &DataType::Int64).map(Some),
        DataType::Date64 => {
            let stored = origin.cast_array(array, &DataType::Int64)?;
            let days =
                stored.as_primitive::<Int64Type>().unary::<_, Int64Type>(day_of_milliseconds);
            return Ok(Some(Arc::new(days)));
        }
        DataType::Timestamp(unit, _)
        | DataType::Time32(unit)
        | DataType::Time64(unit)
        | DataType::Duration(unit) => time_unit(*unit),
        _ => return Ok(None),
    };
    let stored = origin.cast_array(array, &DataType::Int64)?;
    let stored: &PrimitiveArray<Int64Type> = stored.as_primitive();
    let convert = |(at, value): (usize, Option<i64>)| {
        let Some(value) = value else { return Ok(None) };
        unit.to_microseconds(value).map(Some).ok_or_else(|| {
            let unit = unit.plural_name();
            let reason = format!("{value} {unit} are more microseconds than an int64 can hold");
            origin.value_error(at / per_row.max(1), reason)
        })
    };
    let times = stored.iter().enumerate().map(convert).collect::<Result<PrimitiveArray<_>>>()?;
    Ok(Some(Arc::<PrimitiveArray<Int64Type>>::new(times)))
}

fn time_unit(unit: ArrowUnit) -> TimeUnit {
    match unit {
        ArrowUnit::Second => TimeUnit::Second,
        ArrowUnit::Millisecond => TimeUnit::Millisecond,
        ArrowUnit::Microsecond => TimeUnit::Microsecond,
        ArrowUnit::Nanosecond => TimeUnit::Nanosecond,
    }
}

/// Returns decimals as the nearest float64; `None` for other types.
pub(super) fn decimals_as_floats(array: &ArrayRef) -> Option<ArrayRef> {
    fn convert<T: ArrowPrimitiveType>(
        array: &ArrayRef,
        to_float: impl Fn(T::Native) -> f64,
    ) -> ArrayRef {
        Arc::new(array.as_primitive::<T>().unary::<_, Float64Type>(to_float))
    }
    Some(match *array.data_type() {
        DataType::Decimal32(_, scale) => {
            convert::<Decimal32Type>(array, |value| nearest_float64(value.into(), scale.into()))
        }
        DataType::Decimal64(_, scale) => {
            convert::<Decimal64Type>(array, |value| nearest_float64(value.into(), scale.into()))
        }
        DataType::Decimal128(_, scale) => {
            convert::<Decimal128Type>(array, |value| nearest_float64(value, scale.into()))
        }
        DataType::Decimal256(_, scale) => convert::<Decimal256Type>(array, |value| {
            // Few values need more than 128 bits, and the conversion through text is slow.
            value.to_i128().map_or_else(
                || parse_decimal_float64(&value.to_string(), scale.into()),
                |value| nearest_float64(value, scale.into()),
            )
        }),
        _ => return None,
    })
}

/// Returns a replacement of missing dates or times, given as a number of a batch or as text, as the
/// number in batches; `None` if it is neither.
pub(super) fn parse_time_replacement(text: &ArrayRef, kind: &DataType) -> Option<ArrayRef> {
    let known = |value: ArrayRef| (value.null_count() == 0).then_some(value);
    let plain = ConversionContext { column: "", partition: 0, row: 0, fill: None, allow_nan: true };
    // A number comes first: it has the unit of batches, not the unit of the source.
    cast(text, &DataType::Int64).ok().and_then(known).or_else(|| {
        let value = cast(text, kind).ok().and_then(known)?;
        times_as_integers(plain, &value, 1).ok().flatten()
    })
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads the values of a leaf column with their levels, and converts each value here.
//!
//! Lists of numbers are read this way, because the library's list reader builds offsets that are
//! not needed, and is two orders of magnitude slower. INT96 is read this way, because the library
//! converts it with overflow.

use std::sync::Arc;

use arrow::buffer::Buffer;
use arrow::datatypes::{ArrowNativeType, ArrowPrimitiveType, DataType, Float16Type, i256};
use farandole_dataset::{ElementType, PlanPart, int96_microseconds, nearest_float64};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{DataType as ParquetType, Int32Type};
use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescriptor;

use crate::array_values::wide_decimal_float64;
use crate::column::SelectedColumn;
use crate::error::{Error, Result};
use crate::fill::null_fill_bytes;
use crate::footer::FetchedRanges;
use crate::pool::PlainValue;
use crate::schema::{element_type, is_promotable};
use crate::time_rule::TimeRule;
use crate::value_origin::ValueOrigin;

/// Most bytes of a decimal that is converted here.
const MAX_DECIMAL_BYTES: usize = size_of::<i256>();

/// The rows to read from a leaf.
pub(crate) struct LeafRequest<'a> {
    pub(crate) leaf: usize,
    pub(crate) part: &'a PlanPart,
    pub(crate) selected: &'a SelectedColumn,
    pub(crate) origin: &'a ValueOrigin<'a>,
    /// Rule of dates and times.
    pub(crate) time: Option<TimeRule>,
}

/// Reads the rows of a part from a leaf; `kind` is the Arrow type of its values.
///
/// # Errors
/// Bytes that cannot be decoded, nulls without a fill value, rows of other lengths, and values that
/// the column's element cannot represent.
pub(crate) fn read_leaf(
    footer: &ArrowReaderMetadata,
    fetched: &FetchedRanges,
    request: &LeafRequest<'_>,
    kind: &DataType,
) -> Result<Buffer> {
    let LeafRequest { leaf, part, origin, time, selected } = *request;
    let Some(group) = footer.metadata().row_groups().get(part.group) else {
        return Err(Error::Ended);
    };
    let Some(chunk) = group.columns().get(leaf) else { return Err(Error::Ended) };
    let rows = usize::try_from(group.num_rows()).unwrap_or_default();
    let pages = match SerializedPageReader::new(Arc::new(fetched.clone()), chunk, rows, None) {
        Ok(pages) => pages,
        Err(source) => return Err(origin.parquet_error(source)),
    };
    let column = &*footer.parquet_schema().column(leaf);
    let times = |stored: i64| time.map_or(Ok(stored), |rule| rule.convert(stored));
    let reader = get_column_reader(footer.parquet_schema().column(leaf), Box::new(pages));
    let promoted = element_type(kind).filter(|_| time.is_none());
    let promoted = promoted.filter(|from| is_promotable(*from, selected.field.element));
    match (reader, kind) {
        (ColumnReader::Int32ColumnReader(reader), _) if promoted.is_some() => {
            read_promoted_integers(reader, request, column)
        }
        (ColumnReader::Int64ColumnReader(reader), DataType::Int64) if promoted.is_some() => {
            convert_leaf(reader, request, column, |value| Ok(nearest_float64((*value).into(), 0)))
        }
        (ColumnReader::FloatColumnReader(reader), _) if promoted.is_some() => {
            convert_leaf(reader, request, column, |value| Ok(f64::from(*value)))
        }
        (ColumnReader::BoolColumnReader(reader), DataType::Boolean) => {
            convert_leaf(reader, request, column, |value| Ok(u8::from(*value)))
        }
        (ColumnReader::FloatColumnReader(reader), DataType::Float32) => {
            convert_leaf(reader, request, column, |value| Ok(*value))
        }
        (ColumnReader::DoubleColumnReader(reader), DataType::Float64) => {
            convert_leaf(reader, request, column, |value| Ok(*value))
        }
        (ColumnReader::Int64ColumnReader(reader), DataType::Int64 | DataType::UInt64) => {
            convert_leaf(reader, request, column, |value| Ok(*value))
        }
        (ColumnReader::Int64ColumnReader(reader), _) if time.is_some() => {
            convert_leaf(reader, request, column, |value| times(*value))
        }
        (ColumnReader::Int32ColumnReader(reader), _) if time.is_some() => {
            convert_leaf(reader, request, column, |value| times(i64::from(*value)))
        }
        (ColumnReader::Int32ColumnReader(reader), DataType::Int32 | DataType::UInt32) => {
            convert_leaf(reader, request, column, |value| Ok(*value))
        }
        (ColumnReader::Int32ColumnReader(reader), DataType::Int16) => {
            convert_leaf(reader, request, column, |value| {
                check_narrowed(*value, i16::try_from(*value))
            })
        }
        (ColumnReader::Int32ColumnReader(reader), DataType::UInt16) => {
            convert_leaf(reader, request, column, |value| {
                check_narrowed(*value, u16::try_from(*value))
            })
        }
        (ColumnReader::Int32ColumnReader(reader), DataType::Int8) => {
            convert_leaf(reader, request, column, |value| {
                check_narrowed(*value, i8::try_from(*value))
            })
        }
        (ColumnReader::Int32ColumnReader(reader), DataType::UInt8) => {
            convert_leaf(reader, request, column, |value| {
                check_narrowed(*value, u8::try_from(*value))
            })
        }
        (ColumnReader::Int32ColumnReader(reader), kind) if decimal_scale(kind).is_some() => {
            let scale = decimal_scale(kind).unwrap_or_default();
            convert_leaf(reader, request, column, |value| {
                Ok(nearest_float64(i128::from(*value), scale))
            })
        }
        (ColumnReader::Int64ColumnReader(reader), kind) if decimal_scale(kind).is_some() => {
            let scale = decimal_scale(kind).unwrap_or_default();
            convert_leaf(reader, request, column, |value| {
                Ok(nearest_float64(i128::from(*value), scale))
            })
        }
        (ColumnReader::FixedLenByteArrayColumnReader(reader), kind)
            if decimal_scale(kind).is_some() =>
        {
            let scale = decimal_scale(kind).unwrap_or_default();
            convert_leaf(reader, request, column, |value| decimal_from_bytes(value.data(), scale))
        }
        (ColumnReader::ByteArrayColumnReader(reader), kind) if decimal_scale(kind).is_some() => {
            let scale = decimal_scale(kind).unwrap_or_default();
            convert_leaf(reader, request, column, |value| decimal_from_bytes(value.data(), scale))
        }
        (ColumnReader::FixedLenByteArrayColumnReader(reader), DataType::Float16) => {
            convert_leaf(reader, request, column, |value| half_float_from_bytes(value.data()))
        }
        (ColumnReader::Int96ColumnReader(reader), DataType::Timestamp(..)) => {
            convert_leaf(reader, request, column, |value| {
                let [low, high, day] = *value.data() else {
                    return Err("an INT96 of another length".to_owned());
                };
                let nanoseconds = u64::from(high) << 32 | u64::from(low);
                let micros = int96_microseconds(nanoseconds, day).ok_or_else(|| {
                    format!("Julian day {day} is more microseconds than an int64 can hold")
                })?;
                time.map_or(Ok(micros), |rule| rule.check_calendar_independent(micros))
            })
        }
        _ => Err(Error::Unreadable {
            column: request.selected.field.name.clone(),
            reason: format!("lists of {kind} have to be prepared first"),
        }),
    }
}

/// Reads integers of up to 32 bits into a column that its table has widened.
fn read_promoted_integers(
    reader: ColumnReaderImpl<Int32Type>,
    request: &LeafRequest<'_>,
    column: &ColumnDescriptor,
) -> Result<Buffer> {
    match request.selected.field.element {
        ElementType::Int16 => convert_leaf(reader, request, column, |value| {
            check_narrowed(*value, i16::try_from(*value))
        }),
        ElementType::Int32 => convert_leaf(reader, request, column, |value| Ok(*value)),
        ElementType::Int64 => convert_leaf(reader, request, column, |value| Ok(i64::from(*value))),
        _ => convert_leaf(reader, request, column, |value| Ok(f64::from(*value))),
    }
}

fn check_narrowed<T, E>(
    stored: i32,
    value: std::result::Result<T, E>,
) -> std::result::Result<T, String> {
    value.map_err(|_| format!("{stored} is not a value of the type that the file states"))
}

fn decimal_scale(kind: &DataType) -> Option<i32> {
    match kind {
        DataType::Decimal32(_, scale)
        | DataType::Decimal64(_, scale)
        | DataType::Decimal128(_, scale)
        | DataType::Decimal256(_, scale) => Some(i32::from(*scale)),
        _ => None,
    }
}

/// Converts a decimal that is stored as a big-endian number of any length.
fn decimal_from_bytes(bytes: &[u8], scale: i32) -> std::result::Result<f64, String> {
    // Two's complement: the sign fills the bytes before the stored ones.
    let negative = bytes.first().is_some_and(|first| *first >= 0x80);
    let mut whole = [if negative { 0xFF } else { 0 }; MAX_DECIMAL_BYTES];
    let start = MAX_DECIMAL_BYTES.checked_sub(bytes.len());
    let Some(slots) = start.and_then(|start| whole.get_mut(start..)) else {
        return Err(format!("a decimal of {} bytes", bytes.len()));
    };
    slots.copy_from_slice(bytes);
    Ok(wide_decimal_float64(i256::from_be_bytes(whole), scale))
}

fn half_float_from_bytes(bytes: &[u8]) -> std::result::Result<f32, String> {
    let bytes = bytes.try_into().map_err(|_| "a half float of another length".to_owned())?;
    Ok(<Float16Type as ArrowPrimitiveType>::Native::from_le_bytes(bytes).to_f32())
}

/// Reads the entries of a leaf and converts each; nulls become the column's fill.
fn convert_leaf<T: ParquetType, V: PlainValue + ArrowNativeType>(
    reader: ColumnReaderImpl<T>,
    request: &LeafRequest<'_>,
    column: &ColumnDescriptor,
    convert: impl Fn(&T::T) -> std::result::Result<V, String>,
) -> Result<Buffer> {
    let LeafRequest { selected, origin, .. } = *request;
    let length = selected.field.elements_per_row().max(1);
    if selected.field.element.byte_width() != Some(size_of::<V>()) {
        return Err(origin.length_error(size_of::<V>(), selected.field.row_width()));
    }
    let (values, defined) = read_entries(reader, request, column)?;
    let highest = column.max_def_level();
    let nulls = defined.iter().filter(|level| **level != highest).count();
    // Lower levels are of lists that are null or empty.
    let present = if column.max_rep_level() > 0 {
        highest - i16::from(column.self_type().is_optional())
    } else {
        0
    };
    if nulls > 0 && (selected.fill.is_none() || defined.iter().any(|level| *level < present)) {
        return Err(origin.nulls_error(nulls));
    }
    let fill = V::read_from_bytes(&null_fill_bytes(selected, size_of::<V>())).unwrap_or_default();
    let mut next = values.iter();
    let mut out = Vec::with_capacity(values.len() + nulls);
    for entry in 0..values.len() + nulls {
        if defined.get(entry).is_some_and(|level| *level != highest) {
            out.push(fill);
            continue;
        }
        let Some(value) = next.next() else { return Err(Error::Ended) };
        out.push(
            convert(value)
                .map_err(|reason| origin.unrepresentable_error(entry / length, reason))?,
        );
    }
    Ok(Buffer::from_vec(out))
}

/// Reads the values of the rows of a part and their definition levels, which are empty if there can
/// be no nulls. Checks that every row has the column's length.
fn read_entries<T: ParquetType>(
    mut reader: ColumnReaderImpl<T>,
    request: &LeafRequest<'_>,
    column: &ColumnDescriptor,
) -> Result<(Vec<T::T>, Vec<i16>)> {
    let LeafRequest { part, selected, origin, .. } = *request;
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let rows = count(part.rows.end - part.rows.start);
    let length = selected.field.elements_per_row();
    let mut values = Vec::with_capacity(rows.saturating_mul(length));
    let (mut defined, mut repeated) = (Vec::new(), Vec::new());
    let mut read = || {
        let (mut at, too_few) = (0, || ParquetError::EOF("fewer rows than announced".to_owned()));
        for range in origin.stored_rows {
            let mut left = count(range.start - at);
            while left > 0 {
                match reader.skip_records(left)? {
                    0 => return Err(too_few()),
                    skipped => left -= skipped.min(left),
                }
            }
            let mut left = count(range.end - range.start);
            while left > 0 {
                let (records, ..) = reader.read_records(
                    left,
                    Some(&mut defined),
                    Some(&mut repeated),
                    &mut values,
                )?;
                if records == 0 {
                    return Err(too_few());
                }
                left -= records;
            }
            at = range.end;
        }
        Ok(())
    };
    if let Err(source) = read() {
        return Err(origin.parquet_error(source));
    }
    let repeats = column.max_rep_level();
    if repeats > 0 {
        let regular =
            |row: &[i16]| row.first() == Some(&0) && row.iter().skip(1).all(|l| *l == repeats);
        let even = repeated.len() == rows.saturating_mul(length)
            && repeated.chunks_exact(length.max(1)).all(regular);
        if !even {
            return Err(origin.ragged_error(length as u64));
        }
    }
    Ok((values, defined))
}

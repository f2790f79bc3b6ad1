// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads lists of numbers of one length by their leaf column. The library's list reader builds
//! offsets that are not needed here, and is two orders of magnitude slower.

use std::sync::Arc;

use arrow::buffer::Buffer;
use farandole_dataset::{ElementType, PlanPart};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::DataType as ParquetType;
use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedPageReader;

use crate::column::BatchField;
use crate::error::{Error, Result};
use crate::footer::FetchedRanges;
use crate::value_origin::ValueOrigin;

/// Reads the values of a leaf and checks their levels: no nulls, and every row of the same length.
fn read_leaf<T: ParquetType>(
    mut reader: ColumnReaderImpl<T>,
    part: &PlanPart,
    field: &BatchField,
    levels: (i16, i16),
    origin: &ValueOrigin<'_>,
) -> Result<Vec<T::T>> {
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let (skip, rows, length) =
        (count(part.rows.start), count(part.rows.end - part.rows.start), field.elements_per_row());
    let mut values = Vec::with_capacity(rows.saturating_mul(length));
    let (mut defined, mut repeated) = (Vec::new(), Vec::new());
    let mut read = || {
        if skip > 0 && reader.skip_records(skip)? != skip {
            return Err(ParquetError::EOF("fewer rows than announced".to_owned()));
        }
        let mut done = 0;
        while done < rows {
            let (records, ..) = reader.read_records(
                rows - done,
                Some(&mut defined),
                Some(&mut repeated),
                &mut values,
            )?;
            if records == 0 {
                return Err(ParquetError::EOF("fewer rows than announced".to_owned()));
            }
            done += records;
        }
        Ok(())
    };
    if let Err(source) = read() {
        return Err(origin.parquet_error(source));
    }
    let (most_defined, repeats) = levels;
    let nulls = defined.iter().filter(|level| **level != most_defined).count();
    if nulls > 0 {
        return Err(origin.nulls_error(nulls));
    }
    let regular =
        |row: &[i16]| row.first() == Some(&0) && row.iter().skip(1).all(|level| *level == repeats);
    let even = repeated.len() == rows.saturating_mul(length)
        && repeated.chunks_exact(length.max(1)).all(regular);
    if even { Ok(values) } else { Err(origin.ragged_error(field.elements_per_row() as u64)) }
}

/// Reads the rows of `part` of the list column whose leaf is number `leaf`.
pub(crate) fn read_list(
    footer: &ArrowReaderMetadata,
    fetched: &FetchedRanges,
    leaf: usize,
    part: &PlanPart,
    field: &BatchField,
    origin: &ValueOrigin<'_>,
) -> Result<Buffer> {
    let Some(group) = footer.metadata().row_groups().get(part.group) else {
        return Err(Error::Ended);
    };
    let Some(chunk) = group.columns().get(leaf) else { return Err(Error::Ended) };
    let rows = usize::try_from(group.num_rows()).unwrap_or_default();
    let pages = match SerializedPageReader::new(Arc::new(fetched.clone()), chunk, rows, None) {
        Ok(pages) => pages,
        Err(source) => return Err(origin.parquet_error(source)),
    };
    let descriptor = footer.parquet_schema().column(leaf);
    let levels = (descriptor.max_def_level(), descriptor.max_rep_level());
    let unreadable =
        |reason: &str| Error::Unreadable { column: field.name.clone(), reason: reason.to_owned() };
    Ok(match (get_column_reader(descriptor, Box::new(pages)), field.element) {
        (ColumnReader::FloatColumnReader(reader), ElementType::Float32) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::DoubleColumnReader(reader), ElementType::Float64) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int64ColumnReader(reader), ElementType::Int64 | ElementType::UInt64) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int32ColumnReader(reader), ElementType::Int32 | ElementType::UInt32) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int32ColumnReader(reader), element) => {
            narrow_integers(read_leaf(reader, part, field, levels, origin)?, element)
        }
        (ColumnReader::BoolColumnReader(reader), ElementType::Bool) => Buffer::from_iter(
            read_leaf(reader, part, field, levels, origin)?.into_iter().map(u8::from),
        ),
        _ => return Err(unreadable("lists of this type have to be prepared first")),
    })
}

/// Converts small integers, which are stored with 32 bits. For narrower types, the high bits are
/// only the sign.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the stored type is the wider one"
)]
fn narrow_integers(values: Vec<i32>, element: ElementType) -> Buffer {
    match element {
        ElementType::Int16 | ElementType::UInt16 => {
            Buffer::from_vec(values.into_iter().map(|v| v as u16).collect::<Vec<_>>())
        }
        ElementType::Int64 => {
            Buffer::from_vec(values.into_iter().map(i64::from).collect::<Vec<_>>())
        }
        _ => Buffer::from_vec(values.into_iter().map(|v| v as u8).collect::<Vec<_>>()),
    }
}

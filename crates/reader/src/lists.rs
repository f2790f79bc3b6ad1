// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lists of numbers that all have one length, read by their leaf: the general list reader builds
//! offsets that are not needed, and is two orders of magnitude slower.

use std::sync::Arc;

use arrow::buffer::Buffer;
use farandole_dataset::{Element, Part};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::DataType as ParquetType;
use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedPageReader;

use crate::column::Field;
use crate::error::{Error, Result};
use crate::footer::Fetched;
use crate::origin::Origin;

/// Values of a leaf, its levels checked.
fn read_leaf<T: ParquetType>(
    mut reader: ColumnReaderImpl<T>,
    part: &Part,
    field: &Field,
    levels: (i16, i16),
    origin: &Origin<'_>,
) -> Result<Vec<T::T>> {
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let (skip, rows, length) =
        (count(part.rows.start), count(part.rows.end - part.rows.start), field.elements());
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
        return Err(origin.parquet(source));
    }
    let (most_defined, repeats) = levels;
    let nulls = defined.iter().filter(|level| **level != most_defined).count();
    if nulls > 0 {
        return Err(origin.nulls(nulls));
    }
    let regular =
        |row: &[i16]| row.first() == Some(&0) && row.iter().skip(1).all(|level| *level == repeats);
    let even = repeated.len() == rows.saturating_mul(length)
        && repeated.chunks_exact(length.max(1)).all(regular);
    if even { Ok(values) } else { Err(origin.ragged(field.elements() as u64)) }
}

/// Reads the rows of `part` of the list column whose leaf is number `leaf`.
pub(crate) fn read_list(
    footer: &ArrowReaderMetadata,
    fetched: &Fetched,
    leaf: usize,
    part: &Part,
    field: &Field,
    origin: &Origin<'_>,
) -> Result<Buffer> {
    let Some(group) = footer.metadata().row_groups().get(part.group) else {
        return Err(Error::Ended);
    };
    let Some(chunk) = group.columns().get(leaf) else { return Err(Error::Ended) };
    let rows = usize::try_from(group.num_rows()).unwrap_or_default();
    let pages = match SerializedPageReader::new(Arc::new(fetched.clone()), chunk, rows, None) {
        Ok(pages) => pages,
        Err(source) => return Err(origin.parquet(source)),
    };
    let descriptor = footer.parquet_schema().column(leaf);
    let levels = (descriptor.max_def_level(), descriptor.max_rep_level());
    let unreadable =
        |reason: &str| Error::Unreadable { column: field.name.clone(), reason: reason.to_owned() };
    Ok(match (get_column_reader(descriptor, Box::new(pages)), field.element) {
        (ColumnReader::FloatColumnReader(reader), Element::Float32) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::DoubleColumnReader(reader), Element::Float64) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int64ColumnReader(reader), Element::Int64 | Element::UInt64) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int32ColumnReader(reader), Element::Int32 | Element::UInt32) => {
            Buffer::from_vec(read_leaf(reader, part, field, levels, origin)?)
        }
        (ColumnReader::Int32ColumnReader(reader), element) => {
            narrow(read_leaf(reader, part, field, levels, origin)?, element)
        }
        (ColumnReader::BoolColumnReader(reader), Element::Bool) => Buffer::from_iter(
            read_leaf(reader, part, field, levels, origin)?.into_iter().map(u8::from),
        ),
        _ => return Err(unreadable("lists of this type have to be prepared first")),
    })
}

/// Small integers are stored as 32 bits; what is above their width is sign.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the stored type is the wider one"
)]
fn narrow(values: Vec<i32>, element: Element) -> Buffer {
    match element {
        Element::Int16 | Element::UInt16 => {
            Buffer::from_vec(values.into_iter().map(|v| v as u16).collect::<Vec<_>>())
        }
        Element::Int64 => Buffer::from_vec(values.into_iter().map(i64::from).collect::<Vec<_>>()),
        _ => Buffer::from_vec(values.into_iter().map(|v| v as u8).collect::<Vec<_>>()),
    }
}

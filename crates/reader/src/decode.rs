// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! From column chunks to the values of a part.

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::DataType;
use farandole_dataset::{Element, Part};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;

use crate::dataset::{Dataset, Field};
use crate::error::{Error, Result};
use crate::footer::Fetched;
use crate::lists::read_list;
use crate::reader::Selected;
use crate::schema::{leaf_of, shape_of};

/// Where values come from, for messages.
pub(crate) struct Origin<'a> {
    pub(crate) file: String,
    pub(crate) group: usize,
    pub(crate) column: &'a str,
}

impl Origin<'_> {
    pub(crate) fn nulls(self, nulls: usize) -> Error {
        Error::Nulls { column: self.column.to_owned(), nulls, group: self.group, file: self.file }
    }

    pub(crate) fn ragged(self, expected: u64) -> Error {
        Error::Ragged { column: self.column.to_owned(), expected, group: self.group, file: self.file }
    }

    pub(crate) fn parquet(self, source: ParquetError) -> Error {
        Error::Parquet { file: self.file, group: self.group, source }
    }
}

/// How one column is stored in one file.
enum Stored {
    /// Scalars, or vectors as fixed-size binary: root number.
    Flat(usize),
    /// A list of numbers: root and leaf number.
    List(usize, usize),
}

/// Fetches and decodes the rows of `part`, column by column in the order of `selected`.
pub(crate) fn decode(dataset: &Dataset, selected: &[Selected], part: &Part) -> Result<Vec<Buffer>> {
    let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
    let footer = dataset.footer(part.file)?;
    let file = dataset.store().name_of(&data.path);
    let group = footer.metadata().row_groups().get(part.group);
    let found = group.map_or(0, |group| u64::try_from(group.num_rows()).unwrap_or_default());
    let expected = data.groups.get(part.group).map_or(0, |group| group.rows);
    let (Some(group), true) = (group, found == expected) else {
        return Err(Error::Rows { file, group: part.group, found, expected });
    };
    let stored: Vec<Stored> =
        selected.iter().map(|column| locate(&footer, &column.field, &file)).collect::<Result<_>>()?;
    let schema = footer.parquet_schema();
    let root = |stored: &Stored| match stored {
        Stored::Flat(root) | Stored::List(root, _) => *root,
    };
    let roots: Vec<usize> = stored.iter().map(root).collect();
    let leaves: Vec<usize> =
        (0..schema.num_columns()).filter(|leaf| roots.contains(&schema.get_column_root_idx(*leaf))).collect();
    let fetched = Fetched::columns(dataset.store(), &data.path, group, &leaves, data.bytes)?;
    let origin = |column| Origin { file: file.clone(), group: part.group, column };

    let flat: Vec<usize> =
        stored.iter().filter_map(|s| if let Stored::Flat(root) = s { Some(*root) } else { None }).collect();
    let batch = if flat.is_empty() {
        None
    } else {
        Some(read_flat(&footer, fetched.clone(), &flat, part, origin(""))?)
    };
    let mut buffers = Vec::with_capacity(selected.len());
    for (column, stored) in selected.iter().zip(&stored) {
        let origin = origin(&column.field.name);
        buffers.push(match stored {
            Stored::List(_, leaf) => read_list(&footer, &fetched, *leaf, part, &column.field, origin)?,
            Stored::Flat(_) => {
                let array = batch.as_ref().and_then(|batch| batch.column_by_name(&column.field.name));
                let missing = || Error::Missing { column: column.field.name.clone(), file: file.clone() };
                values(array.ok_or_else(missing)?, &column.field, origin)?
            }
        });
    }
    Ok(buffers)
}

/// Finds a column in a file and checks that it is what the data set says.
fn locate(footer: &ArrowReaderMetadata, field: &Field, file: &str) -> Result<Stored> {
    let missing = || Error::Missing { column: field.name.clone(), file: file.to_owned() };
    let (root, found) = footer.schema().column_with_name(&field.name).ok_or_else(missing)?;
    let kind = found.data_type();
    let changed = || Error::Changed {
        column: field.name.clone(),
        file: file.to_owned(),
        found: kind.to_string(),
        expected: format!("{} of shape {:?}", field.element.name(), field.shape),
    };
    if let DataType::FixedSizeBinary(width) = kind
        && !field.shape.is_empty()
    {
        return if usize::try_from(*width) == Ok(field.width()) {
            Ok(Stored::Flat(root))
        } else {
            Err(changed())
        };
    }
    match shape_of(kind) {
        Some((element, list)) if element == field.element && list == (field.shape.len() == 1) => {
            if list {
                Ok(Stored::List(root, leaf_of(footer, root).ok_or_else(changed)?))
            } else {
                Ok(Stored::Flat(root))
            }
        }
        _ => Err(changed()),
    }
}

/// Reads the root columns `roots` of the part's rows.
fn read_flat(
    footer: &ArrowReaderMetadata,
    fetched: Fetched,
    roots: &[usize],
    part: &Part,
    origin: Origin<'_>,
) -> Result<RecordBatch> {
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let rows = count(part.rows.end - part.rows.start);
    let fail = |source| Error::Parquet { file: origin.file.clone(), group: part.group, source };
    let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(fetched, footer.clone())
        .with_projection(ProjectionMask::roots(footer.parquet_schema(), roots.iter().copied()))
        .with_row_groups(vec![part.group])
        .with_offset(count(part.rows.start))
        .with_limit(rows)
        .with_batch_size(rows)
        .build()
        .map_err(fail)?;
    let schema = arrow::array::RecordBatchReader::schema(&reader);
    let batches: Vec<RecordBatch> = reader.collect::<Result<_, _>>().map_err(|error| fail(error.into()))?;
    let batch = match <[RecordBatch; 1]>::try_from(batches) {
        Ok([batch]) => batch,
        Err(batches) => concat_batches(&schema, &batches).map_err(|error| fail(error.into()))?,
    };
    if batch.num_rows() == rows {
        Ok(batch)
    } else {
        let (found, expected) = (batch.num_rows() as u64, rows as u64);
        Err(Error::Rows { file: origin.file, group: part.group, found, expected })
    }
}

/// The values of an array, as elements of `field`.
fn values(array: &ArrayRef, field: &Field, origin: Origin<'_>) -> Result<Buffer> {
    let nulls = array.logical_null_count();
    if nulls > 0 {
        return Err(origin.nulls(nulls));
    }
    if field.element == Element::Bool && field.shape.is_empty() {
        return Ok(Buffer::from_iter(array.as_boolean().values().iter().map(u8::from)));
    }
    let wanted = match field.element {
        _ if !field.shape.is_empty() => None,
        Element::Float32 => Some(DataType::Float32),
        Element::Float64 => Some(DataType::Float64),
        Element::Int64 => Some(DataType::Int64),
        _ => None,
    };
    let converted = match wanted {
        Some(wanted) if *array.data_type() != wanted => cast(array, &wanted).map_err(|source| {
            Error::Arrow { column: origin.column.to_owned(), file: origin.file.clone(), source }
        })?,
        _ => array.clone(),
    };
    let data = converted.to_data();
    let row = match data.data_type() {
        DataType::FixedSizeBinary(width) => usize::try_from(*width).unwrap_or_default(),
        other => other.primitive_width().unwrap_or_default(),
    };
    let buffer = data.buffers().first().map(|b| b.slice_with_length(data.offset() * row, data.len() * row));
    let buffer = buffer.unwrap_or_else(|| Buffer::from(&[][..]));
    Ok(aligned(buffer))
}

/// The same bytes at an address that suits any element.
fn aligned(buffer: Buffer) -> Buffer {
    if buffer.as_ptr().align_offset(8) == 0 { buffer } else { Buffer::from(buffer.as_slice()) }
}

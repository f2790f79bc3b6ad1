// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole chunks decoded by the Parquet library: types and encodings that are rare.

use arrow::array::{Array, ArrayRef, AsArray, LargeBinaryArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::DataType;
use farandole_dataset::{Element, Part};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};

use crate::decode::Origin;
use crate::error::{Error, Result};
use crate::fill::filled;
use crate::footer::Fetched;
use crate::lists::read_list;
use crate::reader::Selected;
use crate::schema::shape_of;

/// Reads the rows of `part` of a root column with one leaf.
///
/// # Errors
/// Bytes that cannot be decoded, and nulls where none are filled.
pub(crate) fn read(
    footer: &ArrowReaderMetadata,
    fetched: Fetched,
    (root, leaf): (usize, usize),
    part: &Part,
    selected: &Selected,
    origin: &Origin<'_>,
) -> Result<Buffer> {
    let kind = footer.schema().fields().get(root).map(|field| field.data_type());
    if kind.and_then(shape_of).is_some_and(|(_, list)| list) {
        return read_list(footer, &fetched, leaf, part, &selected.field, origin);
    }
    let batch = read_flat(footer, fetched, root, part, origin)?;
    let array = batch.columns().first().ok_or(Error::Ended)?;
    values(array, selected, origin)
}

/// Reads the rows of `part` of a root column of texts or bytes.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_texts(
    footer: &ArrowReaderMetadata,
    fetched: Fetched,
    root: usize,
    part: &Part,
    origin: &Origin<'_>,
) -> Result<LargeBinaryArray> {
    let batch = read_flat(footer, fetched, root, part, origin)?;
    let array = batch.columns().first().ok_or(Error::Ended)?;
    let nulls = array.logical_null_count();
    if nulls > 0 {
        return Err(origin.nulls(nulls));
    }
    let array = cast(array, &DataType::LargeBinary).map_err(|source| Error::Arrow {
        column: origin.column.to_owned(),
        file: origin.file.to_owned(),
        source,
    })?;
    array.as_binary_opt().cloned().ok_or(Error::Ended)
}

fn read_flat(
    footer: &ArrowReaderMetadata,
    fetched: Fetched,
    root: usize,
    part: &Part,
    origin: &Origin<'_>,
) -> Result<RecordBatch> {
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let rows = count(part.rows.end - part.rows.start);
    let fail = |source| origin.parquet(source);
    let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(fetched, footer.clone())
        .with_projection(ProjectionMask::roots(footer.parquet_schema(), [root]))
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
        Err(Error::Rows { file: origin.file.to_owned(), group: part.group, found, expected })
    }
}

/// The values of an array, as elements of the column.
fn values(array: &ArrayRef, selected: &Selected, origin: &Origin<'_>) -> Result<Buffer> {
    let field = &selected.field;
    let nulls = array.logical_null_count();
    if nulls > 0 && selected.fill.is_none() {
        return Err(origin.nulls(nulls));
    }
    let bytes = if field.element == Element::Bool && field.shape.is_empty() {
        Buffer::from_iter(array.as_boolean().values().iter().map(u8::from))
    } else {
        let wanted = match field.element {
            _ if !field.shape.is_empty() => None,
            Element::Float32 => Some(DataType::Float32),
            Element::Float64 => Some(DataType::Float64),
            Element::Int64 => Some(DataType::Int64),
            _ => None,
        };
        let converted = match wanted {
            Some(wanted) if *array.data_type() != wanted => cast(array, &wanted).map_err(|source| {
                Error::Arrow { column: origin.column.to_owned(), file: origin.file.to_owned(), source }
            })?,
            _ => array.clone(),
        };
        let data = converted.to_data();
        let row = match data.data_type() {
            DataType::FixedSizeBinary(width) => usize::try_from(*width).unwrap_or_default(),
            other => other.primitive_width().unwrap_or_default(),
        };
        let buffer =
            data.buffers().first().map(|b| b.slice_with_length(data.offset() * row, data.len() * row));
        buffer.unwrap_or_else(|| Buffer::from(&[][..]))
    };
    if nulls == 0 {
        return Ok(bytes);
    }
    let width = field.width();
    let (fill, mut bytes) = (filled(selected, width), bytes.to_vec());
    for (slot, row) in bytes.chunks_exact_mut(width.max(1)).zip(0..array.len()) {
        if array.is_null(row) {
            slot.copy_from_slice(&fill);
        }
    }
    Ok(Buffer::from_vec(bytes))
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes whole chunks with the Parquet library, for rare types and encodings.

use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::DataType;
use farandole_dataset::PlanPart;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReaderBuilder, RowSelection,
};
use parquet::basic::{Compression, Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use crate::array_values::convert_array;
use crate::column::SelectedColumn;
use crate::error::{Error, Result};
use crate::footer::{FetchedRanges, FileFooter, chunk_byte_range, view_type};
use crate::leaf_values::{LeafRequest, read_leaf};
use crate::pages::{PageHeaderSizes, check_claimed_lengths, check_page_header_sizes};
use crate::schema::{element_and_list, is_promotable};
use crate::time_rule::TimeRule;
use crate::value_origin::ValueOrigin;
use crate::variable_length::VariableLengthValues;

/// Most rows that the library decodes at once; it allocates memory for them before it reads one.
const MAX_ROWS_PER_DECODE: usize = 1 << 20;

/// Limit for the strings of a part, because files state little about their size: this number of
/// bytes, or this multiple of the budget if that is more.
const VARIABLE_LENGTH_LIMITS: (usize, usize) = (64 << 20, 4);
/// Bytes of the length in front of each string of a dictionary.
const LENGTH_PREFIX_BYTES: usize = 4;

/// A column chunk for the library, and its memory limit.
pub(crate) struct ParquetLibraryChunk<'a> {
    pub(crate) footer: &'a FileFooter,
    pub(crate) fetched: FetchedRanges,
    pub(crate) leaf: usize,
    pub(crate) part: &'a PlanPart,
    /// Most decoded bytes of a page; see [`VARIABLE_LENGTH_LIMITS`].
    pub(crate) max_page_bytes: usize,
    pub(crate) origin: &'a ValueOrigin<'a>,
    /// Rule of dates and times.
    pub(crate) time: Option<TimeRule>,
}

/// Reads the rows of a part of a root column with a single leaf.
///
/// # Errors
/// Bytes that cannot be decoded, sizes above the limits, and nulls without a fill value.
pub(crate) fn read_column(
    source: ParquetLibraryChunk<'_>,
    selected: &SelectedColumn,
) -> Result<Buffer> {
    let schema = source.footer.parquet_schema();
    let root = schema.get_column_root_idx(source.leaf);
    let kind = source.footer.schema().fields().get(root).map(|field| field.data_type());
    let (element, is_list) = kind.and_then(element_and_list).unzip();
    let is_promoted = element.is_some_and(|from| is_promotable(from, selected.field.element));
    source.check_chunk_page_sizes()?;
    if is_list == Some(true)
        || is_promoted
        || schema.column(source.leaf).physical_type() == Type::INT96
    {
        let ParquetLibraryChunk { footer, fetched, leaf, part, origin, time, .. } = source;
        let request = LeafRequest { leaf, part, selected, origin, time };
        let kind = footer.value_type(root).ok_or(Error::Ended)?;
        return read_leaf(footer, &fetched, &request, &kind);
    }
    let (origin, time) = (source.origin, source.time);
    let footer = ArrowReaderMetadata::clone(source.footer);
    let batch = read_column_in_batches(source, footer, MAX_ROWS_PER_DECODE, usize::MAX)?;
    let array = batch.columns().first().ok_or(Error::Ended)?;
    convert_array(array, selected, time, origin)
}

/// Reads the rows of a part of a root column of strings or bytes.
///
/// # Errors
/// Like [`read_column`], and strings that take more than the limit.
pub(crate) fn read_variable_length(
    source: ParquetLibraryChunk<'_>,
) -> Result<VariableLengthValues> {
    let origin = source.origin;
    let (max_page_bytes, claims) = (source.max_page_bytes, source.check_chunk_page_sizes()?);
    let room =
        max_page_bytes.saturating_mul(VARIABLE_LENGTH_LIMITS.1).max(VARIABLE_LENGTH_LIMITS.0);
    let is_stored = source.chunk_compression() == Some(Compression::UNCOMPRESSED);
    // Views of uncompressed values keep all fetched bytes in memory.
    let stored =
        if is_stored || claims.has_uncompressed { source.fetched.total_bytes() } else { 0 };
    let dictionary =
        if is_stored { claims.dictionary.min(claims.stored) } else { claims.dictionary };
    let footer = source.metadata_with_view_types();
    if footer.is_some() && claims.entries > dictionary / LENGTH_PREFIX_BYTES {
        let what = format!("a dictionary claims {} values", claims.entries);
        return Err(origin.parquet_error(ParquetError::General(what)));
    }
    let views = claims.entries.saturating_mul(size_of::<u128>());
    let (batch, file) = match footer {
        // Views cost only the memory of their pages, even if dictionary values are repeated often.
        Some(footer) if !claims.has_prefixes && claims.bytes.max(views) <= room => {
            let footer = footer.map_err(|error| origin.parquet_error(error))?;
            (read_column_in_batches(source, footer, MAX_ROWS_PER_DECODE, usize::MAX)?, stored)
        }
        // Without views, every row may be as large as the dictionary or a whole page.
        _ => {
            let footer = ArrowReaderMetadata::clone(source.footer);
            let once = max_page_bytes / claims.dictionary.max(claims.longest).max(1);
            (read_column_in_batches(source, footer, once.clamp(1, MAX_ROWS_PER_DECODE), room)?, 0)
        }
    };
    let array = batch.columns().first().ok_or(Error::Ended)?;
    let nulls = array.logical_null_count();
    if nulls > 0 {
        return Err(origin.nulls_error(nulls));
    }
    let array = cast(array, &DataType::BinaryView).map_err(|source| Error::Arrow {
        column: origin.column.to_owned(),
        file: origin.file.to_owned(),
        source,
    })?;
    let values = array.as_binary_view_opt().ok_or(Error::Ended)?;
    let bytes = values.lengths().map(|length| length as usize).fold(0, usize::saturating_add);
    if bytes > room {
        Err(origin.parquet_error(over_budget_error(room, max_page_bytes)))
    } else {
        Ok(VariableLengthValues::new(values.clone(), file))
    }
}

/// Returns the error of strings that take more than `room` bytes, for a budget of `max_page_bytes`.
fn over_budget_error(room: usize, max_page_bytes: usize) -> ParquetError {
    ParquetError::General(format!(
        "its rows take more than {room} bytes, the byte budget is {max_page_bytes}"
    ))
}

impl ParquetLibraryChunk<'_> {
    fn chunk_metadata(&self) -> Option<&ColumnChunkMetaData> {
        self.footer.metadata().row_groups().get(self.part.group)?.columns().get(self.leaf)
    }

    fn chunk_compression(&self) -> Option<Compression> {
        self.chunk_metadata().map(ColumnChunkMetaData::compression)
    }

    /// Returns a footer with which the library leaves the column's values in their pages; `None`
    /// for a column that is not strings or bytes of any length.
    fn metadata_with_view_types(&self) -> Option<parquet::errors::Result<ArrowReaderMetadata>> {
        let root = self.footer.parquet_schema().get_column_root_idx(self.leaf);
        view_type(self.footer.schema().fields().get(root)?.data_type())?;
        Some(self.footer.metadata_with_view_types())
    }

    /// Checks the page headers of the chunk, which the library trusts.
    fn check_chunk_page_sizes(&self) -> Result<PageHeaderSizes> {
        let chunk = self.chunk_metadata().ok_or(Error::Ended)?;
        let range = chunk_byte_range(chunk);
        let bytes =
            self.fetched.slice_from(range.start, usize::try_from(range.end - range.start).ok());
        let bytes = bytes.map_err(|source| self.origin.parquet_error(source))?;
        let values = usize::try_from(chunk.num_values()).unwrap_or(usize::MAX);
        let wrong = |source| self.origin.parquet_error(source);
        let found = check_page_header_sizes(&bytes, values, self.max_page_bytes)
            .map_err(|what| wrong(ParquetError::General(what)))?;
        if found.has_length_lists {
            let column = self.footer.parquet_schema().column(self.leaf);
            let levels = (column.max_def_level(), column.max_rep_level());
            let pages = SerializedPageReader::new(Arc::new(self.fetched.clone()), chunk, 0, None);
            pages
                .and_then(|mut pages| {
                    check_claimed_lengths(&mut pages, levels, self.max_page_bytes)
                })
                .map_err(wrong)?;
        }
        Ok(found)
    }
}

/// Reads a column by `footer`, `once` rows at a time. All rows may take `room` bytes.
fn read_column_in_batches(
    source: ParquetLibraryChunk<'_>,
    footer: ArrowReaderMetadata,
    once: usize,
    room: usize,
) -> Result<RecordBatch> {
    let ParquetLibraryChunk { fetched, leaf, part, max_page_bytes, origin, .. } = source;
    let root = footer.parquet_schema().get_column_root_idx(leaf);
    let count = |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX);
    let rows = count(part.rows.end - part.rows.start);
    let fail = |source| origin.parquet_error(source);
    let projection = ProjectionMask::roots(footer.parquet_schema(), [root]);
    let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(fetched, footer)
        .with_projection(projection)
        .with_row_groups(vec![part.group])
        .with_batch_size(rows.min(once));
    let reader = match origin.stored_rows {
        [range] => reader.with_offset(count(range.start)).with_limit(rows),
        ranges => {
            let ranges = ranges.iter().map(|range| count(range.start)..count(range.end));
            let total = ranges.clone().next_back().map_or(0, |range| range.end);
            reader.with_row_selection(RowSelection::from_consecutive_ranges(ranges, total))
        }
    };
    let reader = reader.build().map_err(fail)?;
    let schema = arrow::array::RecordBatchReader::schema(&reader);
    let (mut batches, mut bytes) = (Vec::new(), 0_usize);
    for batch in reader {
        let batch = batch.map_err(|error| fail(error.into()))?;
        bytes = bytes.saturating_add(batch.get_array_memory_size());
        if bytes > room {
            return Err(fail(over_budget_error(room, max_page_bytes)));
        }
        batches.push(batch);
    }
    let batch = match <[RecordBatch; 1]>::try_from(batches) {
        Ok([batch]) => batch,
        Err(batches) => concat_batches(&schema, &batches).map_err(|error| fail(error.into()))?,
    };
    if batch.num_rows() == rows {
        Ok(batch)
    } else {
        let (found, expected) = (batch.num_rows() as u64, rows as u64);
        Err(Error::RowCountChanged {
            file: origin.file.to_owned(),
            group: part.group,
            found,
            expected,
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, BinaryArray};
    use farandole_store::Store;
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::{WriterProperties, WriterVersion};

    use super::*;
    use crate::dataset::ParquetDataset;
    use crate::decode::DecodePlan;

    const BYTES: usize = 1 << 10;
    const BUDGET: usize = 64 << 20;

    /// Returns a value that no codec can compress.
    fn noise(row: usize) -> Vec<u8> {
        let mut state = row as u64 + 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        };
        (0..BYTES).map(|_| next()).collect()
    }

    /// Creates a data set of two columns of a thousand values, with a few values in each page.
    fn written(url: &str) -> ParquetDataset {
        let column =
            || -> ArrayRef { Arc::new(BinaryArray::from_iter_values((0..1000).map(noise))) };
        let batch = RecordBatch::try_from_iter([("a", column()), ("b", column())]).unwrap();
        let properties = WriterProperties::builder()
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_compression(Compression::SNAPPY)
            .set_dictionary_enabled(false)
            .set_encoding(parquet::basic::Encoding::PLAIN)
            .set_data_page_row_count_limit(20)
            .set_write_batch_size(10);
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build())).unwrap();
        writer.write(&batch).unwrap();
        Store::open(url).unwrap().write("0.parquet", writer.into_inner().unwrap().into()).unwrap();
        ParquetDataset::open_directory(url).unwrap()
    }

    fn selected(dataset: &ParquetDataset) -> Vec<SelectedColumn> {
        let names = ["a", "b"].map(str::to_owned);
        let one = |field: crate::column::BatchField| {
            let out = field.element;
            SelectedColumn {
                field,
                output_element: out,
                fill: None,
                allow_nan: true,
                padding: None,
            }
        };
        dataset.select_fields(Some(&names)).unwrap().into_iter().map(one).collect()
    }

    fn part() -> PlanPart {
        PlanPart {
            file: 0,
            group: 0,
            rows: 500..510,
            shuffle: None,
            first_step: 0,
            last_step: 0,
            taken_rows: 10,
        }
    }

    #[test]
    fn a_page_that_is_not_compressed_keeps_all_fetched_bytes_or_is_copied() {
        let dataset = written("memory://library-stored");
        let (selected, part) = (selected(&dataset), part());
        let plan = DecodePlan::new(&dataset, &selected, &part, BUDGET).unwrap();
        let fetched = plan.fetch_all_columns(&dataset, &part).unwrap();
        assert!(fetched.total_bytes() > 2000 * BYTES);
        let found = plan
            .decode_variable_length(&dataset, (&selected[0], 0), &part, Some(&fetched))
            .unwrap();
        assert_eq!(found.values.value(3), noise(503));
        // A file begins with four bytes that belong to no chunk.
        let file = fetched.slice_from(4, None).unwrap();
        let lies_in_file = file.as_ptr_range().contains(&found.values.value(3).as_ptr());
        let held = usize::try_from(found.held_bytes).unwrap();
        assert!(
            if lies_in_file { held >= fetched.total_bytes() } else { held < 16 * BYTES },
            "{held} of {} bytes, in the file: {lies_in_file}",
            fetched.total_bytes()
        );
        assert!(!lies_in_file, "ten values are copied");
    }

    #[test]
    fn the_columns_of_a_file_share_one_schema_of_views() {
        let dataset = written("memory://library-views");
        let footer = dataset.file_footer(0).unwrap();
        let part = part();
        let schema = |leaf: usize| {
            let stored_rows = std::slice::from_ref(&(500..510));
            let origin = ValueOrigin { file: "0.parquet", group: 0, column: "a", stored_rows };
            let fetched = FetchedRanges::new(dataset.store(), "0.parquet", &[], 0).unwrap();
            let source = ParquetLibraryChunk {
                footer: &footer,
                fetched,
                leaf,
                part: &part,
                max_page_bytes: BUDGET,
                origin: &origin,
                time: None,
            };
            Arc::clone(source.metadata_with_view_types().unwrap().unwrap().schema())
        };
        let (first, second) = (schema(0), schema(1));
        assert!(
            first.fields().iter().all(|field| *field.data_type() == DataType::BinaryView),
            "{first}"
        );
        assert!(Arc::ptr_eq(&first, &second));
    }
}

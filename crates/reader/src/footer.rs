// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Footers of files, and column chunks that are fetched before they are decoded.

use std::any::Any;
use std::ops::{Deref, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use arrow::datatypes::{DataType, Field, Fields, Schema};
use bytes::{Buf, Bytes, buf::Reader as BytesReader};
use farandole_store::Store;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader,
};
use parquet::file::reader::{ChunkReader, Length};

use crate::arrow_schema_hints::{ArrowSchemaHint, arrow_schema_hints};
use crate::error::{Error, Result};
use crate::time_rule::{LegacySparkCalendar, TimeRule};

/// Bytes of the first read at the end of a file, which usually contain the footer.
const FOOTER_READ_BYTES: u64 = 64 << 10;

/// Most values or decoded bytes that one byte of a file can represent: every page has a header, and
/// the numbers in it have 31 bits.
const MAX_VALUES_PER_BYTE: i64 = i32::MAX as i64;

/// The footer of a file with its two schemas. The second schema is built once, because that takes
/// time for every column of the file.
#[derive(Debug)]
pub(crate) struct FileFooter {
    read: ArrowReaderMetadata,
    views: OnceLock<Result<ArrowReaderMetadata, String>>,
    hints: Vec<ArrowSchemaHint>,
    calendar: LegacySparkCalendar,
}

impl Deref for FileFooter {
    type Target = ArrowReaderMetadata;

    fn deref(&self) -> &ArrowReaderMetadata {
        &self.read
    }
}

impl FileFooter {
    /// Wraps a footer as it was read.
    pub(crate) fn new(read: ArrowReaderMetadata) -> Self {
        let file = read.metadata().file_metadata();
        let (hints, calendar) = (arrow_schema_hints(file), LegacySparkCalendar::from_footer(file));
        Self { read, views: OnceLock::new(), hints, calendar }
    }

    /// Returns the facts about a root column that only the schema of Arrow states.
    pub(crate) fn hint(&self, root: usize) -> Option<&ArrowSchemaHint> {
        self.hints.get(root)
    }

    /// Returns the type of the values of a root column, within a list or not.
    pub(crate) fn value_type(&self, root: usize) -> Option<DataType> {
        let kind = match self.read.schema().fields().get(root)?.data_type() {
            DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
                item.data_type()
            }
            kind => kind,
        };
        let unit = self.hint(root).and_then(|hint| hint.duration);
        Some(unit.map_or_else(|| kind.clone(), DataType::Duration))
    }

    /// Returns the rule of a leaf's dates or times; `None` for other values.
    pub(crate) fn time_rule(&self, leaf: usize) -> Option<TimeRule> {
        let schema = self.read.parquet_schema();
        let kind = self.value_type(schema.get_column_root_idx(leaf))?;
        TimeRule::of_column(&kind, schema.column(leaf).physical_type(), self.calendar)
    }

    /// Returns the footer with a schema of views, with which the library leaves strings and bytes
    /// in the memory of their pages.
    ///
    /// # Errors
    /// A column that the library cannot read as views.
    pub(crate) fn metadata_with_view_types(&self) -> parquet::errors::Result<ArrowReaderMetadata> {
        let made = self.views.get_or_init(|| {
            self.build_metadata_with_view_types().map_err(|error| error.to_string())
        });
        made.clone().map_err(ParquetError::General)
    }

    fn build_metadata_with_view_types(&self) -> parquet::errors::Result<ArrowReaderMetadata> {
        let schema = self.read.schema();
        let view = |field: &Arc<Field>| match view_type(field.data_type()) {
            Some(kind) => Arc::new(field.as_ref().clone().with_data_type(kind)),
            None => Arc::clone(field),
        };
        let fields: Fields = schema.fields().iter().map(view).collect();
        let schema = Schema::new_with_metadata(fields, schema.metadata().clone());
        let options =
            ArrowReaderOptions::new().with_skip_arrow_metadata(true).with_schema(Arc::new(schema));
        ArrowReaderMetadata::try_new(Arc::clone(self.read.metadata()), options)
    }
}

/// Returns the view type of strings or bytes of any length; `None` for other types.
pub(crate) fn view_type(kind: &DataType) -> Option<DataType> {
    match kind {
        DataType::Utf8 => Some(DataType::Utf8View),
        DataType::Binary => Some(DataType::BinaryView),
        _ => None,
    }
}

/// Reads the footer of a file of `bytes` bytes.
pub(crate) fn load_footer(store: &Store, path: &str, bytes: u64) -> Result<FileFooter> {
    // A damaged footer may cause a panic in the library.
    catch_unwind(AssertUnwindSafe(|| read_footer(store, path, bytes))).unwrap_or_else(|panic| {
        Err(Error::Corrupt {
            file: store.display_path(path),
            group: 0,
            message: panic_message(panic.as_ref()),
        })
    })
}

/// Returns the message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

fn read_footer(store: &Store, path: &str, bytes: u64) -> Result<FileFooter> {
    let file = || store.display_path(path);
    let mut parser = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Skip);
    let mut length = FOOTER_READ_BYTES.min(bytes);
    loop {
        let tail = read_range(store, path, bytes - length..bytes)?;
        match parser.try_parse_sized(&tail, bytes) {
            Ok(()) => break,
            Err(ParquetError::NeedMoreData(needed))
                // A damaged length must neither read past the file nor ask for ever.
                if needed as u64 > length && needed as u64 <= bytes =>
            {
                length = needed as u64;
            }
            Err(source) => return Err(Error::Footer { file: file(), source }),
        }
    }
    let fail = |source| Error::Footer { file: file(), source };
    let metadata = parser.finish().map_err(fail)?;
    check_footer_plausible(&metadata, bytes).map_err(|what| fail(ParquetError::General(what)))?;
    // Only the Parquet types decide, so that files of different writers agree.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    ArrowReaderMetadata::try_new(metadata.into(), options).map(FileFooter::new).map_err(fail)
}

/// Checks that a footer is plausible for a file of `bytes` bytes: chunks and indexes are inside the
/// file, columns have as many values as rows, and no chunk decodes to more bytes than the format
/// allows.
fn check_footer_plausible(metadata: &ParquetMetaData, bytes: u64) -> Result<(), String> {
    let inside = |from: i64, length: i64| {
        let (from, length) = (u64::try_from(from).ok(), u64::try_from(length).ok());
        from.zip(length)
            .and_then(|(from, length)| from.checked_add(length))
            .is_some_and(|end| end <= bytes)
    };
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let rows = group.num_rows();
        if u32::try_from(rows).is_err() {
            return Err(format!("row group {number} claims {rows} rows"));
        }
        for chunk in group.columns() {
            let wrong = |what: &str, value: i64| {
                Err(format!(
                    "row group {number}, column {}, claims {what}: {value}",
                    chunk.column_path()
                ))
            };
            let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
            let (size, values) = (chunk.compressed_size(), chunk.num_values());
            if !inside(start, size) || !inside(chunk.data_page_offset(), 0) {
                return wrong("bytes outside of the file from", start);
            }
            if let (Some(at), Some(length)) =
                (chunk.offset_index_offset(), chunk.offset_index_length())
                && !inside(at, length.into())
            {
                return wrong("an index outside of the file at", at);
            }
            let most = size.saturating_mul(MAX_VALUES_PER_BYTE);
            let flat = chunk.column_descr().max_rep_level() == 0;
            if values < rows || values > most || (flat && values != rows) {
                return wrong("another number of values than it can have", values);
            }
            if !(0..=most).contains(&chunk.uncompressed_size()) {
                return wrong("a size that nothing decodes to", chunk.uncompressed_size());
            }
        }
    }
    Ok(())
}

fn read_range(store: &Store, path: &str, range: Range<u64>) -> Result<Bytes> {
    Ok(store.read_ranges(path, std::slice::from_ref(&range))?.pop().unwrap_or_default())
}

/// Bytes of some ranges of one file.
#[derive(Clone, Debug)]
pub(crate) struct FetchedRanges {
    pieces: Vec<(u64, Bytes)>,
    length: u64,
}

impl FetchedRanges {
    /// Fetches ranges; a remote store joins neighbouring ones.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn new(
        store: &Store,
        path: &str,
        ranges: &[Range<u64>],
        length: u64,
    ) -> Result<Self> {
        let pieces = store.read_ranges(path, ranges)?;
        Ok(Self { pieces: ranges.iter().map(|range| range.start).zip(pieces).collect(), length })
    }

    /// Returns the bytes of all pieces.
    pub(crate) fn total_bytes(&self) -> usize {
        self.pieces.iter().map(|(_, piece)| piece.len()).sum()
    }

    /// Returns bytes from an offset: `length` of them, or all up to the end of the piece.
    ///
    /// # Errors
    /// The bytes were not fetched.
    pub(crate) fn slice_from(
        &self,
        start: u64,
        length: Option<usize>,
    ) -> parquet::errors::Result<Bytes> {
        let outside = || {
            ParquetError::EOF(format!("bytes from {start} on are outside of the column's chunk"))
        };
        let (_, piece, skip) = self
            .pieces
            .iter()
            .filter_map(|(first, piece)| {
                Some((first, piece, usize::try_from(start.checked_sub(*first)?).ok()?))
            })
            .max_by_key(|(first, ..)| **first)
            .ok_or_else(outside)?;
        let end = length
            .map_or(Some(piece.len()), |length| skip.checked_add(length))
            .filter(|end| (skip..=piece.len()).contains(end));
        Ok(piece.slice(skip..end.ok_or_else(outside)?))
    }
}

impl Length for FetchedRanges {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for FetchedRanges {
    type T = BytesReader<Bytes>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(self.slice_from(start, None)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        self.slice_from(start, Some(length))
    }
}

/// Returns the byte range of a column chunk.
pub(crate) fn chunk_byte_range(chunk: &ColumnChunkMetaData) -> Range<u64> {
    let (start, length) = chunk.byte_range();
    start..start.saturating_add(length)
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes one file of one partition: training or validation data.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use farandole_dataset::{DataFile, ElementType, ManifestColumn, RowGroup, chunk_checksum};
use farandole_store::{Store, StoreUpload};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as Codec, ZstdLevel};
use parquet::file::metadata::{ColumnChunkMetaData, KeyValue};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::spec::PageCompression;
use crate::summary::SplitFileSummary;

/// Decoded bytes of a row group.
// Small, because a shuffled epoch mixes the rows of several groups, which it holds in memory.
const ROW_GROUP_BYTES: u64 = 4 << 20;

/// Fewest row groups of a partition with enough rows. Batches are held back until the partition has
/// so many.
// The lanes of ranks consist of row groups: with fewer, ranks decode the same rows.
const MIN_ROW_GROUPS: u64 = 8;

/// Fewest rows of a row group in a small partition.
const MIN_ROW_GROUP_ROWS: u64 = 32;

/// Settings of a file.
#[derive(Clone, Debug)]
pub(crate) struct SplitFileSpec {
    pub(crate) store: Store,
    pub(crate) file: String,
    pub(crate) schema: SchemaRef,
    pub(crate) columns: Vec<ManifestColumn>,
    pub(crate) compression: PageCompression,
    /// Columns that are always compressed.
    pub(crate) compressed_columns: Vec<String>,
    pub(crate) row_group_rows: Option<u64>,
}

/// A file being written.
pub(crate) struct SplitFileWriter {
    file_spec: SplitFileSpec,
    waiting: VecDeque<RecordBatch>,
    waiting_rows: u64,
    target: Option<u64>,
    writer: Option<ArrowWriter<HashingSink>>,
    groups: Vec<RowGroup>,
    chunks: Vec<Vec<u32>>,
    row_bytes: u64,
}

impl SplitFileWriter {
    pub(crate) fn new(shape: SplitFileSpec) -> Self {
        let (target, row_bytes) = (shape.row_group_rows, 1);
        Self {
            file_spec: shape,
            waiting: VecDeque::new(),
            waiting_rows: 0,
            target,
            writer: None,
            groups: Vec::new(),
            chunks: Vec::new(),
            row_bytes,
        }
    }

    /// Appends rows.
    pub(crate) fn push(&mut self, batch: RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let rows = batch.num_rows() as u64;
        // Only the first batch decides, so all row groups of a file have the same number of rows.
        if self.groups.is_empty() && self.waiting.is_empty() {
            self.row_bytes = self.measure_row_bytes(&batch);
        }
        let target = *self.target.get_or_insert((ROW_GROUP_BYTES / self.row_bytes).max(1));
        self.waiting_rows += rows;
        self.waiting.push_back(batch);
        // A partition that ends before is small, and `finish_file` gives it smaller groups.
        let hold = if self.groups.is_empty() && self.file_spec.row_group_rows.is_none() {
            MIN_ROW_GROUPS
        } else {
            1
        };
        if self.waiting_rows >= hold * target {
            while self.waiting_rows >= target {
                self.write_row_group(target)?;
            }
        }
        Ok(())
    }

    /// Returns the decoded bytes of one row: exact for fixed widths, estimated from the batch for
    /// others.
    fn measure_row_bytes(&self, batch: &RecordBatch) -> u64 {
        let varying = |number: usize| {
            batch.columns().get(number).map_or(0, |array| {
                array.get_array_memory_size() as u64 / batch.num_rows().max(1) as u64
            })
        };
        let widths = self.file_spec.columns.iter().enumerate();
        widths
            .map(|(number, column)| column.row_width().unwrap_or_else(|| varying(number)))
            .sum::<u64>()
            .max(1)
    }

    fn write_row_group(&mut self, rows: u64) -> Result<()> {
        // Not opened before there are rows: a side without rows leaves no file.
        if self.writer.is_none() {
            self.writer = Some(self.open_writer()?);
        }
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let path = self.file_spec.store.display_path(&self.file_spec.file);
        let fail = |source| Error::Parquet { path: path.clone(), source };
        let mut missing = rows;
        while missing > 0 {
            let Some(batch) = self.waiting.pop_front() else { break };
            let take = missing.min(batch.num_rows() as u64);
            let count = usize::try_from(take).unwrap_or(usize::MAX);
            writer.write(&batch.slice(0, count)).map_err(fail)?;
            if count < batch.num_rows() {
                self.waiting.push_front(batch.slice(count, batch.num_rows() - count));
            }
            missing -= take;
        }
        writer.flush().map_err(fail)?;
        // The library buffers bytes, and the checksums need all of the group in the sink.
        writer.sync().map_err(|source| fail(source.into()))?;
        let ranges: Vec<(u64, u64)> = writer
            .flushed_row_groups()
            .last()
            .map(|group| group.columns().iter().map(ColumnChunkMetaData::byte_range).collect())
            .unwrap_or_default();
        self.chunks.push(writer.inner_mut().finish_group_checksums(&ranges));
        self.waiting_rows -= rows - missing;
        self.groups
            .push(RowGroup { rows: rows - missing, bytes: (rows - missing) * self.row_bytes });
        Ok(())
    }

    fn open_writer(&self) -> Result<ArrowWriter<HashingSink>> {
        let shape = &self.file_spec;
        let mut properties = WriterProperties::builder()
            .set_compression(match shape.compression {
                PageCompression::None => Codec::UNCOMPRESSED,
                PageCompression::Snappy => Codec::SNAPPY,
                PageCompression::Lz4 => Codec::LZ4_RAW,
                PageCompression::Zstd => Codec::ZSTD(ZstdLevel::default()),
            })
            .set_statistics_enabled(EnabledStatistics::Chunk)
            // Plain pages of fixed-size values are decoded by copying.
            .set_dictionary_enabled(false)
            // `write_row_group` ends the groups; the library would split them at its own limit.
            .set_max_row_group_row_count(None)
            .set_created_by(concat!("farandole ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![KeyValue::new(
                "farandole.format".to_owned(),
                "1".to_owned(),
            )]));
        // Strings often repeat. Images and lists of numbers do not: their dictionary would fill up
        // and be discarded.
        for column in shape.columns.iter().filter(|column| column.element == ElementType::Utf8) {
            properties = properties
                .set_column_dictionary_enabled(ColumnPath::new(vec![column.name.clone()]), true);
        }
        // With another setting, all columns are compressed already, by the codec of the user.
        if shape.compression == PageCompression::None {
            for name in &shape.compressed_columns {
                properties = properties
                    .set_column_compression(ColumnPath::new(vec![name.clone()]), Codec::LZ4_RAW);
            }
        }
        let upload = shape.store.start_upload(&shape.file)?;
        let sink = HashingSink { upload, hash: Xxh3::new(), group: Vec::new(), start: 0 };
        ArrowWriter::try_new(sink, Arc::clone(&shape.schema), Some(properties.build())).map_err(
            |source| Error::Parquet { path: shape.store.display_path(&shape.file), source },
        )
    }

    /// Completes the file; returns `None` if there were no rows.
    pub(crate) fn finish_file(mut self) -> Result<Option<SplitFileSummary>> {
        let rows = self.waiting_rows;
        let pieces = match (self.file_spec.row_group_rows, self.groups.is_empty()) {
            (Some(_), _) | (None, false) => 1,
            (None, true) => (rows / MIN_ROW_GROUP_ROWS).clamp(1, MIN_ROW_GROUPS),
        };
        for piece in 0..pieces {
            let edge = |piece: u64| rows * piece / pieces;
            if edge(piece) < edge(piece + 1) {
                self.write_row_group(edge(piece + 1) - edge(piece))?;
            }
        }
        let Some(writer) = self.writer.take() else { return Ok(None) };
        let path = self.file_spec.store.display_path(&self.file_spec.file);
        let sink = writer.into_inner().map_err(|source| Error::Parquet { path, source })?;
        let checksum = format!("{:016x}", sink.hash.digest());
        let bytes = sink.upload.finish()?;
        let mut file = DataFile::new(self.file_spec.file, bytes, self.groups);
        (file.checksum, file.chunks) = (Some(checksum), self.chunks);
        for column in &mut self.file_spec.columns {
            // A manifest has a minimum and maximum only if both are finite.
            if !column
                .min
                .zip(column.max)
                .is_some_and(|(low, high)| low.is_finite() && high.is_finite())
            {
                (column.min, column.max) = (None, None);
            }
        }
        Ok(Some(SplitFileSummary { file, columns: self.file_spec.columns }))
    }

    /// Returns the columns, for statistics.
    pub(crate) fn columns_mut(&mut self) -> &mut [ManifestColumn] {
        &mut self.file_spec.columns
    }
}

/// Passes bytes to the store and hashes them: the whole file, and each column chunk of every row
/// group.
struct HashingSink {
    upload: StoreUpload,
    hash: Xxh3,
    /// Bytes since the end of the last row group; the first one is byte `start` of the file.
    group: Vec<u8>,
    start: u64,
}

impl HashingSink {
    /// Returns the checksums of the chunks at `ranges` in the row group that has just ended.
    fn finish_group_checksums(&mut self, ranges: &[(u64, u64)]) -> Vec<u32> {
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let sum = |(start, length): &(u64, u64)| {
            let from = start.checked_sub(self.start).map_or(usize::MAX, at);
            let chunk =
                self.group.get(from..).and_then(|rest| rest.get(..at(*length))).unwrap_or_default();
            chunk_checksum(chunk)
        };
        let sums = ranges.iter().map(sum).collect();
        self.start += self.group.len() as u64;
        self.group.clear();
        sums
    }
}

impl io::Write for HashingSink {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        self.hash.update(piece);
        self.group.extend_from_slice(piece);
        // The upload keeps the bytes until its part is full, and `piece` is only borrowed.
        self.upload.write_piece(Bytes::copy_from_slice(piece)).map_err(io::Error::other)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

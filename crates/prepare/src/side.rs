// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One file of one partition: training or validation.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use farandole_dataset::{Column, DataFile, Element, RowGroup, checksum};
use farandole_store::{Store, Upload};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as Codec, ZstdLevel};
use parquet::file::metadata::{ColumnChunkMetaData, KeyValue};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::spec::Compression;
use crate::summary::SideSummary;

/// Decoded bytes of a row group.
const GROUP_BYTES: u64 = 4 << 20;

/// Row groups that a partition has at least, when it has rows enough: batches are held back until
/// it is known.
const GROUPS: u64 = 8;

/// A small partition is not cut finer than this.
const GROUP_ROWS: u64 = 32;

/// Sizes of row groups.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) store: Store,
    pub(crate) file: String,
    pub(crate) schema: SchemaRef,
    pub(crate) columns: Vec<Column>,
    pub(crate) compression: Compression,
    /// Columns that are compressed in any case.
    pub(crate) packed: Vec<String>,
    pub(crate) row_group_rows: Option<u64>,
}

/// A file being written.
pub(crate) struct Side {
    shape: Shape,
    waiting: VecDeque<RecordBatch>,
    waiting_rows: u64,
    target: Option<u64>,
    writer: Option<ArrowWriter<Sink>>,
    groups: Vec<RowGroup>,
    chunks: Vec<Vec<u32>>,
    row_bytes: u64,
}

impl Side {
    pub(crate) fn new(shape: Shape) -> Self {
        let (target, row_bytes) = (shape.row_group_rows, 1);
        Self {
            shape,
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
        if self.groups.is_empty() && self.waiting.is_empty() {
            self.row_bytes = self.measure(&batch);
        }
        let target = *self.target.get_or_insert((GROUP_BYTES / self.row_bytes).max(1));
        self.waiting_rows += rows;
        self.waiting.push_back(batch);
        let hold =
            if self.groups.is_empty() && self.shape.row_group_rows.is_none() { GROUPS } else { 1 };
        if self.waiting_rows >= hold * target {
            while self.waiting_rows >= target {
                self.write_group(target)?;
            }
        }
        Ok(())
    }

    /// Decoded bytes of one row: exact for fixed widths, by the first batch for others.
    fn measure(&self, batch: &RecordBatch) -> u64 {
        let varying = |number: usize| {
            batch.columns().get(number).map_or(0, |array| {
                array.get_array_memory_size() as u64 / batch.num_rows().max(1) as u64
            })
        };
        let widths = self.shape.columns.iter().enumerate();
        widths
            .map(|(number, column)| column.width().unwrap_or_else(|| varying(number)))
            .sum::<u64>()
            .max(1)
    }

    fn write_group(&mut self, rows: u64) -> Result<()> {
        if self.writer.is_none() {
            self.writer = Some(self.open()?);
        }
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let path = self.shape.store.name_of(&self.shape.file);
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
        writer.sync().map_err(|source| fail(source.into()))?;
        let ranges: Vec<(u64, u64)> = writer
            .flushed_row_groups()
            .last()
            .map(|group| group.columns().iter().map(ColumnChunkMetaData::byte_range).collect())
            .unwrap_or_default();
        self.chunks.push(writer.inner_mut().end_group(&ranges));
        self.waiting_rows -= rows - missing;
        self.groups
            .push(RowGroup { rows: rows - missing, bytes: (rows - missing) * self.row_bytes });
        Ok(())
    }

    fn open(&self) -> Result<ArrowWriter<Sink>> {
        let shape = &self.shape;
        let mut properties = WriterProperties::builder()
            .set_compression(match shape.compression {
                Compression::None => Codec::UNCOMPRESSED,
                Compression::Snappy => Codec::SNAPPY,
                Compression::Lz4 => Codec::LZ4_RAW,
                Compression::Zstd => Codec::ZSTD(ZstdLevel::default()),
            })
            .set_statistics_enabled(EnabledStatistics::Chunk)
            .set_dictionary_enabled(false)
            .set_max_row_group_row_count(None)
            .set_created_by(concat!("farandole ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![KeyValue::new(
                "farandole.format".to_owned(),
                "1".to_owned(),
            )]));
        // Words repeat themselves; images and lists of numbers do not, and fill a dictionary that
        // is then given up.
        for column in shape.columns.iter().filter(|column| column.element == Element::Utf8) {
            properties = properties
                .set_column_dictionary_enabled(ColumnPath::new(vec![column.name.clone()]), true);
        }
        if shape.compression == Compression::None {
            for name in &shape.packed {
                properties = properties
                    .set_column_compression(ColumnPath::new(vec![name.clone()]), Codec::LZ4_RAW);
            }
        }
        let upload = shape.store.upload(&shape.file)?;
        let sink = Sink { upload, hash: Xxh3::new(), group: Vec::new(), start: 0 };
        ArrowWriter::try_new(sink, Arc::clone(&shape.schema), Some(properties.build()))
            .map_err(|source| Error::Parquet { path: shape.store.name_of(&shape.file), source })
    }

    /// Completes the file; `None` when there were no rows.
    pub(crate) fn finish(mut self) -> Result<Option<SideSummary>> {
        let rows = self.waiting_rows;
        let pieces = match (self.shape.row_group_rows, self.groups.is_empty()) {
            (Some(_), _) | (None, false) => 1,
            (None, true) => (rows / GROUP_ROWS).clamp(1, GROUPS),
        };
        for piece in 0..pieces {
            let edge = |piece: u64| rows * piece / pieces;
            if edge(piece) < edge(piece + 1) {
                self.write_group(edge(piece + 1) - edge(piece))?;
            }
        }
        let Some(writer) = self.writer.take() else { return Ok(None) };
        let path = self.shape.store.name_of(&self.shape.file);
        let sink = writer.into_inner().map_err(|source| Error::Parquet { path, source })?;
        let checksum = format!("{:016x}", sink.hash.digest());
        let bytes = sink.upload.finish()?;
        let mut file = DataFile::new(self.shape.file, bytes, self.groups);
        (file.checksum, file.chunks) = (Some(checksum), self.chunks);
        for column in &mut self.shape.columns {
            // Of one batch they hold for all: no manifest has others.
            if !column
                .min
                .zip(column.max)
                .is_some_and(|(low, high)| low.is_finite() && high.is_finite())
            {
                (column.min, column.max) = (None, None);
            }
        }
        Ok(Some(SideSummary { file, columns: self.shape.columns }))
    }

    /// Columns, to note statistics in.
    pub(crate) fn columns(&mut self) -> &mut [Column] {
        &mut self.shape.columns
    }
}

/// Hashes the bytes that go to the store: the whole file, and each column's chunk of every row
/// group.
struct Sink {
    upload: Upload,
    hash: Xxh3,
    /// Bytes since the last row group ended, of which the first is the file's byte `start`.
    group: Vec<u8>,
    start: u64,
}

impl Sink {
    /// Checksums of the chunks at `ranges` of the row group that has just ended.
    fn end_group(&mut self, ranges: &[(u64, u64)]) -> Vec<u32> {
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let sum = |(start, length): &(u64, u64)| {
            let from = start.checked_sub(self.start).map_or(usize::MAX, at);
            let chunk =
                self.group.get(from..).and_then(|rest| rest.get(..at(*length))).unwrap_or_default();
            checksum(chunk)
        };
        let sums = ranges.iter().map(sum).collect();
        self.start += self.group.len() as u64;
        self.group.clear();
        sums
    }
}

impl io::Write for Sink {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        self.hash.update(piece);
        self.group.extend_from_slice(piece);
        self.upload.write(Bytes::copy_from_slice(piece)).map_err(io::Error::other)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

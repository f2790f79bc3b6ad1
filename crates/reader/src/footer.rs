// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Footers, and column chunks fetched ahead of their decoding.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::{Buf, Bytes, buf::Reader as BytesReader};
use farandole_store::Store;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataReader};
use parquet::file::reader::{ChunkReader, Length};

use crate::error::{Error, Result};

/// What is read at once in the hope that the footer is in it.
const TAIL: u64 = 64 << 10;

/// Reads the footer of a file of `bytes` bytes.
pub(crate) fn load(store: &Store, path: &str, bytes: u64) -> Result<ArrowReaderMetadata> {
    // A damaged footer may make the library panic.
    catch_unwind(AssertUnwindSafe(|| parse(store, path, bytes))).unwrap_or_else(|panic| {
        Err(Error::Corrupt { file: store.name_of(path), group: 0, message: last_words(panic.as_ref()) })
    })
}

/// What a panic said.
pub(crate) fn last_words(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

fn parse(store: &Store, path: &str, bytes: u64) -> Result<ArrowReaderMetadata> {
    let file = || store.name_of(path);
    let mut parser = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Skip);
    let mut length = TAIL.min(bytes);
    loop {
        let tail = fetch_one(store, path, bytes - length..bytes)?;
        match parser.try_parse_sized(&tail, bytes) {
            Ok(()) => break,
            Err(ParquetError::NeedMoreData(needed)) if needed as u64 > length && needed as u64 <= bytes => {
                length = needed as u64;
            }
            Err(source) => return Err(Error::Footer { file: file(), source }),
        }
    }
    let fail = |source| Error::Footer { file: file(), source };
    let metadata = parser.finish().map_err(fail)?;
    // The Parquet types alone decide, so that files of different writers agree.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    ArrowReaderMetadata::try_new(metadata.into(), options).map_err(fail)
}

fn fetch_one(store: &Store, path: &str, range: Range<u64>) -> Result<Bytes> {
    Ok(store.read_ranges(path, std::slice::from_ref(&range))?.pop().unwrap_or_default())
}

/// Bytes of some ranges of one file.
#[derive(Clone, Debug)]
pub(crate) struct Fetched {
    pieces: Vec<(u64, Bytes)>,
    length: u64,
}

impl Fetched {
    /// Fetches ranges; a remote store joins what is near.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn new(store: &Store, path: &str, ranges: &[Range<u64>], length: u64) -> Result<Self> {
        let pieces = store.read_ranges(path, ranges)?;
        Ok(Self { pieces: ranges.iter().map(|range| range.start).zip(pieces).collect(), length })
    }

    /// Bytes from an offset on: so many, or all that there are.
    ///
    /// # Errors
    /// They were not fetched.
    pub(crate) fn slice(&self, start: u64, length: Option<usize>) -> parquet::errors::Result<Bytes> {
        let outside =
            || ParquetError::EOF(format!("bytes from {start} on are outside of the column's chunk"));
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

impl Length for Fetched {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Fetched {
    type T = BytesReader<Bytes>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(self.slice(start, None)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        self.slice(start, Some(length))
    }
}

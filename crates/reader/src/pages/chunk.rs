// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes the entries of a column chunk into a buffer.

use std::ops::Range;

use arrow::buffer::MutableBuffer;
use bytes::Bytes;
use parquet::basic::Compression;

use crate::error::Error;
use crate::pages::codec::PageCodec;
use crate::pages::hybrid::{
    HybridDecoder, HybridSegment, decode_levels, single_run_value, unpack_bits,
};
use crate::pages::page_index::PageIndex;
use crate::pages::thrift::{PageHeader, PageKind, read_page_header};
use crate::pages::values::{PageDictionary, ValueStorage, decode_byte_stream_split, decode_plain};
use crate::pool::grow_buffer;

const PLAIN_ENCODING: i64 = 0;
const PLAIN_DICTIONARY_ENCODING: i64 = 2;
const RLE_ENCODING: i64 = 3;
const RLE_DICTIONARY_ENCODING: i64 = 8;
const BYTE_STREAM_SPLIT_ENCODING: i64 = 9;

/// Allowance for the bytes of a page beyond its values and levels.
const PAGE_SLACK_BYTES: usize = 64 << 10;

/// Reason why a chunk cannot be decoded here.
pub(crate) enum ChunkDecodeError {
    /// Unsupported here; the library can decode it.
    Unsupported,
    /// Damaged bytes.
    Broken(String),
    /// Rows whose length differs from the expected one.
    Ragged,
    /// Bytes that cannot be fetched.
    Fetch(Error),
}

/// Definition and repetition levels of a column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LevelLayout {
    /// Definition level of a value.
    pub(crate) defined: u32,
    /// Lowest definition level at which an element exists, null or not.
    pub(crate) present: u32,
    /// Repetition level of further elements in a row; 0 without lists.
    pub(crate) repeated: u32,
    /// Number of elements in a row.
    pub(crate) length: usize,
}

/// The chunk to decode.
pub(crate) struct ChunkRequest<'a> {
    pub(crate) compression: Compression,
    pub(crate) bytes: Range<u64>,
    /// Entries of the whole chunk.
    pub(crate) total: usize,
    /// Entries to decode.
    pub(crate) wanted: Range<usize>,
    pub(crate) stored: ValueStorage,
    pub(crate) levels: LevelLayout,
    /// Positions of the pages; `None` if the whole chunk is fetched.
    pub(crate) page_index: Option<&'a PageIndex>,
    /// Bytes that replace a null value.
    pub(crate) fill: &'a [u8],
    /// Most decoded bytes of a page.
    pub(crate) max_page_bytes: usize,
}

/// Memory that decoding reuses.
#[derive(Default)]
pub(crate) struct DecodeScratch {
    codec: Option<(Compression, PageCodec)>,
    page: Vec<u8>,
    dictionary: PageDictionary,
    definitions: Vec<u32>,
    compact: MutableBuffer,
}

/// The parts of a data page.
struct DataPage<'a> {
    header: &'a PageHeader,
    definitions: &'a [u8],
    repetitions: &'a [u8],
    values: &'a [u8],
    /// Number of its first entry within the chunk.
    first: usize,
}

fn broken_chunk_error(what: &str) -> ChunkDecodeError {
    ChunkDecodeError::Broken(what.to_owned())
}

/// Decodes the wanted entries to the start of `out`. `fetch` returns the bytes from an offset on.
/// Returns the number of nulls.
pub(crate) fn decode_chunk(
    chunk: &ChunkRequest<'_>,
    fetch: impl Fn(u64) -> Result<Bytes, Error>,
    bench: &mut DecodeScratch,
    out: &mut [u8],
) -> Result<usize, ChunkDecodeError> {
    match &bench.codec {
        Some((compression, _)) if *compression == chunk.compression => {}
        _ => {
            let codec = PageCodec::new(chunk.compression).ok_or(ChunkDecodeError::Unsupported)?;
            bench.codec = Some((chunk.compression, codec));
        }
    }
    bench.dictionary.clear();
    let (mut entry, mut nulls) = (0_usize, 0_usize);
    let mut read = |at: u64,
                    entry: usize,
                    bench: &mut DecodeScratch|
     -> Result<(usize, u64), ChunkDecodeError> {
        let bytes = fetch(at).map_err(ChunkDecodeError::Fetch)?;
        let (header, length) = read_page_header(&bytes)
            .map_err(|_| broken_chunk_error("there is no page header where one should be"))?;
        let body = bytes.get(length..length.saturating_add(header.compressed));
        let body = body.ok_or_else(|| broken_chunk_error("a page leaves its chunk"))?;
        let next = at + (length + body.len()) as u64;
        if header.crc.is_some_and(|crc| crc != crc32fast::hash(body)) {
            return Err(broken_chunk_error("the checksum of a page is wrong"));
        }
        nulls += decode_page(chunk, &header, body, entry, bench, out)?;
        let entries = if matches!(header.kind, PageKind::Data | PageKind::DataV2 { .. }) {
            header.entries
        } else {
            0
        };
        Ok((entries, next))
    };
    if let Some(page_index) = chunk.page_index {
        if let Some(dictionary) = &page_index.dictionary {
            read(dictionary.start, 0, bench)?;
        }
        let wanted = chunk.wanted.start as u64..chunk.wanted.end as u64;
        for page in page_index.pages_containing(&wanted) {
            let first = usize::try_from(page.first)
                .map_err(|_| broken_chunk_error("a page beyond all bounds"))?;
            entry = first + read(page.offset, first, bench)?.0;
        }
    } else {
        let mut at = chunk.bytes.start;
        while at < chunk.bytes.end && entry < chunk.wanted.end {
            let (entries, next) = read(at, entry, bench)?;
            (entry, at) = (entry + entries, next);
        }
    }
    if entry < chunk.wanted.end {
        Err(broken_chunk_error("there are fewer values than announced"))
    } else {
        Ok(nulls)
    }
}

/// Decodes one page; returns the number of nulls among the wanted entries.
fn decode_page(
    chunk: &ChunkRequest<'_>,
    header: &PageHeader,
    body: &[u8],
    first: usize,
    bench: &mut DecodeScratch,
    out: &mut [u8],
) -> Result<usize, ChunkDecodeError> {
    if header.kind == PageKind::Other {
        return Ok(0);
    }
    // A damaged header must not allocate more memory than the values of the chunk can need.
    let most = chunk
        .total
        .saturating_mul(chunk.stored.plain_encoded_size(1).max(chunk.stored.value_width()) + 8)
        + PAGE_SLACK_BYTES;
    if header.entries > chunk.total || header.uncompressed > most {
        return Err(broken_chunk_error("a page claims more than its chunk can hold"));
    }
    // Decoded levels take four bytes each.
    if header.entries > chunk.max_page_bytes / 4 || header.uncompressed > chunk.max_page_bytes {
        return Err(broken_chunk_error("a page claims more than the byte budget"));
    }
    let DecodeScratch { codec, page, dictionary, definitions, compact } = bench;
    let Some((_, codec)) = codec else { return Err(ChunkDecodeError::Unsupported) };
    if let PageKind::DataV2 { definition, repetition, compressed } = header.kind {
        let (repetitions, rest) = split_levels(body, repetition)?;
        let (levels, rest) = split_levels(rest, definition)?;
        let length = header.uncompressed.saturating_sub(definition.saturating_add(repetition));
        let values = if compressed && length > 0 {
            decompress_page(codec, page, rest, length)?
        } else {
            rest
        };
        let data = DataPage { header, definitions: levels, repetitions, values, first };
        check_row_lengths(chunk, &data)?;
        return write_wanted_values(chunk, &data, dictionary, definitions, compact, out);
    }
    if header.kind == PageKind::Dictionary {
        if let PLAIN_ENCODING | PLAIN_DICTIONARY_ENCODING = header.encoding
            && let Some(place) =
                dictionary.reserve_verbatim(chunk.stored, header.entries, header.uncompressed)
        {
            return codec
                .decompress_into(body, place)
                .map(|()| 0)
                .map_err(ChunkDecodeError::Broken);
        }
        let whole = decompress_page(codec, page, body, header.uncompressed)?;
        return match header.encoding {
            PLAIN_ENCODING | PLAIN_DICTIONARY_ENCODING
                if dictionary.load_plain_dictionary(chunk.stored, whole, header.entries) =>
            {
                Ok(0)
            }
            PLAIN_ENCODING | PLAIN_DICTIONARY_ENCODING => {
                Err(broken_chunk_error("a dictionary is shorter than it says"))
            }
            _ => Err(ChunkDecodeError::Unsupported),
        };
    }
    let whole = decompress_page(codec, page, body, header.uncompressed)?;
    let (repetitions, rest) =
        take_prefixed_levels(whole, chunk.levels.repeated > 0, header.repetition_encoding)?;
    let (levels, values) =
        take_prefixed_levels(rest, chunk.levels.defined > 0, header.definition_encoding)?;
    let data = DataPage { header, definitions: levels, repetitions, values, first };
    check_row_lengths(chunk, &data)?;
    write_wanted_values(chunk, &data, dictionary, definitions, compact, out)
}

/// Decompresses a page into `page`; returns uncompressed bytes where they are.
fn decompress_page<'a>(
    codec: &mut PageCodec,
    page: &'a mut Vec<u8>,
    from: &'a [u8],
    length: usize,
) -> Result<&'a [u8], ChunkDecodeError> {
    if codec.is_none() {
        return if from.len() == length {
            Ok(from)
        } else {
            Err(broken_chunk_error("a page has another length than it says"))
        };
    }
    if page.len() < length {
        page.resize(length, 0);
    }
    let to = page.get_mut(..length).unwrap_or_default();
    codec.decompress_into(from, to).map_err(ChunkDecodeError::Broken)?;
    Ok(to)
}

fn split_levels(bytes: &[u8], count: usize) -> Result<(&[u8], &[u8]), ChunkDecodeError> {
    bytes.split_at_checked(count).ok_or_else(|| broken_chunk_error("levels leave their page"))
}

/// Splits off levels that are preceded by their length, if the column has such levels.
fn take_prefixed_levels(
    bytes: &[u8],
    any: bool,
    encoding: i64,
) -> Result<(&[u8], &[u8]), ChunkDecodeError> {
    if !any {
        return Ok((&[], bytes));
    }
    if encoding != RLE_ENCODING {
        return Err(ChunkDecodeError::Unsupported);
    }
    let (count, rest) = split_levels(bytes, 4)?;
    let count = u32::from_le_bytes(count.try_into().unwrap_or_default());
    split_levels(rest, usize::try_from(count).unwrap_or(usize::MAX))
}

fn level_bit_width(most: u32) -> u32 {
    u32::BITS - most.leading_zeros()
}

/// Checks that every row of a page has the expected length: rows start at multiples of it and
/// nowhere else.
fn check_row_lengths(
    chunk: &ChunkRequest<'_>,
    data: &DataPage<'_>,
) -> Result<(), ChunkDecodeError> {
    let (repeated, length) = (chunk.levels.repeated, chunk.levels.length.max(1));
    if repeated == 0 {
        return Ok(());
    }
    let few = || broken_chunk_error("there are fewer repetition levels than values");
    let mut pieces =
        HybridDecoder::new(data.repetitions, level_bit_width(repeated)).ok_or_else(few)?;
    let (mut at, end) = (data.first, data.first + data.header.entries);
    let mut block = [0_u32; 256];
    while at < end {
        let even = match pieces.next_segment().ok_or_else(few)? {
            HybridSegment::Run { value, count } => {
                let count = count.min(end - at);
                let starts = (at + count).div_ceil(length) - at.div_ceil(length);
                at += count;
                (value == 0 && starts == count) || (value == repeated && starts == 0)
            }
            HybridSegment::Packed { bytes, count } => {
                let count = count.min(end - at);
                let mut wrong = 0;
                for start in (0..count).step_by(block.len()) {
                    let some = block.get_mut(..count.min(start + 256) - start).unwrap_or_default();
                    unpack_bits(bytes, pieces.bit_width(), start, some);
                    for (level, place) in some.iter().zip(at + start..) {
                        wrong |= level ^ if place % length == 0 { 0 } else { repeated };
                    }
                }
                at += count;
                wrong == 0
            }
        };
        if !even {
            return Err(ChunkDecodeError::Ragged);
        }
    }
    Ok(())
}

/// Writes the wanted values of a page; returns the number of nulls.
fn write_wanted_values(
    chunk: &ChunkRequest<'_>,
    data: &DataPage<'_>,
    dictionary: &PageDictionary,
    definitions: &mut Vec<u32>,
    compact: &mut MutableBuffer,
    out: &mut [u8],
) -> Result<usize, ChunkDecodeError> {
    let entries = data.header.entries;
    let from = chunk.wanted.start.max(data.first);
    let to = chunk.wanted.end.min(data.first + entries);
    if from >= to {
        return Ok(0);
    }
    let (skip, at, count) = (from - data.first, from - chunk.wanted.start, to - from);
    let (defined, width) = (chunk.levels.defined, chunk.stored.value_width());
    let all = defined == 0
        || single_run_value(data.definitions, level_bit_width(defined), entries) == Some(defined);
    let slots = out.get_mut(at * width..(at + count) * width);
    let slots = slots.ok_or_else(|| broken_chunk_error("more values than announced"))?;
    if all {
        decode_values(chunk, data, dictionary, skip, slots)?;
        return Ok(0);
    }
    if !decode_levels(data.definitions, level_bit_width(defined), entries, definitions) {
        return Err(broken_chunk_error("there are fewer definition levels than values"));
    }
    if definitions.iter().any(|level| *level < chunk.levels.present) {
        return Err(ChunkDecodeError::Ragged);
    }
    let full = |levels: &[u32]| levels.iter().filter(|level| **level == defined).count();
    let wanted = definitions.get(skip..skip + count).unwrap_or_default();
    let (before, many) = (full(definitions.get(..skip).unwrap_or_default()), full(wanted));
    if many == count {
        decode_values(chunk, data, dictionary, before, slots)?;
        return Ok(0);
    }
    grow_buffer(compact, many * width);
    let packed = compact.as_slice_mut().get_mut(..many * width).unwrap_or_default();
    decode_values(chunk, data, dictionary, before, packed)?;
    let mut next = packed.chunks_exact(width);
    for (slot, level) in slots.chunks_exact_mut(width).zip(wanted) {
        let value = if *level == defined { next.next() } else { Some(chunk.fill) };
        if let Some(value) = value.filter(|value| value.len() == width) {
            slot.copy_from_slice(value);
        }
    }
    Ok(count - many)
}

/// Writes values of a page, from value number `skip` on, until `slots` is full.
fn decode_values(
    chunk: &ChunkRequest<'_>,
    data: &DataPage<'_>,
    dictionary: &PageDictionary,
    skip: usize,
    slots: &mut [u8],
) -> Result<(), ChunkDecodeError> {
    let stored = chunk.stored;
    let count = slots.len() / stored.value_width().max(1);
    if let RLE_DICTIONARY_ENCODING | PLAIN_DICTIONARY_ENCODING = data.header.encoding {
        let found = dictionary.look_up_values(data.values, skip, slots);
        return if found {
            Ok(())
        } else {
            Err(broken_chunk_error("indices leave their dictionary or their page"))
        };
    }
    let enough = match (data.header.encoding, stored) {
        (PLAIN_ENCODING, _) => decode_plain(stored, data.values, skip, slots),
        (BYTE_STREAM_SPLIT_ENCODING, ValueStorage::Verbatim(width)) => {
            decode_byte_stream_split(width, data.values, skip, slots)
        }
        (RLE_ENCODING, ValueStorage::Bits) => {
            let mut bits = Vec::with_capacity(skip + count);
            let enough =
                decode_levels(data.values.get(4..).unwrap_or_default(), 1, skip + count, &mut bits);
            for (slot, bit) in slots.iter_mut().zip(bits.iter().skip(skip)) {
                *slot = u8::from(*bit == 1);
            }
            enough
        }
        _ => return Err(ChunkDecodeError::Unsupported),
    };
    if enough { Ok(()) } else { Err(broken_chunk_error("a page has fewer values than it says")) }
}

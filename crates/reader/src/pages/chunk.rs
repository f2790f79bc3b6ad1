// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Entries of a column chunk, decoded into a buffer.

use std::ops::Range;

use arrow::buffer::MutableBuffer;
use bytes::Bytes;
use parquet::basic::Compression;

use crate::error::Error;
use crate::pages::codec::Codec;
use crate::pages::hybrid::{Hybrid, Piece, levels, uniform, unpack};
use crate::pages::spots::Spots;
use crate::pages::thrift::{PageHeader, PageKind, page_header};
use crate::pages::values::{Dictionary, Stored, plain, split};
use crate::pool::room;

const PLAIN: i64 = 0;
const PLAIN_DICTIONARY: i64 = 2;
const RLE: i64 = 3;
const RLE_DICTIONARY: i64 = 8;
const BYTE_STREAM_SPLIT: i64 = 9;

/// Bytes of a page beyond what its values and levels can take.
const SLACK: usize = 64 << 10;

/// The reason why a chunk cannot be decoded here.
pub(crate) enum Trouble {
    /// The library can do it.
    Unsupported,
    /// The bytes are wrong.
    Broken(String),
    /// Rows of other lengths than announced.
    Ragged,
    /// Bytes that cannot be had.
    Fetch(Error),
}

/// Depth of values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Levels {
    /// Definition level of a value.
    pub(crate) defined: u32,
    /// Definition level from which on there is an element, null or not.
    pub(crate) present: u32,
    /// Repetition level of a further element of the same row; 0 without lists.
    pub(crate) repeated: u32,
    /// Elements of a row.
    pub(crate) length: usize,
}

/// The chunk to decode.
pub(crate) struct Chunk<'a> {
    pub(crate) compression: Compression,
    pub(crate) bytes: Range<u64>,
    /// Entries of the whole chunk.
    pub(crate) total: usize,
    /// The wanted rows.
    pub(crate) wanted: Range<usize>,
    pub(crate) stored: Stored,
    pub(crate) levels: Levels,
    /// Places of pages, if not all are at hand.
    pub(crate) spots: Option<&'a Spots>,
    /// Replacement of a null, as bytes of a value.
    pub(crate) fill: &'a [u8],
    /// Bytes that a page may take.
    pub(crate) most: usize,
}

/// Memory that decoding uses again and again.
#[derive(Default)]
pub(crate) struct Bench {
    codec: Option<(Compression, Codec)>,
    page: Vec<u8>,
    dictionary: Dictionary,
    definitions: Vec<u32>,
    compact: MutableBuffer,
}

/// The parts of a data page.
struct Data<'a> {
    header: &'a PageHeader,
    definitions: &'a [u8],
    repetitions: &'a [u8],
    values: &'a [u8],
    /// Its first entry.
    first: usize,
}

fn broken(what: &str) -> Trouble {
    Trouble::Broken(what.to_owned())
}

/// Decodes the wanted entries to the start of `out`; `fetch` gives the bytes from an offset on.
/// Returns how many nulls there were.
pub(crate) fn decode(
    chunk: &Chunk<'_>,
    fetch: impl Fn(u64) -> Result<Bytes, Error>,
    bench: &mut Bench,
    out: &mut [u8],
) -> Result<usize, Trouble> {
    match &bench.codec {
        Some((compression, _)) if *compression == chunk.compression => {}
        _ => {
            let codec = Codec::new(chunk.compression).ok_or(Trouble::Unsupported)?;
            bench.codec = Some((chunk.compression, codec));
        }
    }
    bench.dictionary.clear();
    let (mut entry, mut nulls) = (0_usize, 0_usize);
    let mut read = |at: u64, entry: usize, bench: &mut Bench| -> Result<(usize, u64), Trouble> {
        let bytes = fetch(at).map_err(Trouble::Fetch)?;
        let (header, length) = page_header(&bytes)
            .map_err(|_| broken("there is no page header where one should be"))?;
        let body = bytes.get(length..length.saturating_add(header.compressed));
        let body = body.ok_or_else(|| broken("a page leaves its chunk"))?;
        let next = at + (length + body.len()) as u64;
        if header.crc.is_some_and(|crc| crc != crc32fast::hash(body)) {
            return Err(broken("the checksum of a page is wrong"));
        }
        nulls += page(chunk, &header, body, entry, bench, out)?;
        let entries = if matches!(header.kind, PageKind::Data | PageKind::DataV2 { .. }) {
            header.entries
        } else {
            0
        };
        Ok((entries, next))
    };
    if let Some(spots) = chunk.spots {
        if let Some(dictionary) = &spots.dictionary {
            read(dictionary.start, 0, bench)?;
        }
        let wanted = chunk.wanted.start as u64..chunk.wanted.end as u64;
        for spot in spots.of(&wanted) {
            let first =
                usize::try_from(spot.first).map_err(|_| broken("a page beyond all bounds"))?;
            entry = first + read(spot.offset, first, bench)?.0;
        }
    } else {
        let mut at = chunk.bytes.start;
        while at < chunk.bytes.end && entry < chunk.wanted.end {
            let (entries, next) = read(at, entry, bench)?;
            (entry, at) = (entry + entries, next);
        }
    }
    if entry < chunk.wanted.end {
        Err(broken("there are fewer values than announced"))
    } else {
        Ok(nulls)
    }
}

/// Takes in one page; returns its nulls among the wanted entries.
fn page(
    chunk: &Chunk<'_>,
    header: &PageHeader,
    body: &[u8],
    first: usize,
    bench: &mut Bench,
    out: &mut [u8],
) -> Result<usize, Trouble> {
    if header.kind == PageKind::Other {
        return Ok(0);
    }
    // No damaged header may cost more memory than its values.
    let most =
        chunk.total.saturating_mul(chunk.stored.plain_bytes(1).max(chunk.stored.width()) + 8)
            + SLACK;
    if header.entries > chunk.total || header.uncompressed > most {
        return Err(broken("a page claims more than its chunk can hold"));
    }
    // Levels take four bytes each.
    if header.entries > chunk.most / 4 || header.uncompressed > chunk.most {
        return Err(broken("a page claims more than the byte budget"));
    }
    let Bench { codec, page, dictionary, definitions, compact } = bench;
    let Some((_, codec)) = codec else { return Err(Trouble::Unsupported) };
    if let PageKind::DataV2 { definition, repetition, compressed } = header.kind {
        let (repetitions, rest) = split_off(body, repetition)?;
        let (levels, rest) = split_off(rest, definition)?;
        let length = header.uncompressed.saturating_sub(definition.saturating_add(repetition));
        let values =
            if compressed && length > 0 { inflate(codec, page, rest, length)? } else { rest };
        let data = Data { header, definitions: levels, repetitions, values, first };
        regular(chunk, &data)?;
        return put(chunk, &data, dictionary, definitions, compact, out);
    }
    if header.kind == PageKind::Dictionary {
        if let PLAIN | PLAIN_DICTIONARY = header.encoding
            && let Some(place) = dictionary.place(chunk.stored, header.entries, header.uncompressed)
        {
            return codec.decompress(body, place).map(|()| 0).map_err(Trouble::Broken);
        }
        let whole = inflate(codec, page, body, header.uncompressed)?;
        return match header.encoding {
            PLAIN | PLAIN_DICTIONARY if dictionary.fill(chunk.stored, whole, header.entries) => {
                Ok(0)
            }
            PLAIN | PLAIN_DICTIONARY => Err(broken("a dictionary is shorter than it says")),
            _ => Err(Trouble::Unsupported),
        };
    }
    let whole = inflate(codec, page, body, header.uncompressed)?;
    let (repetitions, rest) =
        counted(whole, chunk.levels.repeated > 0, header.repetition_encoding)?;
    let (levels, values) = counted(rest, chunk.levels.defined > 0, header.definition_encoding)?;
    let data = Data { header, definitions: levels, repetitions, values, first };
    regular(chunk, &data)?;
    put(chunk, &data, dictionary, definitions, compact, out)
}

/// Opens what is packed, into `page`; what is not stays where it is.
fn inflate<'a>(
    codec: &mut Codec,
    page: &'a mut Vec<u8>,
    from: &'a [u8],
    length: usize,
) -> Result<&'a [u8], Trouble> {
    if codec.is_none() {
        return if from.len() == length {
            Ok(from)
        } else {
            Err(broken("a page has another length than it says"))
        };
    }
    if page.len() < length {
        page.resize(length, 0);
    }
    let to = page.get_mut(..length).unwrap_or_default();
    codec.decompress(from, to).map_err(Trouble::Broken)?;
    Ok(to)
}

fn split_off(bytes: &[u8], count: usize) -> Result<(&[u8], &[u8]), Trouble> {
    bytes.split_at_checked(count).ok_or_else(|| broken("levels leave their page"))
}

/// Takes levels off that tell their length first, where there are any.
fn counted(bytes: &[u8], any: bool, encoding: i64) -> Result<(&[u8], &[u8]), Trouble> {
    if !any {
        return Ok((&[], bytes));
    }
    if encoding != RLE {
        return Err(Trouble::Unsupported);
    }
    let (count, rest) = split_off(bytes, 4)?;
    let count = u32::from_le_bytes(count.try_into().unwrap_or_default());
    split_off(rest, usize::try_from(count).unwrap_or(usize::MAX))
}

fn bits(most: u32) -> u32 {
    u32::BITS - most.leading_zeros()
}

/// Checks that every row of a page has the announced length: rows start at its multiples, and
/// nowhere else.
fn regular(chunk: &Chunk<'_>, data: &Data<'_>) -> Result<(), Trouble> {
    let (repeated, length) = (chunk.levels.repeated, chunk.levels.length.max(1));
    if repeated == 0 {
        return Ok(());
    }
    let few = || broken("there are fewer repetition levels than values");
    let mut pieces = Hybrid::new(data.repetitions, bits(repeated)).ok_or_else(few)?;
    let (mut at, end) = (data.first, data.first + data.header.entries);
    let mut block = [0_u32; 256];
    while at < end {
        let even = match pieces.piece().ok_or_else(few)? {
            Piece::Run { value, count } => {
                let count = count.min(end - at);
                let starts = (at + count).div_ceil(length) - at.div_ceil(length);
                at += count;
                (value == 0 && starts == count) || (value == repeated && starts == 0)
            }
            Piece::Packed { bytes, count } => {
                let count = count.min(end - at);
                let mut wrong = 0;
                for start in (0..count).step_by(block.len()) {
                    let some = block.get_mut(..count.min(start + 256) - start).unwrap_or_default();
                    unpack(bytes, pieces.width(), start, some);
                    for (level, place) in some.iter().zip(at + start..) {
                        wrong |= level ^ if place % length == 0 { 0 } else { repeated };
                    }
                }
                at += count;
                wrong == 0
            }
        };
        if !even {
            return Err(Trouble::Ragged);
        }
    }
    Ok(())
}

/// Writes the wanted values of a page; returns how many were null.
fn put(
    chunk: &Chunk<'_>,
    data: &Data<'_>,
    dictionary: &Dictionary,
    definitions: &mut Vec<u32>,
    compact: &mut MutableBuffer,
    out: &mut [u8],
) -> Result<usize, Trouble> {
    let entries = data.header.entries;
    let from = chunk.wanted.start.max(data.first);
    let to = chunk.wanted.end.min(data.first + entries);
    if from >= to {
        return Ok(0);
    }
    let (skip, at, count) = (from - data.first, from - chunk.wanted.start, to - from);
    let (defined, width) = (chunk.levels.defined, chunk.stored.width());
    let all = defined == 0 || uniform(data.definitions, bits(defined), entries) == Some(defined);
    let slots = out.get_mut(at * width..(at + count) * width);
    let slots = slots.ok_or_else(|| broken("more values than announced"))?;
    if all {
        values(chunk, data, dictionary, skip, slots)?;
        return Ok(0);
    }
    if !levels(data.definitions, bits(defined), entries, definitions) {
        return Err(broken("there are fewer definition levels than values"));
    }
    if definitions.iter().any(|level| *level < chunk.levels.present) {
        return Err(Trouble::Ragged);
    }
    let full = |levels: &[u32]| levels.iter().filter(|level| **level == defined).count();
    let wanted = definitions.get(skip..skip + count).unwrap_or_default();
    let (before, many) = (full(definitions.get(..skip).unwrap_or_default()), full(wanted));
    if many == count {
        values(chunk, data, dictionary, before, slots)?;
        return Ok(0);
    }
    room(compact, many * width);
    let packed = compact.as_slice_mut().get_mut(..many * width).unwrap_or_default();
    values(chunk, data, dictionary, before, packed)?;
    let mut next = packed.chunks_exact(width);
    for (slot, level) in slots.chunks_exact_mut(width).zip(wanted) {
        let value = if *level == defined { next.next() } else { Some(chunk.fill) };
        if let Some(value) = value.filter(|value| value.len() == width) {
            slot.copy_from_slice(value);
        }
    }
    Ok(count - many)
}

/// Writes values of a page from its value `skip` on, until `slots` are full.
fn values(
    chunk: &Chunk<'_>,
    data: &Data<'_>,
    dictionary: &Dictionary,
    skip: usize,
    slots: &mut [u8],
) -> Result<(), Trouble> {
    let stored = chunk.stored;
    let count = slots.len() / stored.width().max(1);
    if let RLE_DICTIONARY | PLAIN_DICTIONARY = data.header.encoding {
        let found = dictionary.look_up(data.values, skip, slots);
        return if found {
            Ok(())
        } else {
            Err(broken("indices leave their dictionary or their page"))
        };
    }
    let enough = match (data.header.encoding, stored) {
        (PLAIN, _) => plain(stored, data.values, skip, slots),
        (BYTE_STREAM_SPLIT, Stored::Same(width)) => split(width, data.values, skip, slots),
        (RLE, Stored::Bits) => {
            let mut bits = Vec::with_capacity(skip + count);
            let enough =
                levels(data.values.get(4..).unwrap_or_default(), 1, skip + count, &mut bits);
            for (slot, bit) in slots.iter_mut().zip(bits.iter().skip(skip)) {
                *slot = u8::from(*bit == 1);
            }
            enough
        }
        _ => return Err(Trouble::Unsupported),
    };
    if enough { Ok(()) } else { Err(broken("a page has fewer values than it says")) }
}

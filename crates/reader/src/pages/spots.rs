// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Positions of a chunk's pages, so that a part of it can be fetched: from the offset index, or
//! else by walking from header to header.

use std::ops::Range;

use farandole_store::Store;
use parquet::file::metadata::ColumnChunkMetaData;

use crate::pages::thrift::{PageKind, Wrong, offset_index, page_header};

/// Bytes read in the hope that a header is in them.
const WINDOW: u64 = 512;

/// A header longer than this is none.
const LONGEST: u64 = 1 << 20;

/// One data page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// First byte of its header.
    pub(crate) offset: u64,
    /// Bytes of header and page.
    pub(crate) length: u64,
    /// Its first entry, counted in the chunk.
    pub(crate) first: u64,
}

/// The pages of a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spots {
    pub(crate) dictionary: Option<Range<u64>>,
    pub(crate) pages: Vec<Spot>,
}

impl Spots {
    /// The pages with some of these entries.
    pub(crate) fn of(&self, entries: &Range<u64>) -> &[Spot] {
        let first =
            self.pages.partition_point(|page| page.first <= entries.start).saturating_sub(1);
        let end = self.pages.partition_point(|page| page.first < entries.end);
        self.pages.get(first..end).unwrap_or_default()
    }
}

/// The reason why pages cannot be found.
pub(crate) enum Lost {
    /// The store.
    Store(farandole_store::Error),
    /// The bytes.
    Broken(String),
}

/// Finds the pages of `chunk` in a file; `per_row` entries make a row.
pub(crate) fn find(
    store: &Store,
    path: &str,
    chunk: &ColumnChunkMetaData,
    per_row: u64,
) -> Result<Spots, Lost> {
    let (start, length) = chunk.byte_range();
    let end = start.saturating_add(length);
    if let (Some(at), Some(bytes)) = (chunk.offset_index_offset(), chunk.offset_index_length())
        && let (Ok(at), Ok(bytes)) = (u64::try_from(at), u64::try_from(bytes))
    {
        let index = fetch(store, path, at..at.saturating_add(bytes))?;
        let found = offset_index(&index)
            .map_err(|_| Lost::Broken("its offset index is damaged".to_owned()))?;
        let pages: Vec<Spot> = found
            .iter()
            .map(|page| Spot {
                offset: page.offset,
                length: page.length,
                first: page.first_row.saturating_mul(per_row),
            })
            .collect();
        let inside = |page: &Spot| {
            page.offset >= start
                && page.offset.checked_add(page.length).is_some_and(|last| last <= end)
        };
        let rising = pages
            .windows(2)
            .all(|pair| pair[0].first < pair[1].first && pair[0].offset < pair[1].offset);
        let (Some(first), true) = (pages.first(), rising && pages.iter().all(inside)) else {
            return Err(Lost::Broken("its offset index contradicts its chunk".to_owned()));
        };
        if first.first != 0 {
            return Err(Lost::Broken(
                "its offset index does not start at the first row".to_owned(),
            ));
        }
        let dictionary = (first.offset > start).then_some(start..first.offset);
        return Ok(Spots { dictionary, pages });
    }
    walk(store, path, start..end)
}

fn walk(store: &Store, path: &str, chunk: Range<u64>) -> Result<Spots, Lost> {
    let mut spots = Spots::default();
    let (mut at, mut entries) = (chunk.start, 0_u64);
    while at < chunk.end {
        let mut window = WINDOW;
        let (header, length) = loop {
            let bytes = fetch(store, path, at..at.saturating_add(window).min(chunk.end))?;
            match page_header(&bytes) {
                Ok(found) => break found,
                Err(Wrong::Short) if window < LONGEST && at + window < chunk.end => window *= 8,
                Err(_) => {
                    return Err(Lost::Broken(format!("there is no page header at byte {at}")));
                }
            }
        };
        let bytes = length as u64 + header.compressed as u64;
        let next = at.checked_add(bytes).filter(|next| *next <= chunk.end);
        let next =
            next.ok_or_else(|| Lost::Broken(format!("the page at byte {at} leaves its chunk")))?;
        match header.kind {
            PageKind::Dictionary => spots.dictionary = Some(at..next),
            PageKind::Data | PageKind::DataV2 { .. } => {
                spots.pages.push(Spot { offset: at, length: bytes, first: entries });
                entries += header.entries as u64;
            }
            PageKind::Other => {}
        }
        at = next;
    }
    Ok(spots)
}

fn fetch(store: &Store, path: &str, range: Range<u64>) -> Result<bytes::Bytes, Lost> {
    let found = store.read_ranges(path, std::slice::from_ref(&range)).map_err(Lost::Store)?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// Bytes that have to be fetched for these entries.
pub(crate) fn ranges(spots: &Spots, entries: &Range<u64>) -> Vec<Range<u64>> {
    let pages = spots.of(entries);
    let data = pages
        .first()
        .zip(pages.last())
        .map(|(first, last)| first.offset..last.offset + last.length);
    spots.dictionary.clone().into_iter().chain(data).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_in_the_pages_around_them() {
        let page = |number: u64| Spot { offset: 100 + number * 10, length: 10, first: number * 5 };
        let spots = Spots { dictionary: Some(50..100), pages: (0..4).map(page).collect() };
        assert_eq!(ranges(&spots, &(0..20)), [50..100, 100..140]);
        assert_eq!(ranges(&spots, &(5..10)), [50..100, 110..120]);
        assert_eq!(ranges(&spots, &(4..11)), [50..100, 100..130]);
        assert_eq!(ranges(&spots, &(19..20)), [50..100, 130..140]);
    }
}

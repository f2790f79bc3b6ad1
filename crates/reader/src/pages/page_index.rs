// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Positions of a chunk's pages, so that a part of the chunk can be fetched. They come from the
//! offset index, or else from the page headers, one after the other.

use std::ops::Range;

use farandole_store::Store;
use parquet::file::metadata::ColumnChunkMetaData;

use crate::pages::thrift::{PageKind, ThriftError, read_offset_index, read_page_header};

/// Bytes of the first read of a page header, which usually contain it.
const HEADER_WINDOW_BYTES: u64 = 512;

/// Most bytes of a page header.
const MAX_HEADER_BYTES: u64 = 1 << 20;

/// One data page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLocation {
    /// Offset of the page header.
    pub(crate) offset: u64,
    /// Bytes of header and page.
    pub(crate) length: u64,
    /// Number of its first entry within the chunk.
    pub(crate) first: u64,
}

/// Positions of a chunk's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageIndex {
    pub(crate) dictionary: Option<Range<u64>>,
    pub(crate) pages: Vec<PageLocation>,
}

impl PageIndex {
    /// Returns the pages that contain some of these entries.
    pub(crate) fn pages_containing(&self, entries: &Range<u64>) -> &[PageLocation] {
        let first =
            self.pages.partition_point(|page| page.first <= entries.start).saturating_sub(1);
        let end = self.pages.partition_point(|page| page.first < entries.end);
        self.pages.get(first..end).unwrap_or_default()
    }
}

/// Reason why the pages cannot be found.
pub(crate) enum PageLookupError {
    /// Error of the store.
    Store(farandole_store::Error),
    /// Damaged bytes.
    Broken(String),
}

/// Finds the pages of `chunk` in a file. A row has `per_row` entries.
pub(crate) fn find_pages(
    store: &Store,
    path: &str,
    chunk: &ColumnChunkMetaData,
    per_row: u64,
) -> Result<PageIndex, PageLookupError> {
    let (start, length) = chunk.byte_range();
    let end = start.saturating_add(length);
    if let (Some(at), Some(bytes)) = (chunk.offset_index_offset(), chunk.offset_index_length())
        && let (Ok(at), Ok(bytes)) = (u64::try_from(at), u64::try_from(bytes))
    {
        let index = fetch_range(store, path, at..at.saturating_add(bytes))?;
        let found = read_offset_index(&index)
            .map_err(|_| PageLookupError::Broken("its offset index is damaged".to_owned()))?;
        let pages: Vec<PageLocation> = found
            .iter()
            .map(|page| PageLocation {
                offset: page.offset,
                length: page.length,
                first: page.first_row.saturating_mul(per_row),
            })
            .collect();
        let inside = |page: &PageLocation| {
            page.offset >= start
                && page.offset.checked_add(page.length).is_some_and(|last| last <= end)
        };
        // `pages_containing` searches by halves, which needs ascending pages.
        let rising = pages
            .windows(2)
            .all(|pair| pair[0].first < pair[1].first && pair[0].offset < pair[1].offset);
        let (Some(first), true) = (pages.first(), rising && pages.iter().all(inside)) else {
            return Err(PageLookupError::Broken(
                "its offset index contradicts its chunk".to_owned(),
            ));
        };
        if first.first != 0 {
            return Err(PageLookupError::Broken(
                "its offset index does not start at the first row".to_owned(),
            ));
        }
        // The index does not list the dictionary, which lies before the first data page.
        let dictionary = (first.offset > start).then_some(start..first.offset);
        return Ok(PageIndex { dictionary, pages });
    }
    walk_page_headers(store, path, start..end)
}

fn walk_page_headers(
    store: &Store,
    path: &str,
    chunk: Range<u64>,
) -> Result<PageIndex, PageLookupError> {
    let mut index = PageIndex::default();
    let (mut at, mut entries) = (chunk.start, 0_u64);
    while at < chunk.end {
        let mut window = HEADER_WINDOW_BYTES;
        let (header, length) = loop {
            let bytes = fetch_range(store, path, at..at.saturating_add(window).min(chunk.end))?;
            match read_page_header(&bytes) {
                Ok(found) => break found,
                Err(ThriftError::Truncated)
                    if window < MAX_HEADER_BYTES && at + window < chunk.end =>
                {
                    window *= 8
                }
                Err(_) => {
                    return Err(PageLookupError::Broken(format!(
                        "there is no page header at byte {at}"
                    )));
                }
            }
        };
        let bytes = length as u64 + header.compressed as u64;
        let next = at.checked_add(bytes).filter(|next| *next <= chunk.end);
        let next = next.ok_or_else(|| {
            PageLookupError::Broken(format!("the page at byte {at} leaves its chunk"))
        })?;
        match header.kind {
            PageKind::Dictionary => index.dictionary = Some(at..next),
            PageKind::Data | PageKind::DataV2 { .. } => {
                index.pages.push(PageLocation { offset: at, length: bytes, first: entries });
                entries += header.entries as u64;
            }
            PageKind::Other => {}
        }
        at = next;
    }
    Ok(index)
}

fn fetch_range(
    store: &Store,
    path: &str,
    range: Range<u64>,
) -> Result<bytes::Bytes, PageLookupError> {
    let found =
        store.read_ranges(path, std::slice::from_ref(&range)).map_err(PageLookupError::Store)?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// Returns the byte ranges to fetch for these entries.
pub(crate) fn needed_ranges(index: &PageIndex, entries: &Range<u64>) -> Vec<Range<u64>> {
    let pages = index.pages_containing(entries);
    let data = pages
        .first()
        .zip(pages.last())
        .map(|(first, last)| first.offset..last.offset + last.length);
    index.dictionary.clone().into_iter().chain(data).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_in_the_pages_around_them() {
        let page =
            |number: u64| PageLocation { offset: 100 + number * 10, length: 10, first: number * 5 };
        let index = PageIndex { dictionary: Some(50..100), pages: (0..4).map(page).collect() };
        assert_eq!(needed_ranges(&index, &(0..20)), [50..100, 100..140]);
        assert_eq!(needed_ranges(&index, &(5..10)), [50..100, 110..120]);
        assert_eq!(needed_ranges(&index, &(4..11)), [50..100, 100..130]);
        assert_eq!(needed_ranges(&index, &(19..20)), [50..100, 130..140]);
    }
}

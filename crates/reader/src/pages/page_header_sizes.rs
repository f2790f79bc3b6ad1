// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks the sizes in page headers before the library allocates memory for them.

use crate::pages::thrift::{PageKind, read_page_header};

/// Encodings in which a value takes no more bytes than its page or its dictionary: PLAIN,
/// PLAIN_DICTIONARY, DELTA_LENGTH_BYTE_ARRAY and RLE_DICTIONARY.
const SELF_CONTAINED_ENCODINGS: [i64; 4] = [0, 2, 6, 8];
/// Encodings whose pages begin with lengths: DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY.
const LENGTH_LIST_ENCODINGS: [i64; 2] = [6, 7];

/// Sizes of a chunk by its page headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageHeaderSizes {
    /// Decoded bytes of the largest dictionary, which limit the size of each of its values.
    pub(crate) dictionary: usize,
    /// Decoded bytes of all pages.
    pub(crate) bytes: usize,
    /// Most values of a dictionary, and the stored bytes of its page.
    pub(crate) entries: usize,
    pub(crate) stored: usize,
    /// Whether some values may share a prefix with the value before. Such a page may decode to any
    /// number of bytes.
    pub(crate) has_prefixes: bool,
    /// Decoded bytes of the largest page with shared prefixes. A value takes no more, because it
    /// consists of bytes of its page.
    pub(crate) longest: usize,
    /// Whether some page stores values uncompressed, although other pages may be compressed.
    pub(crate) has_uncompressed: bool,
    /// Whether some page starts with lengths, whose number is not in its header.
    pub(crate) has_length_lists: bool,
}

/// Checks the pages of `chunk` until `values` values were found. No page may take more than `most`
/// bytes decoded.
///
/// # Errors
/// A description of the invalid page.
pub(crate) fn check_page_header_sizes(
    chunk: &[u8],
    values: usize,
    most: usize,
) -> Result<PageHeaderSizes, String> {
    let (mut at, mut seen, mut found) = (0_usize, 0_usize, PageHeaderSizes::default());
    while seen < values {
        let rest = chunk.get(at..).filter(|rest| !rest.is_empty());
        let rest = rest.ok_or_else(|| "there are fewer values than announced".to_owned())?;
        let (header, length) = read_page_header(rest)
            .map_err(|_| "there is no page header where one should be".to_owned())?;
        if header.compressed > rest.len() - length {
            return Err("a page leaves its chunk".to_owned());
        }
        if header.uncompressed > most {
            return Err(format!(
                "a page claims {} bytes, the byte budget is {most}",
                header.uncompressed
            ));
        }
        found.bytes = found.bytes.saturating_add(header.uncompressed);
        match header.kind {
            // Each value takes at least one byte, or has a length.
            PageKind::Dictionary if header.entries > header.uncompressed => {
                return Err(format!("a dictionary claims {} values", header.entries));
            }
            PageKind::Dictionary => {
                found.dictionary = found.dictionary.max(header.uncompressed);
                found.entries = found.entries.max(header.entries);
                found.stored = found.stored.max(header.compressed);
            }
            PageKind::Data | PageKind::DataV2 { .. } => {
                seen = seen.saturating_add(header.entries);
                if seen > values {
                    return Err(format!(
                        "pages claim more than the {values} values of their chunk"
                    ));
                }
                if !SELF_CONTAINED_ENCODINGS.contains(&header.encoding) {
                    found.has_prefixes = true;
                    found.longest = found.longest.max(header.uncompressed);
                }
                found.has_length_lists |= LENGTH_LIST_ENCODINGS.contains(&header.encoding);
                found.has_uncompressed |=
                    matches!(header.kind, PageKind::DataV2 { compressed: false, .. });
            }
            PageKind::Other => {}
        }
        at += length + header.compressed;
    }
    Ok(found)
}

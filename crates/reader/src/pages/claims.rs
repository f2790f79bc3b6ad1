// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks of the sizes in page headers, before the library allocates memory for them.

use crate::pages::thrift::{PageKind, page_header};

/// Encodings in which a value takes no more bytes than its page, or its dictionary, has: PLAIN,
/// PLAIN_DICTIONARY, DELTA_LENGTH_BYTE_ARRAY and RLE_DICTIONARY.
const WHOLE: [i64; 4] = [0, 2, 6, 8];
/// Encodings whose pages begin with lengths: DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY.
const LENGTHS: [i64; 2] = [6, 7];

/// Sizes of a chunk, as its pages state them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    /// Bytes of a dictionary, which is what every value may take.
    pub(crate) dictionary: usize,
    /// Bytes of all pages, decoded.
    pub(crate) bytes: usize,
    /// The most values of a dictionary, and the bytes of its page as they are stored.
    pub(crate) entries: usize,
    pub(crate) stored: usize,
    /// Whether values may be stored as parts of the one before: a page may then decode to any
    /// number of bytes.
    pub(crate) prefixes: bool,
    /// The most bytes of such a page, decoded: a value takes no more, because it consists of bytes
    /// of its page.
    pub(crate) longest: usize,
    /// Whether values of some page are not compressed, although those of others may be.
    pub(crate) open: bool,
    /// Whether some page has lengths before its values, of which its header says nothing.
    pub(crate) lengths: bool,
}

/// Checks the pages of `chunk` until all of its `values` have come: no page may take more than
/// `most` bytes.
///
/// # Errors
/// What is wrong with a page.
pub(crate) fn claims(chunk: &[u8], values: usize, most: usize) -> Result<Claims, String> {
    let (mut at, mut seen, mut found) = (0_usize, 0_usize, Claims::default());
    while seen < values {
        let rest = chunk.get(at..).filter(|rest| !rest.is_empty());
        let rest = rest.ok_or_else(|| "there are fewer values than announced".to_owned())?;
        let (header, length) = page_header(rest)
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
            // Each takes a byte at least, or has a length.
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
                if !WHOLE.contains(&header.encoding) {
                    found.prefixes = true;
                    found.longest = found.longest.max(header.uncompressed);
                }
                found.lengths |= LENGTHS.contains(&header.encoding);
                found.open |= matches!(header.kind, PageKind::DataV2 { compressed: false, .. });
            }
            PageKind::Other => {}
        }
        at += length + header.compressed;
    }
    Ok(found)
}

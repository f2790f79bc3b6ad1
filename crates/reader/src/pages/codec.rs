// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decompression into memory that is used again. The library's goes to fresh memory for every page,
//! which costs more in page faults than snappy itself.

use parquet::basic::Compression;

/// The codecs of pages that we open ourselves; the library has the others.
pub(crate) enum Codec {
    None,
    Snappy(Box<snap::raw::Decoder>),
    Lz4,
    Zstd(zstd::bulk::Decompressor<'static>),
}

impl Codec {
    /// The codec for `compression`, if it is one of ours.
    pub(crate) fn new(compression: Compression) -> Option<Self> {
        match compression {
            Compression::UNCOMPRESSED => Some(Self::None),
            Compression::SNAPPY => Some(Self::Snappy(Box::default())),
            Compression::LZ4_RAW => Some(Self::Lz4),
            Compression::ZSTD(_) => zstd::bulk::Decompressor::new().ok().map(Self::Zstd),
            _ => None,
        }
    }

    /// Returns whether pages come as they are.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Decompresses `from` so that it fills `to`.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub(crate) fn decompress(&mut self, from: &[u8], to: &mut [u8]) -> Result<(), String> {
        let written = match self {
            Self::None if from.len() == to.len() => {
                to.copy_from_slice(from);
                from.len()
            }
            Self::None => {
                return Err(format!("a page has {} bytes instead of {}", from.len(), to.len()));
            }
            Self::Snappy(decoder) => {
                decoder.decompress(from, to).map_err(|error| error.to_string())?
            }
            Self::Lz4 => {
                lz4_flex::block::decompress_into(from, to).map_err(|error| error.to_string())?
            }
            Self::Zstd(decoder) => {
                decoder.decompress_to_buffer(from, to).map_err(|error| error.to_string())?
            }
        };
        if written == to.len() {
            Ok(())
        } else {
            Err(format!("a page has {written} bytes instead of {}", to.len()))
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decompression into memory that is reused. The library allocates new memory for every page, whose
//! page faults cost more than Snappy itself.

use parquet::basic::Compression;

/// Page codecs that are decompressed here; the library handles the others.
pub(crate) enum PageCodec {
    None,
    Snappy(Box<snap::raw::Decoder>),
    Lz4,
    Zstd(zstd::bulk::Decompressor<'static>),
}

impl PageCodec {
    /// Returns the codec for `compression`, if it is supported here.
    pub(crate) fn new(compression: Compression) -> Option<Self> {
        match compression {
            Compression::UNCOMPRESSED => Some(Self::None),
            Compression::SNAPPY => Some(Self::Snappy(Box::default())),
            Compression::LZ4_RAW => Some(Self::Lz4),
            Compression::ZSTD(_) => zstd::bulk::Decompressor::new().ok().map(Self::Zstd),
            _ => None,
        }
    }

    /// Returns whether pages are not compressed.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Decompresses `from`, which must fill `to` exactly.
    ///
    /// # Errors
    /// A description of the damage.
    pub(crate) fn decompress_into(&mut self, from: &[u8], to: &mut [u8]) -> Result<(), String> {
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes column chunks page by page: finds the pages of the wanted rows, and writes their values
//! directly into the target buffer.
//!
//! The library decodes into newly allocated arrays and reads whole chunks. Here, a part of a row
//! group costs only its own pages, and memory is reused. Rare encodings are left to the library.

mod chunk;
mod codec;
mod delta_lengths;
mod hybrid;
mod page_header_sizes;
mod page_index;
mod thrift;
mod values;

pub(crate) use chunk::{ChunkDecodeError, ChunkRequest, DecodeScratch, LevelLayout, decode_chunk};
pub(crate) use delta_lengths::check_claimed_lengths;
pub(crate) use page_header_sizes::{PageHeaderSizes, check_page_header_sizes};
pub(crate) use page_index::{PageIndex, PageLookupError, find_pages, needed_ranges};
pub(crate) use values::ValueStorage;

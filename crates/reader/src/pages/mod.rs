// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Column chunks page by page: which pages hold which rows, and their values, written straight
//! where they belong.
//!
//! The library decodes into arrays of its own and reads whole chunks. Here a part of a row group
//! costs its own pages only, and memory is used again. Encodings that are rare are left to the
//! library.

mod chunk;
mod claims;
mod codec;
mod hybrid;
mod lengths;
mod spots;
mod thrift;
mod values;

pub(crate) use chunk::{Bench, Chunk, Levels, Trouble, decode};
pub(crate) use claims::{Claims, claims};
pub(crate) use lengths::check_lengths;
pub(crate) use spots::{Lost, Spots, find, ranges};
pub(crate) use values::Stored;

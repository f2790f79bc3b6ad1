// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The description of a data set, and the plan that assigns rows to ranks and steps: types and pure
//! functions.
//!
//! Owns the manifest (schema, shapes, files with their row groups, fingerprint) and the plan of an
//! epoch. It has no I/O, no clock and no threads; the reader executes the plan.
//!
//! # The order of an epoch
//!
//! ```text
//! row groups --cut--> blocks --shuffle(seed, epoch)--> one sequence of rows --cut--> L lanes, equal to one row
//!
//!            lane 0 : block 7 | block 2 | bl..        a block's rows are shuffled within its lane,
//!            lane 1 : ..ock 5 | block 0 | ...         and alternate with other open blocks
//! sequence:  position p is row p / L of lane p % L    (one row of every lane in turn)
//! ranks:     at size S rank r takes the positions p with p % S == r, batch_size of them a step, in order
//! ```
//!
//! A lane has one block open, or several if all blocks are small. The rows of its open blocks
//! alternate, and when a block ends, the next one opens. So neighbours in the sequence come from
//! different blocks.
//!
//! If there are more than 48 lanes, an epoch starts with the first 48 only, so that the first batch
//! does not wait for a block of every lane. Each of them yields about a quarter of a block before
//! the other lanes join, and is longer by that amount. When the others join, positions count from 0
//! again.
//!
//! Blocks and lanes depend only on the manifest, so the sequence does not depend on the world. In
//! step k, all ranks together take the positions `[k * S * B, (k + 1) * S * B)`. If S divides L,
//! rank r owns the lanes l with l % S == r, and no other rank reads their blocks.
//!
//! Without shuffling there is one lane in file order. Its rows are distributed one by one, so each
//! rank reads every block.
//!
//! Invariants:
//! - `RD-1`: over all ranks, every row comes once per epoch. Padding repeats rows with weight 0;
//!   `drop` leaves out less than one global batch.
//! - `RD-2`: a global batch is a function of (manifest, seed, epoch, size x batch size).
//! - `RD-3`: all ranks have the same number of steps, and their rows differ by at most one.
//! - `RD-4`: if the size divides the lanes, no two ranks decode the same row. With more than 48
//!   lanes, up to 1 row in 20 may be decoded by several ranks, at the start of an epoch.
//! - `RD-5`: an epoch that stopped after n rows continues at row n with any size, without repeating
//!   or skipping rows.
//! - `RD-6`: unshuffled at size 1, the order is the order of the files.
//! - `RD-7`: a lane has the largest allowed number of blocks open until it runs out of blocks.

#![forbid(unsafe_code)]

mod deleted_rows;
mod directory_values;
mod element;
mod error;
mod exact_values;
mod manifest;
mod plan;
mod rng;

pub use deleted_rows::DeletedRows;
pub use directory_values::{
    FileValues, WrongDirectoryValue, infer_partition_type, is_partition_column, non_null_values,
    partition_columns, partition_values,
};
pub use element::ElementType;
pub use error::{Error, Result};
pub use exact_values::{
    TimeUnit, day_of_milliseconds, int96_microseconds, nearest_float64, parse_decimal_float64,
};
pub use manifest::{
    ColumnRole, DataFile, MANIFEST_FILE_NAME, MANIFEST_FORMAT_VERSION, Manifest, ManifestColumn,
    RowGroup, batch_unit, chunk_checksum,
};
pub use plan::{BatchPlan, EpochPlan, EpochRequest, LaneLayout, PartSlice, PlanPart, TailPolicy};
pub use rng::{SplitMix64, fold_hash, random_permutation};

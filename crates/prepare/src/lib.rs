// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Arrow batches in, Parquet and a manifest out.
//!
//! Owns the conversion of each Arrow type, the split into training and validation, the sizes of row
//! groups, and the commit. It knows no sources: Spark, pandas or SQL may create the batches.
//!
//! ```text
//! batch --> converters (one per column) --> split --> side: training   --> row groups --> part-<n>-<attempt>.parquet
//!                                              `---> side: validation --> row groups --> ...
//! finish() --> summary of the partition, a few bytes --> driver: commit(summaries) --> _manifest.json, last
//! ```
//!
//! Vectors are written as fixed-size binary, which decodes by copying; the field's metadata and the
//! manifest tell element and shape.
//!
//! Invariants:
//! - `PR-1`: a row lands on the same side however the data is partitioned (split by fraction, or by
//!   a bound of hashes).
//! - `PR-2`: names of files contain partition and attempt; a file that the manifest does not name
//!   is not part of the data.
//! - `PR-3`: every row that came in is in the output once, or counted as dropped, or an error was
//!   raised.
//! - `PR-4`: no column of the output has nulls, and all rows of a column have one shape; NaN and
//!   infinities only where they were asked for.
//! - `PR-5`: the manifest has a checksum of every file, and of every column's chunk of every row
//!   group.

#![forbid(unsafe_code)]

mod commit;
mod convert;
mod error;
mod side;
mod spec;
mod split;
mod summary;
mod verify;
mod writer;

pub use commit::{Committed, commit, read_manifest};
pub use error::{Error, Fault, Result};
pub use spec::{Compression, Spec, Validation};
pub use summary::Summary;
pub use verify::{Verified, is_whole, verify};
pub use writer::PartitionWriter;

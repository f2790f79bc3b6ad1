// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts Arrow batches to Parquet files with a manifest.
//!
//! Owns the conversion of each Arrow type, the split into training and validation data, the sizes
//! of row groups, and the commit. It does not depend on a source: Spark, pandas or SQL may create
//! the batches.
//!
//! ```text
//! batch --> converters (one per column) --> split --> side: training   --> row groups --> part-<n>-<attempt>.parquet
//!                                              `---> side: validation --> row groups --> ...
//! finish_partition() --> summary of the partition, a few bytes --> driver: commit_partitions(summaries) --> _manifest.json, last
//! ```
//!
//! Vectors are written as fixed-size binary, which is decoded by copying. The field's metadata and
//! the manifest contain element and shape.
//!
//! Invariants:
//! - `PR-1`: with a split by fraction or by a hash bound, a row is on the same side however the
//!   data is partitioned.
//! - `PR-2`: names of files contain partition and attempt; a file that is not in the manifest is
//!   not part of the data.
//! - `PR-3`: every input row is in the output once, or is counted as dropped, or an error was
//!   raised.
//! - `PR-4`: no column of the output has nulls, and all rows of a column have the same shape. NaN
//!   and infinities occur only if they are allowed.
//! - `PR-5`: the manifest has a checksum of every file, and of every column chunk of every row
//!   group.

#![forbid(unsafe_code)]

mod commit;
mod convert;
mod error;
mod spec;
mod split;
mod split_file_writer;
mod summary;
mod verify;
mod writer;

pub use commit::{PreparedDataset, commit_partitions, read_manifest};
pub use error::{Error, PrepareFault, Result};
pub use spec::{PageCompression, PrepareSpec, ValidationRule};
pub use summary::PartitionSummary;
pub use verify::{VerificationReport, is_partition_complete, verify_files};
pub use writer::PartitionWriter;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Streams batches from Parquet, in the order of the plan of `farandole-dataset`.
//!
//! Owns the threads that fetch and decode, their memory, and the batches. It does not decide the
//! order and has no tensors: a batch consists of aligned buffers.
//!
//! ```text
//! ParquetDataset::open_directory --> Reader (columns, casts, budget) --> EpochReader: threads
//!     part of the plan --[range reads]--> column chunks --[decode]--> rows, shuffled --> block
//!     step of the plan --[copy from blocks]--> batch --[bounded, in order]--> consumer
//! ```
//!
//! Narrow columns are shuffled when they are decoded, column by column, while a block's column fits
//! into the CPU cache. Batches then copy neighbouring values. Wide rows are moved only once, from
//! the decoded block into the batch. Values of any length stay in their pages until the batch
//! copies them; on request, they are padded to one length.
//!
//! If no batch is ready, the consumer puts the next one together itself as soon as its blocks are
//! loaded. In one step, some blocks are used for the last time and others for the first time. If
//! they do not fit into the budget together, the rows of blocks that end are copied first.
//!
//! A module uses only modules of the same line and of earlier lines:
//!
//! ```text
//! error, hive, pool, column                          errors, memory, columns
//! arrow_schema_hints, time_rule                            types that only Arrow's schema states; times
//! pages, footer, chunk_verification, fill            bytes of files, replacements
//! padding                                            rows of one length
//! value_origin, schema, values, variable_length      origin of errors, types, copies of values
//! table_columns                                      schemas and deleted rows of tables
//! array_values, leaf_values, parquet_library         column chunks to values
//! dataset, decode                                    a directory; parts of it to values
//! batch, cache, block                                decoded data
//! assemble, epoch_state, epoch, reader               order of work, threads
//! ```
//!
//! Invariants:
//! - `RE-1`: batches come in the plan's order, regardless of the timing of threads.
//! - `RE-2`: decoded blocks never take more than the byte budget; a plan that needs more is refused
//!   at the start. Strings count with the size that files state. If they take more, reading
//!   continues with one block at a time. Ready batches take at most a quarter of the budget that
//!   blocks leave free, or 16 MiB, and one batch more. It is an error if a page takes more than the
//!   budget, or the strings of a block more than four times the budget.
//! - `RE-3`: parts are loaded in the order of their first step, so that later ones cannot fill the
//!   budget.
//! - `RE-4`: threads end with the epoch: at its end, at an error, or when it is dropped. A thread
//!   whose store does not answer ends with its request, and is not waited for.
//! - `RE-5`: a defect of a file becomes an error of the consumer that names file, row group and
//!   column.
//! - `RE-6`: a value is exact, rounded as the pages say, or an error that names file, row group,
//!   row and column; a buffer of another length than its column is never copied.
//! - `RE-7`: a row that its table has deleted never reaches a batch, and its values cause no error.

#![forbid(unsafe_code)]

mod array_values;
mod arrow_schema_hints;
mod assemble;
mod batch;
mod block;
mod cache;
mod chunk_verification;
mod column;
mod dataset;
mod decode;
mod epoch;
mod epoch_state;
mod error;
mod fill;
mod fill_value;
mod footer;
mod leaf_values;
mod padding;
mod pages;
mod parquet_library;
mod pool;
mod reader;
mod schema;
mod table_columns;
mod time_rule;
mod value_origin;
mod values;
mod variable_length;

pub use batch::{Batch, ColumnExtent};
pub use column::BatchField;
pub use dataset::ParquetDataset;
pub use epoch::{EpochReader, NextBatch};
pub use error::{Error, ReadFault, Result};
pub use farandole_dataset::{FileValues, infer_partition_type, partition_values};
pub use fill_value::FillValue;
pub use padding::RowPadding;
pub use reader::{Reader, ReaderOptions};
pub use table_columns::{TableColumn, TableFile};

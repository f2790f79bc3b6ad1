// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Streams batches from Parquet, in the order of the plan of `farandole-dataset`.
//!
//! Owns the threads that fetch and decode, their memory, and the batches. It does not decide the
//! order and knows no tensors: a batch consists of aligned buffers.
//!
//! ```text
//! Dataset::open --> Reader (columns, casts, budget) --> Epoch: threads
//!     part of the plan --[range reads]--> column chunks --[decode]--> rows, shuffled --> block (held under the budget)
//!     step of the plan --[gather from blocks]--> batch --[bounded, in order]--> consumer
//! ```
//!
//! Narrow columns are shuffled when they are decoded, column by column, while a block's column fits
//! into the cache; batches then copy neighbouring values. Wide rows are moved once, from the
//! decoded block into the batch. Values of any length stay in the pages that they were read from
//! until the batch copies them, padded to one length if so asked.
//!
//! If no batch is ready, the consumer creates the next one itself as soon as its blocks are loaded.
//! If the blocks that end and those that begin in one step do not fit into the budget together, the
//! rows of the former are copied first.
//!
//! Modules use only modules of earlier lines:
//!
//! ```text
//! error, hive, pool, column           words, memory, what a column is
//! pages, footer, intact, fill         bytes of files, replacements
//! padding                             lists as rows of one length
//! origin, schema, values, texts       places of errors, types, copies of values
//! dataset, lists, library, decode     a directory; column chunks to values
//! batch, cache, block                 what is held
//! assemble, state, epoch, reader      the order of work, threads
//! ```
//!
//! Invariants:
//! - `RE-1`: batches come in the plan's order, whatever the timing of threads.
//! - `RE-2`: decoded blocks never take more than the byte budget; a plan that needs more is refused
//!   at its start. Texts count with the size that files state; if they take more, reading continues
//!   with one block at a time, and ready batches take at most a quarter of what the blocks leave of
//!   the budget, or 16 MiB, and one batch more. A page that takes more than the budget is an error,
//!   and so are the texts of a block that take more than four times as much.
//! - `RE-3`: parts are loaded in the order of their first step, so that the budget cannot be filled
//!   with later ones.
//! - `RE-4`: threads end with the epoch: at its end, at an error, when it is dropped; one whose
//!   store does not answer ends with its request, and is not waited for.
//! - `RE-5`: a defect of a file becomes an error of the consumer that names file, row group and
//!   column.

#![forbid(unsafe_code)]

mod assemble;
mod batch;
mod block;
mod cache;
mod column;
mod dataset;
mod decode;
mod epoch;
mod error;
mod fill;
mod footer;
mod hive;
mod intact;
mod library;
mod lists;
mod origin;
mod padding;
mod pages;
mod pool;
mod reader;
mod schema;
mod state;
mod texts;
mod values;

pub use batch::{Batch, Held};
pub use column::Field;
pub use dataset::Dataset;
pub use epoch::{Epoch, Next};
pub use error::{Error, Fault, Result};
pub use padding::Padding;
pub use reader::{Options, Reader};

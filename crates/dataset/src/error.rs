// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of a manifest or a request.

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A manifest or a request that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no manifest.
    #[error("not a manifest: {source}")]
    Syntax {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// Written by a version that we do not know.
    #[error("the manifest has format {found}, this version reads up to {known}")]
    Format {
        /// Its format.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A manifest that contradicts itself.
    #[error("the manifest contradicts itself: {what}")]
    Inconsistent {
        /// Kind of the damage.
        what: String,
    },
    /// No such column.
    #[error("no column {name}, there are: {}", known.join(", "))]
    Column {
        /// The requested column.
        name: String,
        /// The existing columns.
        known: Vec<String>,
    },
    /// A size, rank or batch size that cannot be.
    #[error("rank {rank} of {size} with batches of {batch_size} cannot be")]
    Request {
        /// The rank.
        rank: u64,
        /// The size of the world.
        size: u64,
        /// Rows of a batch.
        batch_size: u64,
    },
}

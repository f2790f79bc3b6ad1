// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of a manifest or of a request.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An invalid manifest or request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no manifest.
    #[error("not a manifest: {source}")]
    Syntax {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// Written in a format that is newer than this version.
    #[error("the manifest has format {found}, this version reads up to {known}")]
    Format {
        /// Format of the manifest.
        found: u32,
        /// Newest format of this version.
        known: u32,
    },
    /// A manifest that contradicts itself.
    #[error("the manifest contradicts itself: {what}")]
    Inconsistent {
        /// Description of the contradiction.
        what: String,
    },
    /// An unknown column.
    #[error("no column {name}, there are: {}", known.join(", "))]
    Column {
        /// The requested column.
        name: String,
        /// The existing columns.
        known: Vec<String>,
    },
    /// An invalid size, rank or batch size.
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reasons why a file is not decoded here.

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A file that this crate does not decode. Another decoder may open it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another format, or no image.
    #[error("it is neither a PNG nor a JPEG")]
    Format,
    /// A PNG or a JPEG of a kind that is left to another decoder.
    #[error("it is {kind}")]
    Kind {
        /// Kind of the file.
        kind: &'static str,
    },
    /// More pixels than any file may have.
    #[error("it has {width} x {height} pixels, more than {most}")]
    Large {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Largest number of pixels.
        most: u64,
    },
    /// Bytes that are no image.
    #[error("it is damaged: {what}")]
    Damaged {
        /// The library's error.
        what: String,
    },
    /// Memory of another size than an image has.
    #[error("an image has {expected} values, and there is room for {found}")]
    Room {
        /// Values of an image.
        expected: usize,
        /// Values that there is room for.
        found: usize,
    },
}

impl Error {
    pub(crate) fn damaged(what: impl ToString) -> Self {
        Self::Damaged { what: what.to_string() }
    }
}

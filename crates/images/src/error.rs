// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reasons why a file is not decoded by this crate.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A file that this crate does not decode. Another decoder may read it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another format, or not an image.
    #[error("it is neither a PNG nor a JPEG")]
    Format,
    /// A PNG or JPEG of a rare kind, which another decoder must read.
    #[error("it is {kind}")]
    RareKind {
        /// Kind of the file.
        kind: &'static str,
    },
    /// More pixels than allowed.
    #[error("it has {width} x {height} pixels, more than {most}")]
    TooManyPixels {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Largest number of pixels.
        most: u64,
    },
    /// Damaged bytes.
    #[error("it is damaged: {what}")]
    Damaged {
        /// The library's error.
        what: String,
    },
    /// Output memory whose size differs from the image.
    #[error("an image has {expected} values, and there is room for {found}")]
    OutputSize {
        /// Values of an image.
        expected: usize,
        /// Values in the output memory.
        found: usize,
    },
}

impl Error {
    pub(crate) fn damaged_error(what: impl ToString) -> Self {
        Self::Damaged { what: what.to_string() }
    }
}

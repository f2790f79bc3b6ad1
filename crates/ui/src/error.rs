// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of the viewer.

use std::path::{Path, PathBuf};

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A viewer that cannot start, or a request that cannot be answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No store was given.
    #[error("the viewer needs at least one store")]
    NoStore,
    /// A file of the page is not installed.
    #[error(
        "a file of the viewer's page is not installed (in a checkout, run make viewer): {path}"
    )]
    Page {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The port cannot be had, or no thread.
    #[error("the viewer cannot listen on 127.0.0.1, port {port}: {source}")]
    Listen {
        /// The port that was asked for; 0 is any.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
    /// A store refused.
    #[error(transparent)]
    Store(#[from] farandole_store::Error),
    /// A request names a run or a file that is not there.
    #[error("not found: {what}")]
    Missing {
        /// The request.
        what: String,
    },
    /// A timeline cannot be read or written.
    #[error("{path}: {reason}", path = path.display())]
    Timeline {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file of a run is not one that a training writes.
    #[error("damaged: {file}: {reason}")]
    Damaged {
        /// Its URL.
        file: String,
        /// The reason.
        reason: String,
    },
    /// An answer would take too much memory.
    #[error("too large: {what}")]
    TooLarge {
        /// The answer.
        what: String,
    },
    /// A request's parameter does not fit.
    #[error("a parameter does not fit ({name}): {value}")]
    Parameter {
        /// Its name.
        name: &'static str,
        /// The given value.
        value: String,
    },
}

/// The reactions that are open to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The caller named something that cannot be.
    Usage,
    /// The system or the store refused.
    Environment,
}

impl Error {
    /// Returns the party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Self::NoStore
            | Self::Missing { .. }
            | Self::Parameter { .. }
            | Self::TooLarge { .. } => Fault::Usage,
            Self::Page { .. }
            | Self::Listen { .. }
            | Self::Timeline { .. }
            | Self::Damaged { .. } => Fault::Environment,
            Self::Store(error) => match error.fault() {
                farandole_store::Fault::Usage => Fault::Usage,
                farandole_store::Fault::Environment => Fault::Environment,
            },
        }
    }
}

/// Returns the error of a timeline that cannot be read or written.
pub(crate) fn timeline_error(path: &Path, reason: String) -> Error {
    Error::Timeline { path: path.to_owned(), reason }
}

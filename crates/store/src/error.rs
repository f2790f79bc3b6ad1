// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of a store.

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A store that refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no URL of a store.
    #[error("not a store ({reason}): {url}")]
    Url {
        /// The given value.
        url: String,
        /// The reason why it is invalid.
        reason: &'static str,
    },
    /// A scheme that this build does not know.
    #[error(
        "no store for the scheme {scheme}, known are file, dbfs, hdfs, s3, gs, abfss, az and \
         memory: {url}"
    )]
    Scheme {
        /// The scheme.
        scheme: String,
        /// The whole URL.
        url: String,
    },
    /// A storage option that the backend does not have. Its value is not shown: it may be a secret.
    #[error("no such storage option ({key}) for this store: {url}")]
    Option {
        /// The given value.
        key: String,
        /// The store.
        url: String,
    },
    /// No threads to talk to the network with.
    #[error("cannot start the threads that talk to the store: {source}")]
    Runtime {
        /// The system's error.
        source: std::io::Error,
    },
    /// There is no such file.
    #[error("no such file: {path}")]
    Missing {
        /// Its whole path.
        path: String,
    },
    /// The backend says no.
    #[error("not allowed to {action}: {path}")]
    Refused {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// The backend's error.
        source: Box<object_store::Error>,
    },
    /// Anything else between us and the bytes.
    #[error("cannot {action} {path}: {source}")]
    Backend {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// The backend's error.
        source: Box<object_store::Error>,
    },
    /// No answer within the time that there was.
    #[error("no answer within {patience:?}, cannot {action} {path}")]
    Late {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// Time of the wait.
        patience: std::time::Duration,
    },
    /// A local directory that cannot be removed.
    #[error("cannot delete {path}: {source}")]
    Directory {
        /// Its path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// An upload was used after its end.
    #[error("upload already ended: {path}")]
    Ended {
        /// The file that was written.
        path: String,
    },
}

/// The reactions that are open to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The caller named something that cannot be.
    Usage,
    /// The world outside does not play along.
    Environment,
}

impl Error {
    /// Returns the party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Url { .. } | Self::Scheme { .. } | Self::Option { .. } | Self::Ended { .. } => {
                Fault::Usage
            }
            Self::Runtime { .. }
            | Self::Missing { .. }
            | Self::Refused { .. }
            | Self::Backend { .. }
            | Self::Late { .. }
            | Self::Directory { .. } => Fault::Environment,
        }
    }

    /// From what the backend said about `path`.
    pub(crate) fn of(action: &'static str, path: String, source: object_store::Error) -> Self {
        match (&source, io_kind(&source)) {
            (object_store::Error::NotFound { .. }, _) => Self::Missing { path },
            (
                object_store::Error::PermissionDenied { .. }
                | object_store::Error::Unauthenticated { .. },
                _,
            )
            | (
                _,
                Some(std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem),
            ) => Self::Refused { action, path, source: Box::new(source) },
            _ => Self::Backend { action, path, source: Box::new(source) },
        }
    }
}

/// Returns the kind of the I/O error at the bottom of the chain.
fn io_kind(error: &object_store::Error) -> Option<std::io::ErrorKind> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}

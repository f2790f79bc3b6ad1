// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of a store.

use crate::store_operation::StoreOperation;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of a store.
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
    /// A storage option that the backend does not know. Its value is not shown, because it may be a
    /// secret.
    #[error("no such storage option ({key}) for this store: {url}")]
    Option {
        /// Name of the option.
        key: String,
        /// The store.
        url: String,
    },
    /// Threads for network requests cannot be started.
    #[error("cannot start the threads that talk to the store: {source}")]
    Runtime {
        /// The system's error.
        source: std::io::Error,
    },
    /// The file does not exist.
    #[error("no such file: {path}")]
    Missing {
        /// Whole path of the file.
        path: String,
    },
    /// The backend denied permission.
    #[error(
        "not allowed to {action}: {path}{}",
        credential.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
    )]
    Refused {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// Place of the refused credential, and why it was refused; never its value.
        credential: Option<String>,
        /// The backend's error.
        source: Box<object_store::Error>,
    },
    /// Any other error of the backend.
    #[error("cannot {action} {path}: {source}")]
    Backend {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// The backend's error.
        source: Box<object_store::Error>,
    },
    /// No answer before the deadline.
    #[error("no answer within {timeout:?}, cannot {action} {path}")]
    TimedOut {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// Length of the wait.
        timeout: std::time::Duration,
    },
    /// The service was busy, refused connections or was silent until the end of the timeout.
    #[error(
        "cannot {action} {path}: the service did not serve the request for {timeout:?} \
         (FARANDOLE_STORE_TIMEOUT allows more): {source}"
    )]
    Unavailable {
        /// The operation that was tried.
        action: &'static str,
        /// The whole path.
        path: String,
        /// Time for which the request was repeated.
        timeout: std::time::Duration,
        /// The backend's last error.
        source: Box<object_store::Error>,
    },
    /// A file that was replaced while it was being read.
    #[error("another process has replaced the file while it was being read: {path}")]
    Replaced {
        /// Whole path of the file.
        path: String,
    },
    /// A setting of this process that cannot be used.
    #[error("{0}")]
    Setting(#[from] farandole_config::KnobError),
    /// A symbolic link to a directory below a local store.
    #[error(
        "a listing does not follow symbolic links, and this one leads to a directory: {path} (give \
         that directory itself as the path, or mount it there)"
    )]
    LinkedDirectory {
        /// Whole path of the link.
        path: String,
    },
    /// A process whose lease of a directory is gone.
    #[error(
        "this process has lost its lease of the directory, so it writes nothing more there: \
         another process may use or delete what is there. Was this process stopped for long, or \
         its host asleep? Start it again: {path}"
    )]
    LostLease {
        /// Whole path of the directory.
        path: String,
    },
    /// An upload was used after its end.
    #[error("upload already ended: {path}")]
    UploadEnded {
        /// The file that was written.
        path: String,
    },
}

/// Kind of a failure: the caller can correct the request, or the environment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is invalid.
    Usage,
    /// The system, the network or the backend failed.
    Environment,
}

impl Error {
    /// Returns the kind of the failure.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Url { .. }
            | Self::Scheme { .. }
            | Self::Option { .. }
            | Self::Setting(_)
            | Self::UploadEnded { .. } => Fault::Usage,
            Self::Runtime { .. }
            | Self::Missing { .. }
            | Self::Refused { .. }
            | Self::Backend { .. }
            | Self::TimedOut { .. }
            | Self::Unavailable { .. }
            | Self::Replaced { .. }
            | Self::LostLease { .. }
            | Self::LinkedDirectory { .. } => Fault::Environment,
        }
    }

    /// Returns whether the file system has no room: the disk is full, or the user's quota.
    pub(crate) fn is_no_space(&self) -> bool {
        let Self::Backend { source, .. } = self else { return false };
        let full = [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded];
        io_kind(source).is_some_and(|kind| full.contains(&kind))
    }

    /// Adds the refused credential, or the timeout if the operation was repeated until its end.
    pub(crate) fn with_refusal_or_timeout(self, operation: Option<&StoreOperation>) -> Self {
        let refused = operation.and_then(StoreOperation::refused_credential);
        let this = match (self, refused) {
            (
                Self::Refused { action, path, source, .. } | Self::Backend { action, path, source },
                credential @ Some(_),
            ) => return Self::Refused { action, path, credential, source },
            (other, _) => other,
        };
        match (this, operation.and_then(StoreOperation::exhausted_timeout)) {
            (Self::Backend { action, path, source }, Some(timeout)) => {
                Self::Unavailable { action, path, timeout, source }
            }
            (other, _) => other,
        }
    }

    /// Converts an error of the backend about `path`.
    pub(crate) fn from_backend(
        action: &'static str,
        path: String,
        source: object_store::Error,
    ) -> Self {
        match (&source, io_kind(&source)) {
            (object_store::Error::NotFound { .. }, _) => Self::Missing { path },
            // A name below a file does not exist, either.
            (_, Some(std::io::ErrorKind::NotADirectory))
                if matches!(action, "read" | "look up" | "list" | "delete") =>
            {
                Self::Missing { path }
            }
            (
                object_store::Error::PermissionDenied { .. }
                | object_store::Error::Unauthenticated { .. },
                _,
            )
            | (
                _,
                Some(std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem),
            ) => Self::Refused { action, path, credential: None, source: Box::new(source) },
            _ => Self::Backend { action, path, source: Box::new(source) },
        }
    }
}

/// Returns the kind of the I/O error at the end of the chain of sources.
fn io_kind(error: &object_store::Error) -> Option<std::io::ErrorKind> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    // The backend wraps the error of the system several times.
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of libraries and devices.

use std::path::PathBuf;

use farandole_world::FaultOrigin;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A library or a device that refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library of this kind is there, or none could be loaded.
    #[error("{library} was not found: {tried}")]
    NotFound {
        /// Its name.
        library: &'static str,
        /// Places that were searched, and the problem of each.
        tried: String,
    },
    /// A library was found that lacks functions.
    #[error("{path} lacks functions: {symbols}")]
    Symbols {
        /// Path of the library.
        path: String,
        /// Their names.
        symbols: String,
    },
    /// A library was found that is too old.
    #[error("{path} has version {version}, at least {least} is needed")]
    Version {
        /// Path of the library.
        path: String,
        /// The version that it reports.
        version: String,
        /// The lowest version that works.
        least: &'static str,
    },
    /// A function of the driver failed.
    #[error("{function} failed on device {ordinal}: {reason}")]
    Driver {
        /// Name of the function.
        function: &'static str,
        /// The number of the device.
        ordinal: u32,
        /// The driver's words.
        reason: String,
    },
    /// A collective was asked for while a graph is captured.
    #[error(
        "a CUDA graph is being captured on device {ordinal}: ranks agree on every collective anew, \
         which a graph cannot repeat; call it outside the capture"
    )]
    Captured {
        /// On which device.
        ordinal: u32,
    },
    /// A function of NCCL failed.
    #[error("{function} failed: {reason}")]
    Nccl {
        /// Name of the function.
        function: &'static str,
        /// The library's words.
        reason: String,
    },
    /// Kernels were not compiled.
    #[error("kernels were not compiled for sm_{arch}: {log}")]
    Compile {
        /// For which architecture.
        arch: u32,
        /// The compiler's words.
        log: String,
    },
    /// Arguments of a kernel do not fit together.
    #[error("a kernel cannot do this: {reason}")]
    Arguments {
        /// The reason.
        reason: String,
    },
    /// Compiled kernels could not be kept.
    #[error("the cache of kernels failed at {path}: {reason}", path = path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

impl Error {
    /// Returns the reactions that are open to the trainer.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::Arguments { .. } | Self::Captured { .. } => FaultOrigin::Usage,
            Self::Nccl { .. } => FaultOrigin::Peer,
            Self::Compile { .. } => FaultOrigin::Bug,
            Self::NotFound { .. }
            | Self::Symbols { .. }
            | Self::Version { .. }
            | Self::Driver { .. }
            | Self::Cache { .. } => FaultOrigin::Environment,
        }
    }
}

const _: () = assert!(size_of::<Error>() < 128, "errors travel in results");

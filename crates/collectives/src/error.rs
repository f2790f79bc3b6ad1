// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of an operation.

use farandole_kernels::{DataType, ReduceOp};
use farandole_world::FaultOrigin;

/// Result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A link failed.
    #[error(transparent)]
    Transport(#[from] farandole_transport::Error),
    /// No kernel for this combination.
    #[error("{op:?} is not defined for {dtype}")]
    Unsupported {
        /// The reduction.
        op: ReduceOp,
        /// The element type.
        dtype: DataType,
    },
    /// Buffers do not fit the operation.
    #[error("buffers do not fit the operation: {reason}")]
    Shape {
        /// The reason.
        reason: String,
    },
    /// Members were lost; the communication library does not report which ones.
    #[error("members of a communicator were lost: {reason}")]
    Lost {
        /// The library's message.
        reason: String,
    },
    /// A device failed.
    #[error("device {ordinal} failed: {reason}")]
    Device {
        /// Number of the device.
        ordinal: u32,
        /// The reason.
        reason: String,
    },
}

impl From<farandole_kernels::Error> for Error {
    fn from(error: farandole_kernels::Error) -> Self {
        use farandole_kernels::Error as KernelError;

        match error {
            KernelError::Unsupported { op, dtype } => Self::Unsupported { op, dtype },
            KernelError::Shape { reason } => Self::Shape { reason },
        }
    }
}

impl Error {
    /// Returns the origin of the fault, which decides how the trainer can react.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::Transport(_) | Self::Lost { .. } => FaultOrigin::Peer,
            Self::Unsupported { .. } | Self::Shape { .. } => FaultOrigin::Usage,
            Self::Device { .. } => FaultOrigin::Environment,
        }
    }
}

const _: () = assert!(size_of::<Error>() < 128, "errors travel in every result of the hot path");

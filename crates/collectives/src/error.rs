// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of an operation.

use farandole_world::Fault;

use crate::{DataType, ReduceOp};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A link failed underneath.
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
    /// Members that cannot be reached any more, as a library tells that does not say which.
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

impl Error {
    /// Returns the reactions that are open to the trainer.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Transport(_) | Self::Lost { .. } => Fault::Peer,
            Self::Unsupported { .. } | Self::Shape { .. } => Fault::Usage,
            Self::Device { .. } => Fault::Environment,
        }
    }
}

const _: () = assert!(size_of::<Error>() < 128, "errors travel in every result of the hot path");

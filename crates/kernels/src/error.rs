// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of reductions and compressors.

use farandole_world::FaultOrigin;

use crate::{DataType, ReduceOp};

/// Result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refused call. No byte was read or written, except where a function says otherwise.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
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
}

impl Error {
    /// Returns the origin of the fault, which decides how the trainer can react.
    pub fn fault(&self) -> FaultOrigin {
        FaultOrigin::Usage
    }
}

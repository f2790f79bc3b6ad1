// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Buffers, dtypes, devices, communicators; the algorithms and kernels of every operation.

mod buffer;
mod communicator;
mod dtype;
mod error;

pub use buffer::{Buffer, Memory, Place};
pub use communicator::{Communicator, Device, Event, Operation, Segment, Token};
pub use dtype::{DataType, ReduceOp};
pub use error::{Error, Result};

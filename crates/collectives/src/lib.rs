// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Buffers, dtypes, devices, communicators; the algorithms and kernels of every operation.

#![deny(unsafe_code)]

mod buffer;
mod communicator;
mod dtype;
mod error;
mod host;
pub mod kernel;

pub use buffer::{Buffer, Memory, Place};
pub use communicator::{Communicator, Device, Event, Operation, Segment, Token};
pub use dtype::{DataType, ReduceOp};
pub use error::{Error, Result};
pub use host::HostCommunicator;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stream that a communicator works on, as NCCL's callers see it.

use std::sync::Arc;

use farandole_collectives::{DeviceEvent, Result, ResultMemory};

use super::RawStream;

/// The device's side of a communicator.
pub trait CommunicatorStream: Send + Sync + 'static {
    /// Returns the device's number.
    fn device_ordinal(&self) -> u32;

    /// Returns the stream that gets the work.
    fn raw_stream(&self) -> RawStream;

    /// Returns an event after the work that was put there.
    ///
    /// # Errors
    /// `Device`.
    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>>;

    /// Returns memory of the device, for later work of the stream.
    ///
    /// # Errors
    /// `Device`.
    fn allocate_result(&self, bytes: usize) -> Result<Arc<dyn ResultMemory>>;

    /// Does something while the device is the thread's current one.
    ///
    /// # Errors
    /// `Device`.
    fn with_current_device(&self, work: &mut dyn FnMut()) -> Result<()>;
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU with the traits `Device` and `DeviceEvent`: copies on our own stream, which events join
//! with the framework's stream.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

mod gpu_stream;
mod open_gpu;

use std::sync::Arc;

use farandole_collectives::{Device, DeviceEvent, Error as CollectiveError};
use farandole_kernels::{Buffer, HostMemory, MemoryKind};
use parking_lot::Mutex;

use self::open_gpu::{OpenGpu, RecordedEvent};
use crate::driver::{CudaDriver, PrimaryContext};
use crate::{Error, Result};

pub use gpu_stream::GpuStream;

/// A GPU. Its context is the one the framework uses; it is made when the GPU is first needed, never
/// before.
pub struct GpuDevice {
    ordinal: u32,
    driver: CudaDriver,
    /// Made on first use, under the lock.
    opened: Mutex<Option<Arc<OpenGpu>>>,
}

impl GpuDevice {
    /// Returns the GPU with this ordinal among the GPUs that the process sees. The GPU is opened at
    /// its first use.
    pub fn new(driver: CudaDriver, ordinal: u32) -> Self {
        Self { ordinal, driver, opened: Mutex::new(None) }
    }

    fn ensure_gpu_open(&self) -> Result<Arc<OpenGpu>> {
        let mut opened = self.opened.lock();
        if let Some(open) = &*opened {
            return Ok(Arc::clone(open));
        }
        let open = Arc::new(OpenGpu::new(&self.driver, self.ordinal)?);
        Ok(Arc::clone(opened.insert(open)))
    }

    /// Returns an event after all work that the framework has queued on this stream.
    ///
    /// # Errors
    /// `CudaDriver`; `Captured` if the stream is recording a graph.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context, or 0 for the default stream, and lives
    /// across the call.
    pub unsafe fn record_event_after(&self, stream: usize) -> Result<Arc<dyn DeviceEvent>> {
        let (open, stream) =
            (self.ensure_gpu_open()?, std::ptr::with_exposed_provenance_mut(stream));
        // An event of a captured stream would become a part of the graph and would never be reached
        // here.
        if open.context.is_capturing(stream)? {
            return Err(Error::Captured { ordinal: self.ordinal });
        }
        Ok(Arc::new(open.record_event(stream, Vec::new())?))
    }

    pub(crate) fn cuda_driver(&self) -> &CudaDriver {
        &self.driver
    }

    /// Returns a new stream for one communicator.
    ///
    /// # Errors
    /// `CudaDriver`.
    pub fn create_stream(&self) -> Result<GpuStream> {
        GpuStream::new(self.ensure_gpu_open()?)
    }

    /// Returns the context, for kernels.
    ///
    /// # Errors
    /// `CudaDriver`.
    pub fn primary_context(&self) -> Result<Arc<PrimaryContext>> {
        Ok(Arc::clone(&self.ensure_gpu_open()?.context))
    }

    /// Queues copies, all in one direction, and an event after them. The event keeps the memory of
    /// the buffers alive.
    fn start_copies(&self, pairs: &[(Buffer, Buffer)]) -> Result<RecordedEvent, CollectiveError> {
        let here = MemoryKind::Device(self.ordinal);
        let wrong = |reason: String| Err(CollectiveError::Shape { reason });
        let Some((first, _)) = pairs.first() else {
            return wrong("nothing is to be copied".to_owned());
        };
        let down = first.memory_kind() == here;
        for (from, to) in pairs {
            if from.len() != to.len() {
                return wrong(format!("{} bytes are copied to {}", from.len(), to.len()));
            }
            let ends = if down { (here, MemoryKind::Host) } else { (MemoryKind::Host, here) };
            if (from.memory_kind(), to.memory_kind()) != ends {
                let (from, to) = (from.memory_kind(), to.memory_kind());
                return wrong(format!("device {} copies from {from:?} to {to:?}", self.ordinal));
            }
        }
        let open = self.ensure_gpu_open().map_err(|error| self.device_error(&error))?;
        // The blocks of staging memory of finished copies are free again after this.
        open.release_finished_buffers();
        let (name, stream) = if down {
            ("cuMemcpyDtoHAsync", open.device_to_host)
        } else {
            ("cuMemcpyHtoDAsync", open.host_to_device)
        };
        let copied = open.context.call_driver(name, |table| {
            for (from, to) in pairs.iter().filter(|(from, _)| !from.is_empty()) {
                let (source, target, bytes) = (from.address(), to.address(), from.len());
                // SAFETY: both ranges have `bytes` bytes by the promise of `Buffer::from_raw`. The
                // event below and each of its waiters keep the memory until the event is reached.
                let status = unsafe {
                    match down {
                        true => (table.to_host)(
                            target.cast(),
                            source.expose_provenance() as u64,
                            bytes,
                            stream,
                        ),
                        false => (table.to_device)(
                            target.expose_provenance() as u64,
                            source.cast(),
                            bytes,
                            stream,
                        ),
                    }
                };
                if status != 0 {
                    return status;
                }
            }
            0
        });
        let keep = pairs.iter().flat_map(|(from, to)| [from.clone(), to.clone()]).collect();
        // Also after a failure: work that was queued before it continues.
        let event = open.record_event(stream, keep);
        copied.and(event).map_err(|error| self.device_error(&error))
    }

    fn device_error(&self, error: &Error) -> CollectiveError {
        CollectiveError::Device { ordinal: self.ordinal, reason: error.to_string() }
    }
}

impl Device for GpuDevice {
    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn allocate_staging(&self, bytes: usize) -> Result<HostMemory, CollectiveError> {
        let open = self.ensure_gpu_open().map_err(|error| self.device_error(&error))?;
        open.pool.lend_memory(bytes).ok_or_else(|| CollectiveError::Device {
            ordinal: self.ordinal,
            reason: format!("no host memory is left for {bytes} bytes"),
        })
    }

    fn copy_async(
        &self,
        from: &Buffer,
        to: &Buffer,
    ) -> Result<Arc<dyn DeviceEvent>, CollectiveError> {
        Ok(Arc::new(self.start_copies(&[(from.clone(), to.clone())])?))
    }

    fn copy_all_async(
        &self,
        pairs: &[(Buffer, Buffer)],
    ) -> Result<Arc<dyn DeviceEvent>, CollectiveError> {
        Ok(Arc::new(self.start_copies(pairs)?))
    }
}

#[cfg(test)]
pub(crate) mod tests;

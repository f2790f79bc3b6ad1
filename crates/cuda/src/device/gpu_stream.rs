// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stream of a communicator, and memory for results whose size was unknown before: allocated on
//! that stream, freed on the stream that has fetched the result. The driver keeps the order, the
//! host waits for nothing.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use farandole_collectives::{DeviceEvent, Error as CollectiveError, Result, ResultMemory};
use farandole_kernels::{Buffer, DeviceStream as FrameworkStream, MemoryKind};
use parking_lot::Mutex;

use super::open_gpu::OpenGpu;
use crate::driver::{PrimaryContext, RawStream};
use crate::nccl::CommunicatorStream;

/// A stream of a GPU that one communicator works on.
pub struct GpuStream(Arc<OwnedStream>);

/// The stream, for as long as memory may be given back on it.
struct OwnedStream {
    open: Arc<OpenGpu>,
    stream: RawStream,
}

// SAFETY: streams may be used from any thread; the driver orders calls on one itself.
unsafe impl Send for OwnedStream {}
// SAFETY: as above.
unsafe impl Sync for OwnedStream {}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let stream = self.stream;
        // SAFETY: the stream is ours and is destroyed once, when its work is done. There is nothing
        // to do about a failure.
        drop(
            self.open
                .context
                .call_driver("cuStreamDestroy", |table| unsafe { (table.stream_destroy)(stream) }),
        );
    }
}

impl GpuStream {
    pub(super) fn new(open: Arc<OpenGpu>) -> crate::Result<Self> {
        let stream = open.context.create_stream()?;
        Ok(Self(Arc::new(OwnedStream { open, stream })))
    }

    pub(crate) fn primary_context(&self) -> Arc<PrimaryContext> {
        Arc::clone(&self.0.open.context)
    }

    /// Copies memory of the device in the order of the stream, which must be done before either is
    /// used otherwise.
    ///
    /// # Errors
    /// `CudaDriver`.
    pub(crate) fn copy_within_device(&self, from: u64, to: u64, bytes: usize) -> crate::Result<()> {
        let stream = self.0.stream;
        // SAFETY: the caller's ranges have so many bytes, until the stream is done with them.
        self.0.open.context.call_driver("cuMemcpyDtoDAsync", |table| unsafe {
            (table.within)(to, from, bytes, stream)
        })
    }
}

impl CommunicatorStream for GpuStream {
    fn device_ordinal(&self) -> u32 {
        self.0.open.context.device_ordinal()
    }

    fn raw_stream(&self) -> RawStream {
        self.0.stream
    }

    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>> {
        Ok(Arc::new(self.0.open.record_event(self.0.stream, Vec::new())?))
    }

    fn allocate_result(&self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        let start = self.0.open.context.allocate_async(bytes, self.0.stream)?;
        Ok(Arc::new(GpuResultMemory {
            owned_stream: Arc::clone(&self.0),
            start,
            bytes,
            needs_free: Mutex::new(true),
        }))
    }

    fn with_current_device(&self, work: &mut dyn FnMut()) -> Result<()> {
        let done = self.0.open.context.call_driver("cuCtxPushCurrent", |_| {
            work();
            0
        });
        Ok(done?)
    }
}

struct GpuResultMemory {
    owned_stream: Arc<OwnedStream>,
    start: u64,
    bytes: usize,
    /// It was not given back.
    needs_free: Mutex<bool>,
}

impl ResultMemory for GpuResultMemory {
    fn as_buffer(&self) -> Buffer {
        let address = usize::try_from(self.start).unwrap_or_default();
        let place = MemoryKind::Device(self.owned_stream.open.context.device_ordinal());
        // SAFETY: the memory has `bytes` bytes, and only the operation that it was allocated for
        // uses it.
        unsafe {
            Buffer::from_raw(std::ptr::with_exposed_provenance_mut(address), self.bytes, place)
        }
    }

    fn copy_out_then_release(
        &self,
        to: &Buffer,
        reached: Option<&Arc<dyn DeviceEvent>>,
        stream: FrameworkStream,
    ) -> Result<()> {
        let context = &self.owned_stream.open.context;
        let wrong = |reason: String| Err(CollectiveError::Shape { reason });
        if (to.memory_kind(), to.len())
            != (MemoryKind::Device(context.device_ordinal()), self.bytes)
        {
            let (ordinal, place) = (context.device_ordinal(), to.memory_kind());
            return wrong(format!(
                "{} bytes of device {ordinal} are fetched to {} at {place:?}",
                self.bytes,
                to.len()
            ));
        }
        let mut left = self.needs_free.lock();
        if !*left {
            return wrong("a result can be fetched once".to_owned());
        }
        if let Some(event) = reached {
            event.make_stream_wait(stream)?;
        }
        let then: RawStream = std::ptr::with_exposed_provenance_mut(stream.raw_handle());
        let (target, bytes) = (to.address().expose_provenance() as u64, self.bytes);
        // SAFETY: both ranges have so many bytes; the target's owner uses it on this stream, which
        // lives by the promise of `RawStream::from_raw`, and ours goes back behind the copy.
        let copied = context.call_driver("cuMemcpyDtoDAsync", |table| unsafe {
            (table.within)(target, self.start, bytes, then)
        });
        // Also when nothing was copied.
        *left = false;
        Ok(copied.and(context.free_async(self.start, then))?)
    }
}

impl Drop for GpuResultMemory {
    fn drop(&mut self) {
        if *self.needs_free.get_mut() {
            // Behind what writes it, which is on this stream. There is nothing to do about a
            // failure.
            drop(self.owned_stream.open.context.free_async(self.start, self.owned_stream.stream));
        }
    }
}

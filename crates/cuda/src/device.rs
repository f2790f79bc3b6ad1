// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU with the traits `Device` and `DeviceEvent`: copies on our own stream, which events join
//! with the framework's stream.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

mod gpu_stream;

use std::sync::Arc;

use farandole_collectives::{Device, DeviceEvent, Error as CollectiveError};
use farandole_kernels::{Buffer, DeviceStream as Theirs, HostMemory, MemoryKind};
use parking_lot::Mutex;

use crate::driver::{CudaDriver, Mark, PrimaryContext, Stream};
use crate::staging::{PageLocking, StagingPool};
use crate::{Error, Result};

pub use gpu_stream::GpuStream;

/// Events kept for later.
const MAX_POOLED_EVENTS: usize = 256;

/// A GPU. Its context is the one the framework uses; it is made when the GPU is first needed, never
/// before.
pub struct GpuDevice {
    ordinal: u32,
    driver: CudaDriver,
    /// Made on first use, under the lock.
    opened: Mutex<Option<Arc<OpenGpu>>>,
}

/// The parts of a GPU that is in use.
struct OpenGpu {
    context: Arc<PrimaryContext>,
    /// Copies to the host, and copies from it: both directions of the link work at a time.
    device_to_host: Stream,
    host_to_device: Stream,
    pooled_events: Mutex<Vec<Mark>>,
    /// Buffers of copies that only streams wait for: kept until the copies are done.
    held_buffers: Mutex<Vec<(Mark, Vec<Buffer>)>>,
    pool: StagingPool<PageLocker>,
}

// SAFETY: streams and events may be used from any thread.
unsafe impl Send for OpenGpu {}
// SAFETY: as above; the driver orders calls on a stream itself.
unsafe impl Sync for OpenGpu {}

struct PageLocker(Arc<PrimaryContext>);

impl PageLocking for PageLocker {
    fn lock_pages(&self, memory: &HostMemory) -> bool {
        self.0.lock_host_pages(memory.address(), memory.len()).is_ok()
    }

    fn unlock_pages(&self, memory: &HostMemory) {
        self.0.unlock_host_pages(memory.address());
    }
}

impl OpenGpu {
    fn new(driver: &CudaDriver, ordinal: u32) -> Result<Self> {
        let context = Arc::new(driver.retain_primary_context(ordinal)?);
        let (inward, outward) = (context.create_stream()?, context.create_stream()?);
        let pool = StagingPool::new(PageLocker(Arc::clone(&context)));
        let (marks, limbo) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        Ok(Self {
            context,
            device_to_host: inward,
            host_to_device: outward,
            pooled_events: marks,
            held_buffers: limbo,
            pool,
        })
    }

    /// Lets go of what copies have done with.
    fn release_finished_buffers(&self) {
        let mut over = Vec::new();
        self.held_buffers.lock().retain_mut(|(mark, keep)| {
            // What failed touches nothing any more.
            let done = self.context.is_event_complete(*mark).unwrap_or(true);
            if done {
                over.push((*mark, std::mem::take(keep)));
            }
            !done
        });
        for (mark, _) in over {
            self.recycle_event(mark);
        }
    }

    /// Keeps an event for later, or destroys it.
    fn recycle_event(&self, mark: Mark) {
        let mut marks = self.pooled_events.lock();
        if marks.len() < MAX_POOLED_EVENTS {
            marks.push(mark);
            return;
        }
        drop(marks);
        // SAFETY: the event is ours and destroyed once.
        drop(
            self.context
                .call_driver("cuEventDestroy", |table| unsafe { (table.event_destroy)(mark) }),
        );
    }

    /// Returns an event after the present work of a stream.
    fn record_event(self: &Arc<Self>, stream: Stream, keep: Vec<Buffer>) -> Result<RecordedEvent> {
        let kept = self.pooled_events.lock().pop();
        let mark = kept.map_or_else(|| self.context.create_event(), Ok)?;
        // From here on the event goes back when it is dropped.
        let event = RecordedEvent {
            open: Arc::clone(self),
            raw_event: mark,
            done: Mutex::new(false),
            waiting_stream: Mutex::new(None),
            buffers: keep,
        };
        // SAFETY: the event is ours, and the caller's stream lives across the call.
        let recorded = self
            .context
            .call_driver("cuEventRecord", |table| unsafe { (table.event_record)(mark, stream) });
        if recorded.is_err() {
            *event.done.lock() = true;
        }
        recorded.map(|()| event)
    }
}

impl Drop for OpenGpu {
    fn drop(&mut self) {
        let mut marks = std::mem::take(self.pooled_events.get_mut());
        let limbo = std::mem::take(self.held_buffers.get_mut());
        marks.extend(limbo.iter().map(|(mark, _)| *mark));
        let streams = [self.device_to_host, self.host_to_device];
        // Wait for the remaining work of the streams. A failure here cannot be handled.
        drop(self.context.call_driver("cuStreamDestroy", |table| {
            // SAFETY: the streams and the events are ours and are destroyed once.
            unsafe {
                for stream in streams {
                    (table.stream_synchronize)(stream);
                }
                for mark in marks {
                    (table.event_destroy)(mark);
                }
                streams.into_iter().map(|stream| (table.stream_destroy)(stream)).max().unwrap_or(0)
            }
        }));
        drop(limbo);
    }
}

impl GpuDevice {
    /// Returns the GPU with this ordinal among the GPUs that the process sees. The GPU is opened at
    /// its first use.
    pub fn new(driver: CudaDriver, ordinal: u32) -> Self {
        Self { ordinal, driver, opened: Mutex::new(None) }
    }

    fn ensure_open(&self) -> Result<Arc<OpenGpu>> {
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
        let (open, stream) = (self.ensure_open()?, std::ptr::with_exposed_provenance_mut(stream));
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
        GpuStream::new(self.ensure_open()?)
    }

    /// Returns the context, for kernels.
    ///
    /// # Errors
    /// `CudaDriver`.
    pub fn primary_context(&self) -> Result<Arc<PrimaryContext>> {
        Ok(Arc::clone(&self.ensure_open()?.context))
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
        let open = self.ensure_open().map_err(|error| self.device_error(&error))?;
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
        let open = self.ensure_open().map_err(|error| self.device_error(&error))?;
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

/// A point on a stream.
struct RecordedEvent {
    open: Arc<OpenGpu>,
    raw_event: Mark,
    done: Mutex<bool>,
    /// The last stream that waits for the event. From then on the tensors are used in stream order.
    waiting_stream: Mutex<Option<usize>>,
    /// Buffers that our earlier work reads and writes; empty if the work is the framework's.
    buffers: Vec<Buffer>,
}

// SAFETY: events may be used from any thread, and by several at a time.
unsafe impl Send for RecordedEvent {}
// SAFETY: as above; what changes is behind locks.
unsafe impl Sync for RecordedEvent {}

impl DeviceEvent for RecordedEvent {
    fn is_ready(&self) -> Result<bool, CollectiveError> {
        let mut done = self.done.lock();
        if !*done {
            *done = self.open.context.is_event_complete(self.raw_event).map_err(|error| {
                CollectiveError::Device {
                    ordinal: self.open.context.device_ordinal(),
                    reason: error.to_string(),
                }
            })?;
        }
        Ok(*done)
    }

    fn device_ordinal(&self) -> u32 {
        self.open.context.device_ordinal()
    }

    fn make_stream_wait(&self, stream: Theirs) -> Result<(), CollectiveError> {
        let mut held = self.waiting_stream.lock();
        // Tensors that were reduced together share an event.
        if *held == Some(stream.raw_handle()) {
            return Ok(());
        }
        let (then, mark) =
            (std::ptr::with_exposed_provenance_mut(stream.raw_handle()), self.raw_event);
        let context = &self.open.context;
        // SAFETY: the event is recorded, and the stream lives by the promise of `Stream::from_raw`.
        context.call_driver("cuStreamWaitEvent", |table| unsafe {
            (table.stream_wait)(then, mark, 0)
        })?;
        *held = Some(stream.raw_handle());
        Ok(())
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        let mark = self.raw_event;
        if !*self.done.get_mut() && !self.buffers.is_empty() {
            if self.waiting_stream.get_mut().is_some() {
                // Staging memory must not be used again before, and no thread waits for that.
                self.open.held_buffers.lock().push((mark, std::mem::take(&mut self.buffers)));
                return;
            }
            // The operation was abandoned, so no copy may use its tensors afterwards. A copy takes
            // milliseconds.
            // SAFETY: the event is ours.
            drop(self.open.context.call_driver("cuEventSynchronize", |table| unsafe {
                (table.event_synchronize)(mark)
            }));
        }
        self.open.recycle_event(mark);
    }
}

#[cfg(test)]
pub(crate) mod tests;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU in use: its context, the streams of copies, and events on them. It is opened once and
//! lives as long as its users.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use farandole_collectives::{DeviceEvent, Error as CollectiveError};
use farandole_kernels::{Buffer, DeviceStream as FrameworkStream, HostMemory};
use parking_lot::Mutex;

use crate::Result;
use crate::driver::{CudaDriver, PrimaryContext, RawEvent, RawStream};
use crate::staging::{PageLocking, StagingPool};

/// Limit of the unused events that are kept for reuse, because creating one costs a driver call.
const MAX_POOLED_EVENTS: usize = 256;

/// The parts of a GPU that is in use.
pub(super) struct OpenGpu {
    pub(super) context: Arc<PrimaryContext>,
    /// One stream for each direction, because the link to the GPU copies in both at the same time.
    pub(super) device_to_host: RawStream,
    pub(super) host_to_device: RawStream,
    pooled_events: Mutex<Vec<RawEvent>>,
    /// Buffers of copies that only streams wait for: kept until the copies are done.
    held_buffers: Mutex<Vec<(RawEvent, Vec<Buffer>)>>,
    pub(super) pool: StagingPool<PageLocker>,
}

// SAFETY: streams and events may be used from any thread.
unsafe impl Send for OpenGpu {}

// SAFETY: as above; the driver orders calls on a stream itself.
unsafe impl Sync for OpenGpu {}

impl OpenGpu {
    pub(super) fn new(driver: &CudaDriver, ordinal: u32) -> Result<Self> {
        let context = Arc::new(driver.retain_primary_context(ordinal)?);
        let (inward, outward) = (context.create_stream()?, context.create_stream()?);
        let pool = StagingPool::new(PageLocker(Arc::clone(&context)));
        let (pooled_events, held_buffers) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        Ok(Self {
            context,
            device_to_host: inward,
            host_to_device: outward,
            pooled_events,
            held_buffers,
            pool,
        })
    }

    /// Drops buffers whose copies are complete, and recycles their events.
    pub(super) fn release_finished_buffers(&self) {
        let mut finished = Vec::new();
        self.held_buffers.lock().retain_mut(|(raw_event, keep)| {
            // A failed copy counts as complete: the device no longer accesses its buffers.
            let done = self.context.is_event_complete(*raw_event).unwrap_or(true);
            if done {
                finished.push((*raw_event, std::mem::take(keep)));
            }
            !done
        });
        for (raw_event, _) in finished {
            self.recycle_event(raw_event);
        }
    }

    /// Pools an event for reuse, or destroys it if the pool is full.
    fn recycle_event(&self, raw_event: RawEvent) {
        let mut pooled_events = self.pooled_events.lock();
        if pooled_events.len() < MAX_POOLED_EVENTS {
            pooled_events.push(raw_event);
            return;
        }
        drop(pooled_events);
        // SAFETY: the event is ours and destroyed once.
        drop(
            self.context
                .call_driver("cuEventDestroy", |table| unsafe { (table.event_destroy)(raw_event) }),
        );
    }

    /// Records an event after the present work of a stream, and holds `keep` until it completes.
    pub(super) fn record_event(
        self: &Arc<Self>,
        stream: RawStream,
        keep: Vec<Buffer>,
    ) -> Result<RecordedEvent> {
        let kept = self.pooled_events.lock().pop();
        let raw_event = kept.map_or_else(|| self.context.create_event(), Ok)?;
        // From here on, dropping `event` recycles the raw event, also if recording fails.
        let event = RecordedEvent {
            open: Arc::clone(self),
            raw_event,
            done: Mutex::new(false),
            waiting_stream: Mutex::new(None),
            buffers: keep,
        };
        // SAFETY: the event is ours, and the caller's stream lives across the call.
        let recorded = self.context.call_driver("cuEventRecord", |table| unsafe {
            (table.event_record)(raw_event, stream)
        });
        if recorded.is_err() {
            // An event that was not recorded must not be waited for in the drop.
            *event.done.lock() = true;
        }
        recorded.map(|()| event)
    }
}

impl Drop for OpenGpu {
    fn drop(&mut self) {
        let mut pooled_events = std::mem::take(self.pooled_events.get_mut());
        let held_buffers = std::mem::take(self.held_buffers.get_mut());
        pooled_events.extend(held_buffers.iter().map(|(raw_event, _)| *raw_event));
        let streams = [self.device_to_host, self.host_to_device];
        // Wait for the remaining work of the streams. A failure here cannot be handled.
        drop(self.context.call_driver("cuStreamDestroy", |table| {
            // SAFETY: the streams and the events are ours and are destroyed once.
            unsafe {
                for stream in streams {
                    (table.stream_synchronize)(stream);
                }
                for raw_event in pooled_events {
                    (table.event_destroy)(raw_event);
                }
                streams.into_iter().map(|stream| (table.stream_destroy)(stream)).max().unwrap_or(0)
            }
        }));
        drop(held_buffers);
    }
}

pub(super) struct PageLocker(Arc<PrimaryContext>);

impl PageLocking for PageLocker {
    fn lock_pages(&self, memory: &HostMemory) -> bool {
        self.0.lock_host_pages(memory.address(), memory.len()).is_ok()
    }

    fn unlock_pages(&self, memory: &HostMemory) {
        self.0.unlock_host_pages(memory.address());
    }
}

/// An event that was recorded on a stream.
pub(super) struct RecordedEvent {
    open: Arc<OpenGpu>,
    raw_event: RawEvent,
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

    fn make_stream_wait(&self, stream: FrameworkStream) -> Result<(), CollectiveError> {
        let mut held = self.waiting_stream.lock();
        // Tensors that were reduced together share an event.
        if *held == Some(stream.raw_handle()) {
            return Ok(());
        }
        let (then, raw_event) =
            (std::ptr::with_exposed_provenance_mut(stream.raw_handle()), self.raw_event);
        let context = &self.open.context;
        // SAFETY: the event is recorded, and the stream lives by the promise of
        // `RawStream::from_raw`.
        context.call_driver("cuStreamWaitEvent", |table| unsafe {
            (table.stream_wait)(then, raw_event, 0)
        })?;
        *held = Some(stream.raw_handle());
        Ok(())
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        let raw_event = self.raw_event;
        if !*self.done.get_mut() && !self.buffers.is_empty() {
            if self.waiting_stream.get_mut().is_some() {
                // Staging memory must not be used again before, and no thread waits for that.
                self.open.held_buffers.lock().push((raw_event, std::mem::take(&mut self.buffers)));
                return;
            }
            // The operation was abandoned, so no copy may use its tensors afterwards. A copy takes
            // milliseconds.
            // SAFETY: the event is ours.
            drop(self.open.context.call_driver("cuEventSynchronize", |table| unsafe {
                (table.event_synchronize)(raw_event)
            }));
        }
        self.open.recycle_event(raw_event);
    }
}

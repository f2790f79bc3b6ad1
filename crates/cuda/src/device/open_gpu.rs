// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU in use: its context, the streams of copies, and events on them. It is opened once and
//! lives as long as its users.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use farandole_collectives::{DeviceEvent, Error as CollectiveError};
use farandole_kernels::{Buffer, DeviceStream as Theirs, HostMemory};
use parking_lot::Mutex;

use crate::Result;
use crate::driver::{CudaDriver, Mark, PrimaryContext, Stream};
use crate::staging::{PageLocking, StagingPool};

/// Events kept for later.
const MAX_POOLED_EVENTS: usize = 256;

/// The parts of a GPU that is in use.
pub(super) struct OpenGpu {
    pub(super) context: Arc<PrimaryContext>,
    /// Copies to the host, and copies from it: both directions of the link work at a time.
    pub(super) device_to_host: Stream,
    pub(super) host_to_device: Stream,
    pooled_events: Mutex<Vec<Mark>>,
    /// Buffers of copies that only streams wait for: kept until the copies are done.
    held_buffers: Mutex<Vec<(Mark, Vec<Buffer>)>>,
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
    pub(super) fn release_finished_buffers(&self) {
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
    pub(super) fn record_event(
        self: &Arc<Self>,
        stream: Stream,
        keep: Vec<Buffer>,
    ) -> Result<RecordedEvent> {
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

pub(super) struct PageLocker(Arc<PrimaryContext>);

impl PageLocking for PageLocker {
    fn lock_pages(&self, memory: &HostMemory) -> bool {
        self.0.lock_host_pages(memory.address(), memory.len()).is_ok()
    }

    fn unlock_pages(&self, memory: &HostMemory) {
        self.0.unlock_host_pages(memory.address());
    }
}

/// A point on a stream.
pub(super) struct RecordedEvent {
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU behind the traits `Device` and `Event`: copies on a stream of our own, joined with the framework's by events.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use farandole_collectives::{Buffer, Device, Error as CollectiveError, Event, Memory, Place};
use parking_lot::Mutex;

use crate::driver::{Context, Driver, Mark, Stream};
use crate::nccl::Lane;
use crate::staging::{Locks, Pool};
use crate::{Error, Result};

/// Events kept for later.
const MARKS: usize = 256;

/// A GPU. Its context is the one the framework uses; it is made when the GPU is first needed, never before.
pub struct Gpu {
    ordinal: u32,
    driver: Driver,
    /// Made on first use, under the lock.
    opened: Mutex<Option<Arc<Open>>>,
}

/// What there is of a GPU that is used.
struct Open {
    context: Arc<Context>,
    stream: Stream,
    marks: Mutex<Vec<Mark>>,
    pool: Pool<Lock>,
}

// SAFETY: streams and events may be used from any thread.
unsafe impl Send for Open {}
// SAFETY: as above; the driver orders calls on a stream itself.
unsafe impl Sync for Open {}

struct Lock(Arc<Context>);

impl Locks for Lock {
    fn lock(&self, memory: &Memory) -> bool {
        self.0.lock(memory.address(), memory.len()).is_ok()
    }

    fn unlock(&self, memory: &Memory) {
        self.0.unlock(memory.address());
    }
}

impl Open {
    fn new(driver: &Driver, ordinal: u32) -> Result<Self> {
        let context = Arc::new(driver.context(ordinal)?);
        let stream = context.stream()?;
        let pool = Pool::new(Lock(Arc::clone(&context)));
        Ok(Self { context, stream, marks: Mutex::new(Vec::new()), pool })
    }

    /// An event after what is on a stream now.
    fn mark(self: &Arc<Self>, stream: Stream, keep: Vec<Buffer>) -> Result<Reached> {
        let kept = self.marks.lock().pop();
        let mark = kept.map_or_else(|| self.context.mark(), Ok)?;
        // From here on the event goes back when it is dropped.
        let event = Reached { open: Arc::clone(self), mark, done: Mutex::new(false), keep };
        // SAFETY: the event is ours, and the caller's stream lives across the call.
        let recorded =
            self.context.call("cuEventRecord", |table| unsafe { (table.event_record)(mark, stream) });
        if recorded.is_err() {
            *event.done.lock() = true;
        }
        recorded.map(|()| event)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let (marks, stream) = (std::mem::take(self.marks.get_mut()), self.stream);
        // What the stream still does is over when it has been waited for; nothing can be done about failures.
        drop(self.context.call("cuStreamDestroy", |table| {
            // SAFETY: the stream and the events are ours and are destroyed once.
            unsafe {
                (table.stream_synchronize)(stream);
                for mark in marks {
                    (table.event_destroy)(mark);
                }
                (table.stream_destroy)(stream)
            }
        }));
    }
}

impl Gpu {
    /// The GPU of this number among those that the process sees; nothing is asked of it yet.
    pub fn new(driver: Driver, ordinal: u32) -> Self {
        Self { ordinal, driver, opened: Mutex::new(None) }
    }

    fn open(&self) -> Result<Arc<Open>> {
        let mut opened = self.opened.lock();
        if let Some(open) = &*opened {
            return Ok(Arc::clone(open));
        }
        let open = Arc::new(Open::new(&self.driver, self.ordinal)?);
        Ok(Arc::clone(opened.insert(open)))
    }

    /// An event after everything the framework has put on this stream so far.
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context, or 0 for the default one, and lives across the call.
    pub unsafe fn after(&self, stream: usize) -> Result<Box<dyn Event>> {
        let open = self.open()?;
        Ok(Box::new(open.mark(std::ptr::with_exposed_provenance_mut(stream), Vec::new())?))
    }

    /// A stream for a communicator of its own.
    ///
    /// # Errors
    /// `Driver`.
    pub fn lane(&self) -> Result<GpuLane> {
        let open = self.open()?;
        let stream = open.context.stream()?;
        Ok(GpuLane { open, stream })
    }

    /// The context, for kernels.
    ///
    /// # Errors
    /// `Driver`.
    pub fn context(&self) -> Result<Arc<Context>> {
        Ok(Arc::clone(&self.open()?.context))
    }

    fn start(&self, from: &Buffer, to: &Buffer) -> Result<Reached, CollectiveError> {
        if from.len() != to.len() {
            let reason = format!("{} bytes are copied to {}", from.len(), to.len());
            return Err(CollectiveError::Shape { reason });
        }
        let open = self.open().map_err(|error| self.failed(&error))?;
        let (stream, bytes) = (open.stream, from.len());
        let here = Place::Device(self.ordinal);
        let (source, target) = (from.address(), to.address());
        let copied = match (from.place(), to.place()) {
            _ if bytes == 0 => Ok(()),
            // SAFETY: both ranges have `bytes` bytes by the promise of `Buffer::from_raw`, until the event below is
            // reached, which keeps what the buffers own; so does whoever waits for it.
            (from, Place::Host) if from == here => open.context.call("cuMemcpyDtoHAsync", |table| unsafe {
                (table.to_host)(target.cast(), source.expose_provenance() as u64, bytes, stream)
            }),
            // SAFETY: as above.
            (Place::Host, to) if to == here => open.context.call("cuMemcpyHtoDAsync", |table| unsafe {
                (table.to_device)(target.expose_provenance() as u64, source.cast(), bytes, stream)
            }),
            (from, to) => {
                let reason = format!("device {} copies from {from:?} to {to:?}", self.ordinal);
                return Err(CollectiveError::Shape { reason });
            }
        };
        copied
            .and_then(|()| open.mark(stream, vec![from.clone(), to.clone()]))
            .map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &Error) -> CollectiveError {
        CollectiveError::Device { ordinal: self.ordinal, reason: error.to_string() }
    }
}

impl Device for Gpu {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn staging(&self, bytes: usize) -> Result<Memory, CollectiveError> {
        let open = self.open().map_err(|error| self.failed(&error))?;
        open.pool.lend(bytes).ok_or_else(|| CollectiveError::Device {
            ordinal: self.ordinal,
            reason: format!("no host memory is left for {bytes} bytes"),
        })
    }

    fn copy(&self, from: &Buffer, to: &Buffer) -> Result<Box<dyn Event>, CollectiveError> {
        Ok(Box::new(self.start(from, to)?))
    }
}

/// A point on a stream.
struct Reached {
    open: Arc<Open>,
    mark: Mark,
    done: Mutex<bool>,
    /// What our work before it reads and writes; nothing where it is the framework's.
    keep: Vec<Buffer>,
}

// SAFETY: events may be used from any thread; this one is its owner's.
unsafe impl Send for Reached {}

impl Event for Reached {
    fn is_ready(&self) -> Result<bool, CollectiveError> {
        let mut done = self.done.lock();
        if !*done {
            *done = self.open.context.is_reached(self.mark).map_err(|error| CollectiveError::Device {
                ordinal: self.open.context.ordinal(),
                reason: error.to_string(),
            })?;
        }
        Ok(*done)
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        let mark = self.mark;
        if !*self.done.get_mut() && !self.keep.is_empty() {
            // Somebody gave up an operation: afterwards nothing may touch its tensors. A copy takes milliseconds.
            // SAFETY: the event is ours.
            drop(
                self.open
                    .context
                    .call("cuEventSynchronize", |table| unsafe { (table.event_synchronize)(mark) }),
            );
        }
        let mut marks = self.open.marks.lock();
        if marks.len() < MARKS {
            marks.push(mark);
            return;
        }
        drop(marks);
        // SAFETY: the event is ours and destroyed once.
        drop(self.open.context.call("cuEventDestroy", |table| unsafe { (table.event_destroy)(mark) }));
    }
}

/// A stream of a GPU that one communicator works on.
pub struct GpuLane {
    open: Arc<Open>,
    stream: Stream,
}

// SAFETY: streams may be used from any thread; this one is its owner's.
unsafe impl Send for GpuLane {}

impl GpuLane {
    /// What is put here from now on comes after what the framework's stream has now; the host does not wait.
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Safety
    /// As for [`Gpu::after`].
    pub unsafe fn join(&self, stream: usize) -> Result<()> {
        self.order(std::ptr::with_exposed_provenance_mut(stream), self.stream)
    }

    /// What the framework puts on its stream from now on comes after what is here now; the host does not wait.
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Safety
    /// As for [`Gpu::after`].
    pub unsafe fn lead(&self, stream: usize) -> Result<()> {
        self.order(self.stream, std::ptr::with_exposed_provenance_mut(stream))
    }

    fn order(&self, first: Stream, then: Stream) -> Result<()> {
        let event = self.open.mark(first, Vec::new())?;
        let mark = event.mark;
        // SAFETY: the event is recorded and both streams live across the call, which remembers what the event is at now.
        self.open.context.call("cuStreamWaitEvent", |table| unsafe { (table.stream_wait)(then, mark, 0) })
    }
}

impl Drop for GpuLane {
    fn drop(&mut self) {
        let stream = self.stream;
        // SAFETY: the stream is ours and is destroyed once, when its work is done. There is nothing to do about a failure.
        drop(self.open.context.call("cuStreamDestroy", |table| unsafe { (table.stream_destroy)(stream) }));
    }
}

impl Lane for GpuLane {
    fn ordinal(&self) -> u32 {
        self.open.context.ordinal()
    }

    fn stream(&self) -> Stream {
        self.stream
    }

    fn mark(&self) -> Result<Box<dyn Event>, CollectiveError> {
        Ok(Box::new(self.open.mark(self.stream, Vec::new())?))
    }

    fn with(&self, work: &mut dyn FnMut()) -> Result<(), CollectiveError> {
        let done = self.open.context.call("cuCtxPushCurrent", |_| {
            work();
            0
        });
        Ok(done?)
    }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A GPU with the traits `Device` and `Event`: copies on our own stream, which events join with the
//! framework's stream.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

mod room;

use std::sync::Arc;

use farandole_collectives::{
    Buffer, Device, Error as CollectiveError, Event, Memory, Place, Stream as Theirs,
};
use parking_lot::Mutex;

use crate::driver::{Context, Driver, Mark, Stream};
use crate::staging::{Locks, Pool};
use crate::{Error, Result};

pub use room::GpuLane;

/// Events kept for later.
const MARKS: usize = 256;

/// A GPU. Its context is the one the framework uses; it is made when the GPU is first needed, never
/// before.
pub struct Gpu {
    ordinal: u32,
    driver: Driver,
    /// Made on first use, under the lock.
    opened: Mutex<Option<Arc<Open>>>,
}

/// The parts of a GPU that is in use.
struct Open {
    context: Arc<Context>,
    /// Copies to the host, and copies from it: both directions of the link work at a time.
    inward: Stream,
    outward: Stream,
    marks: Mutex<Vec<Mark>>,
    /// Buffers of copies that only streams wait for: kept until the copies are done.
    limbo: Mutex<Vec<(Mark, Vec<Buffer>)>>,
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
        let (inward, outward) = (context.stream()?, context.stream()?);
        let pool = Pool::new(Lock(Arc::clone(&context)));
        let (marks, limbo) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        Ok(Self { context, inward, outward, marks, limbo, pool })
    }

    /// Lets go of what copies have done with.
    fn sweep(&self) {
        let mut over = Vec::new();
        self.limbo.lock().retain_mut(|(mark, keep)| {
            // What failed touches nothing any more.
            let done = self.context.is_reached(*mark).unwrap_or(true);
            if done {
                over.push((*mark, std::mem::take(keep)));
            }
            !done
        });
        for (mark, _) in over {
            self.give_back(mark);
        }
    }

    /// Keeps an event for later, or destroys it.
    fn give_back(&self, mark: Mark) {
        let mut marks = self.marks.lock();
        if marks.len() < MARKS {
            marks.push(mark);
            return;
        }
        drop(marks);
        // SAFETY: the event is ours and destroyed once.
        drop(self.context.call("cuEventDestroy", |table| unsafe { (table.event_destroy)(mark) }));
    }

    /// Returns an event after the present work of a stream.
    fn mark(self: &Arc<Self>, stream: Stream, keep: Vec<Buffer>) -> Result<Reached> {
        let kept = self.marks.lock().pop();
        let mark = kept.map_or_else(|| self.context.mark(), Ok)?;
        // From here on the event goes back when it is dropped.
        let event = Reached {
            open: Arc::clone(self),
            mark,
            done: Mutex::new(false),
            held: Mutex::new(None),
            keep,
        };
        // SAFETY: the event is ours, and the caller's stream lives across the call.
        let recorded = self
            .context
            .call("cuEventRecord", |table| unsafe { (table.event_record)(mark, stream) });
        if recorded.is_err() {
            *event.done.lock() = true;
        }
        recorded.map(|()| event)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut marks = std::mem::take(self.marks.get_mut());
        let limbo = std::mem::take(self.limbo.get_mut());
        marks.extend(limbo.iter().map(|(mark, _)| *mark));
        let streams = [self.inward, self.outward];
        // What the streams still do is over when they have been waited for; nothing can be done
        // about failures.
        drop(self.context.call("cuStreamDestroy", |table| {
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

impl Gpu {
    /// Returns the GPU of this number among those that the process sees; nothing is asked of it
    /// yet.
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

    /// Returns an event after everything the framework has put on this stream so far.
    ///
    /// # Errors
    /// `Driver`; `Captured` when that is noted down for a graph.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context, or 0 for the default one, and lives
    /// across the call.
    pub unsafe fn after(&self, stream: usize) -> Result<Arc<dyn Event>> {
        let (open, stream) = (self.open()?, std::ptr::with_exposed_provenance_mut(stream));
        if open.context.is_capturing(stream)? {
            return Err(Error::Captured { ordinal: self.ordinal });
        }
        Ok(Arc::new(open.mark(stream, Vec::new())?))
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Returns a stream for a communicator of its own.
    ///
    /// # Errors
    /// `Driver`.
    pub fn lane(&self) -> Result<GpuLane> {
        GpuLane::new(self.open()?)
    }

    /// Returns the context, for kernels.
    ///
    /// # Errors
    /// `Driver`.
    pub fn context(&self) -> Result<Arc<Context>> {
        Ok(Arc::clone(&self.open()?.context))
    }

    /// Queues copies, all in one direction, and an event behind them that keeps what the buffers
    /// own.
    fn start(&self, pairs: &[(Buffer, Buffer)]) -> Result<Reached, CollectiveError> {
        let here = Place::Device(self.ordinal);
        let wrong = |reason: String| Err(CollectiveError::Shape { reason });
        let Some((first, _)) = pairs.first() else {
            return wrong("nothing is to be copied".to_owned());
        };
        let down = first.place() == here;
        for (from, to) in pairs {
            if from.len() != to.len() {
                return wrong(format!("{} bytes are copied to {}", from.len(), to.len()));
            }
            let ends = if down { (here, Place::Host) } else { (Place::Host, here) };
            if (from.place(), to.place()) != ends {
                let (from, to) = (from.place(), to.place());
                return wrong(format!("device {} copies from {from:?} to {to:?}", self.ordinal));
            }
        }
        let open = self.open().map_err(|error| self.failed(&error))?;
        open.sweep();
        let (name, stream) = if down {
            ("cuMemcpyDtoHAsync", open.inward)
        } else {
            ("cuMemcpyHtoDAsync", open.outward)
        };
        let copied = open.context.call(name, |table| {
            for (from, to) in pairs.iter().filter(|(from, _)| !from.is_empty()) {
                let (source, target, bytes) = (from.address(), to.address(), from.len());
                // SAFETY: both ranges have `bytes` bytes by the promise of `Buffer::from_raw`,
                // until the event below is reached, which keeps what the buffers own; so does each
                // waiter of the event.
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
        let event = open.mark(stream, keep);
        copied.and(event).map_err(|error| self.failed(&error))
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

    fn copy(&self, from: &Buffer, to: &Buffer) -> Result<Arc<dyn Event>, CollectiveError> {
        Ok(Arc::new(self.start(&[(from.clone(), to.clone())])?))
    }

    fn copy_all(&self, pairs: &[(Buffer, Buffer)]) -> Result<Arc<dyn Event>, CollectiveError> {
        Ok(Arc::new(self.start(pairs)?))
    }
}

/// A point on a stream.
struct Reached {
    open: Arc<Open>,
    mark: Mark,
    done: Mutex<bool>,
    /// The last stream that was told to wait for it: its tensors are used in the order of streams
    /// from then on.
    held: Mutex<Option<usize>>,
    /// Buffers that our earlier work reads and writes; empty if the work is the framework's.
    keep: Vec<Buffer>,
}

// SAFETY: events may be used from any thread, and by several at a time.
unsafe impl Send for Reached {}
// SAFETY: as above; what changes is behind locks.
unsafe impl Sync for Reached {}

impl Event for Reached {
    fn is_ready(&self) -> Result<bool, CollectiveError> {
        let mut done = self.done.lock();
        if !*done {
            *done = self.open.context.is_reached(self.mark).map_err(|error| {
                CollectiveError::Device {
                    ordinal: self.open.context.ordinal(),
                    reason: error.to_string(),
                }
            })?;
        }
        Ok(*done)
    }

    fn ordinal(&self) -> u32 {
        self.open.context.ordinal()
    }

    fn hold(&self, stream: Theirs) -> Result<(), CollectiveError> {
        let mut held = self.held.lock();
        // Tensors that were reduced together share an event.
        if *held == Some(stream.handle()) {
            return Ok(());
        }
        let (then, mark) = (std::ptr::with_exposed_provenance_mut(stream.handle()), self.mark);
        let context = &self.open.context;
        // SAFETY: the event is recorded, and the stream lives by the promise of `Stream::from_raw`.
        context.call("cuStreamWaitEvent", |table| unsafe { (table.stream_wait)(then, mark, 0) })?;
        *held = Some(stream.handle());
        Ok(())
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        let mark = self.mark;
        if !*self.done.get_mut() && !self.keep.is_empty() {
            if self.held.get_mut().is_some() {
                // Staging memory must not be used again before, and no thread waits for that.
                self.open.limbo.lock().push((mark, std::mem::take(&mut self.keep)));
                return;
            }
            // Somebody gave up an operation: afterwards nothing may touch its tensors. A copy takes
            // milliseconds.
            // SAFETY: the event is ours.
            drop(
                self.open
                    .context
                    .call("cuEventSynchronize", |table| unsafe { (table.event_synchronize)(mark) }),
            );
        }
        self.open.give_back(mark);
    }
}

#[cfg(test)]
pub(crate) mod tests;

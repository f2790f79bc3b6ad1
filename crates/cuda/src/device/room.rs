// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stream of a communicator, and memory for results whose size was unknown before: allocated on
//! that stream, freed on the stream that has fetched the result. The driver keeps the order, the
//! host waits for nothing.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::sync::Arc;

use farandole_collectives::{
    Buffer, Error as CollectiveError, Event, Place, Result, Room, Stream as Theirs,
};
use parking_lot::Mutex;

use super::Open;
use crate::driver::{Context, Stream};
use crate::nccl::Lane;

/// A stream of a GPU that one communicator works on.
pub struct GpuLane(Arc<Own>);

/// The stream, for as long as memory may be given back on it.
struct Own {
    open: Arc<Open>,
    stream: Stream,
}

// SAFETY: streams may be used from any thread; the driver orders calls on one itself.
unsafe impl Send for Own {}
// SAFETY: as above.
unsafe impl Sync for Own {}

impl Drop for Own {
    fn drop(&mut self) {
        let stream = self.stream;
        // SAFETY: the stream is ours and is destroyed once, when its work is done. There is nothing
        // to do about a failure.
        drop(
            self.open
                .context
                .call("cuStreamDestroy", |table| unsafe { (table.stream_destroy)(stream) }),
        );
    }
}

impl GpuLane {
    pub(super) fn new(open: Arc<Open>) -> crate::Result<Self> {
        let stream = open.context.stream()?;
        Ok(Self(Arc::new(Own { open, stream })))
    }

    pub(crate) fn context(&self) -> Arc<Context> {
        Arc::clone(&self.0.open.context)
    }

    /// Copies memory of the device in the order of the stream, which must be done before either is
    /// used otherwise.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> crate::Result<()> {
        let stream = self.0.stream;
        // SAFETY: the caller's ranges have so many bytes, until the stream is done with them.
        self.0
            .open
            .context
            .call("cuMemcpyDtoDAsync", |table| unsafe { (table.within)(to, from, bytes, stream) })
    }
}

impl Lane for GpuLane {
    fn ordinal(&self) -> u32 {
        self.0.open.context.ordinal()
    }

    fn stream(&self) -> Stream {
        self.0.stream
    }

    fn mark(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(self.0.open.mark(self.0.stream, Vec::new())?))
    }

    fn room(&self, bytes: usize) -> Result<Arc<dyn Room>> {
        let start = self.0.open.context.allocate(bytes, self.0.stream)?;
        Ok(Arc::new(GpuRoom { lane: Arc::clone(&self.0), start, bytes, left: Mutex::new(true) }))
    }

    fn with(&self, work: &mut dyn FnMut()) -> Result<()> {
        let done = self.0.open.context.call("cuCtxPushCurrent", |_| {
            work();
            0
        });
        Ok(done?)
    }
}

struct GpuRoom {
    lane: Arc<Own>,
    start: u64,
    bytes: usize,
    /// It was not given back.
    left: Mutex<bool>,
}

impl Room for GpuRoom {
    fn buffer(&self) -> Buffer {
        let address = usize::try_from(self.start).unwrap_or_default();
        let place = Place::Device(self.lane.open.context.ordinal());
        // SAFETY: so many bytes are there, and nobody knows of them but the operation that this
        // memory was made for.
        unsafe {
            Buffer::from_raw(std::ptr::with_exposed_provenance_mut(address), self.bytes, place)
        }
    }

    fn fetch(&self, to: &Buffer, reached: Option<&Arc<dyn Event>>, stream: Theirs) -> Result<()> {
        let context = &self.lane.open.context;
        let wrong = |reason: String| Err(CollectiveError::Shape { reason });
        if (to.place(), to.len()) != (Place::Device(context.ordinal()), self.bytes) {
            let (ordinal, place) = (context.ordinal(), to.place());
            return wrong(format!(
                "{} bytes of device {ordinal} are fetched to {} at {place:?}",
                self.bytes,
                to.len()
            ));
        }
        let mut left = self.left.lock();
        if !*left {
            return wrong("a result can be fetched once".to_owned());
        }
        if let Some(event) = reached {
            event.hold(stream)?;
        }
        let then: Stream = std::ptr::with_exposed_provenance_mut(stream.handle());
        let (target, bytes) = (to.address().expose_provenance() as u64, self.bytes);
        // SAFETY: both ranges have so many bytes; the target's owner uses it on this stream, which
        // lives by the promise of `Stream::from_raw`, and ours goes back behind the copy.
        let copied = context.call("cuMemcpyDtoDAsync", |table| unsafe {
            (table.within)(target, self.start, bytes, then)
        });
        // Also when nothing was copied.
        *left = false;
        Ok(copied.and(context.free(self.start, then))?)
    }
}

impl Drop for GpuRoom {
    fn drop(&mut self) {
        if *self.left.get_mut() {
            // Behind what writes it, which is on this stream. There is nothing to do about a
            // failure.
            drop(self.lane.open.context.free(self.start, self.lane.stream));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The history of every tensor, written as a trace that `chrome://tracing` and Perfetto show.
//!
//! ```text
//! whoever holds the engine's progress lock -> Ring (bounded) -> one thread -> file, valid JSON after every flush
//! ```
//!
//! Off, an event costs one relaxed load. The thread exists only while a timeline runs.

mod file;
mod writer;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::file::OLD;
use self::writer::Writer;
use crate::{Ring, Weight};

/// Bytes that wait for the writer at most: some three hundred thousand events.
const BUDGET: usize = 32 << 20;
/// Events of this long are written together.
const GATHER: Duration = Duration::from_millis(20);
/// Longest sleep of the writer when nothing happens.
const LONG: Duration = Duration::from_secs(3600);

/// No rank: the arrivals of all are wanted.
const ALL: u32 = u32::MAX;

const ON: u8 = 1;
const CYCLES: u8 = 2;

/// The result of a finished operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Produced {
    /// Element type.
    pub dtype: &'static str,
    /// Dimensions.
    pub shape: Vec<u64>,
}

/// One tensor of one process set: a "process" of the trace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Track {
    /// The process set.
    pub set: u32,
    /// The tensor.
    pub tensor: Arc<str>,
}

/// The owner of a timeline: the facts that merging the files of all ranks needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Title<'a> {
    /// Name of the process in the trace.
    pub name: &'a str,
    /// Its rank.
    pub rank: u32,
    /// Its host: processes with the same one have the same clock.
    pub host: &'a str,
    /// Number of ranks.
    pub size: usize,
    /// Number of the world of an elastic job.
    pub generation: u64,
}

/// The settings of a timeline.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extent {
    /// Whether every negotiation round has a mark.
    pub cycles: bool,
    /// Whether arrivals of other ranks are left out, because each rank writes its own file.
    pub own: bool,
    /// Its greatest size in bytes; the oldest records are dropped. `None`: no limit.
    pub limit: Option<u64>,
}

#[derive(Clone, Debug)]
enum What {
    Begin(Track, &'static str, Option<u64>),
    Arrived(Track, u32),
    End(Track, Option<Produced>),
    Enter(Arc<str>),
    Leave,
    Cycle,
}

#[derive(Clone, Debug)]
struct Event {
    at: Instant,
    what: What,
}

impl Weight for Event {
    fn weight(&self) -> usize {
        size_of::<Self>()
    }
}

struct Running {
    ring: Arc<Ring<Event>>,
    thread: JoinHandle<io::Result<()>>,
}

/// The timeline of an engine; off until started.
#[derive(Default)]
pub struct Timeline {
    state: AtomicU8,
    /// The rank whose arrivals are wanted, or [`ALL`].
    whose: AtomicU32,
    ring: Mutex<Option<Arc<Ring<Event>>>>,
    /// Held while the file changes. Taken before `ring`.
    running: Mutex<Option<Running>>,
}

impl Timeline {
    /// Returns whether anybody wants events.
    pub fn is_on(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }

    /// Returns the rank whose arrivals alone are wanted, where each rank writes its own file.
    pub fn only(&self) -> Option<u32> {
        Some(self.whose.load(Ordering::Relaxed)).filter(|rank| *rank != ALL)
    }

    /// Writes to `path` from now on, which is created or emptied; what ran before is ended first.
    /// Returns when the file is there and valid. With a limit, the file has half of it at most, and
    /// older records are in the file with [`OLD`] after its name.
    ///
    /// # Errors
    /// When the file cannot be written, or the thread not made; nothing runs then.
    pub fn start(&self, path: &Path, title: Title<'_>, extent: Extent) -> io::Result<()> {
        let mut running = self.running.lock();
        self.end(&mut running)?;
        let mut writer = Writer::new(path, title, extent.limit)?;
        let ring = Arc::new(Ring::new(BUDGET));
        let events = Arc::clone(&ring);
        let write = move || {
            while !events.is_finished() {
                let drained = events.drain(Instant::now() + LONG);
                writer.write(&drained.records, drained.dropped)?;
                if !events.is_finished() {
                    thread::park_timeout(GATHER);
                }
            }
            writer.finish()
        };
        let thread = thread::Builder::new().name("farandole-timeline".to_owned()).spawn(write)?;
        *self.ring.lock() = Some(Arc::clone(&ring));
        *running = Some(Running { ring, thread });
        self.whose.store(if extent.own { title.rank } else { ALL }, Ordering::Relaxed);
        self.state.store(ON | if extent.cycles { CYCLES } else { 0 }, Ordering::Relaxed);
        Ok(())
    }

    /// Writes the remaining records and ends. Does nothing when nothing runs.
    ///
    /// # Errors
    /// When the file could not be written to its end.
    pub fn stop(&self) -> io::Result<()> {
        self.end(&mut self.running.lock())
    }

    fn end(&self, running: &mut Option<Running>) -> io::Result<()> {
        let Some(Running { ring, thread }) = running.take() else { return Ok(()) };
        self.state.store(0, Ordering::Relaxed);
        *self.ring.lock() = None;
        ring.close();
        thread.thread().unpark();
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the timeline's thread panicked")))
    }

    /// A span begins on a track, inside the spans that have begun there before.
    pub fn begin(&self, track: &Track, name: &'static str) {
        self.record(|| What::Begin(track.clone(), name, None));
    }

    /// Like [`Timeline::begin`], for an operation of a list: its number is the same on all ranks.
    pub fn begin_listed(&self, track: &Track, name: &'static str, list: u64) {
        self.record(|| What::Begin(track.clone(), name, Some(list)));
    }

    /// A phase of a training step begins, inside of those that have begun.
    pub fn enter(&self, name: &str) {
        self.record(|| What::Enter(name.into()));
    }

    /// The phase that began last ends.
    pub fn leave(&self) {
        self.record(|| What::Leave);
    }

    /// A rank arrived in the negotiation of a tensor.
    pub fn arrived(&self, track: &Track, rank: u32) {
        self.record(|| What::Arrived(track.clone(), rank));
    }

    /// Ends the last span that began on a track.
    pub fn end_of(&self, track: &Track, produced: Option<Produced>) {
        self.record(|| What::End(track.clone(), produced));
    }

    /// A negotiation round; nothing unless cycles are marked.
    pub fn cycle(&self) {
        if self.state.load(Ordering::Relaxed) & CYCLES != 0 {
            self.record(|| What::Cycle);
        }
    }

    fn record(&self, what: impl FnOnce() -> What) {
        if self.is_on()
            && let Some(ring) = &*self.ring.lock()
        {
            ring.push(Event { at: Instant::now(), what: what() });
        }
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // No caller is left for the error that the file is cut short.
        drop(self.stop());
    }
}

#[cfg(test)]
mod tests;

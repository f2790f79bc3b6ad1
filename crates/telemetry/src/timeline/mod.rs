// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The history of every tensor, written as a trace that `chrome://tracing` and Perfetto show.
//!
//! ```text
//! holder of the engine's progress lock -> Ring (bounded) -> one thread -> file, valid JSON after every flush
//! ```
//!
//! Off, an event costs one relaxed load. The thread exists only while a timeline runs.

mod event;
mod file;
mod writer;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::event::{ProducedTensor, TimelineOwner, TimelineTrack};
use self::event::{TimelineEvent, TimelineEventKind};
pub use self::file::OLD_FILE_SUFFIX;
use self::writer::TraceWriter;
use crate::BoundedRing;

/// Bytes that wait for the writer at most: some three hundred thousand events.
const RING_BUDGET_BYTES: usize = 32 << 20;
/// Events of this long are written together.
const WRITE_INTERVAL: Duration = Duration::from_millis(20);
/// Longest sleep of the writer when nothing happens.
const IDLE_WAIT_LIMIT: Duration = Duration::from_secs(3600);

/// No rank: the arrivals of all are wanted.
const ALL_RANKS: u32 = u32::MAX;

const STATE_ON: u8 = 1;
const STATE_CYCLES: u8 = 2;

/// The settings of a timeline.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimelineOptions {
    /// Whether every negotiation round has a mark.
    pub mark_cycles: bool,
    /// Whether arrivals of other ranks are left out, because each rank writes its own file.
    pub own_arrivals_only: bool,
    /// Its greatest size in bytes; the oldest records are dropped. `None`: no limit.
    pub max_bytes: Option<u64>,
}

struct TimelineThread {
    ring: Arc<BoundedRing<TimelineEvent>>,
    thread: JoinHandle<io::Result<()>>,
}

/// The timeline of an engine; off until started.
#[derive(Default)]
pub struct Timeline {
    state: AtomicU8,
    /// The rank whose arrivals are wanted, or [`ALL_RANKS`].
    arrivals_of: AtomicU32,
    ring: Mutex<Option<Arc<BoundedRing<TimelineEvent>>>>,
    /// Held while the file changes. Taken before `ring`.
    running: Mutex<Option<TimelineThread>>,
}

impl Timeline {
    /// Returns whether anybody wants events.
    pub fn is_recording_events(&self) -> bool {
        // Relaxed: an event beside the start or the end may be missed; the lock of `ring` orders
        // others.
        self.state.load(Ordering::Relaxed) != 0
    }

    /// Returns the rank whose arrivals alone are wanted, where each rank writes its own file.
    pub fn arrival_filter_rank(&self) -> Option<u32> {
        Some(self.arrivals_of.load(Ordering::Relaxed)).filter(|rank| *rank != ALL_RANKS)
    }

    /// Writes to `path` from now on, which is created or emptied; what ran before is ended first.
    /// Returns when the file is there and valid. With a limit, the file has half of it at most, and
    /// older records are in the file with [`OLD_FILE_SUFFIX`] after its name.
    ///
    /// # Errors
    /// When the file cannot be written, or the thread not made; nothing runs then.
    pub fn start_writing(
        &self,
        path: &Path,
        title: TimelineOwner<'_>,
        extent: TimelineOptions,
    ) -> io::Result<()> {
        let mut running = self.running.lock();
        self.end_writer_thread(&mut running)?;
        let mut writer = TraceWriter::new(path, title, extent.max_bytes)?;
        let ring = Arc::new(BoundedRing::new(RING_BUDGET_BYTES));
        let events = Arc::clone(&ring);
        let write = move || {
            while !events.is_finished() {
                let drained = events.wait_and_drain(Instant::now() + IDLE_WAIT_LIMIT);
                writer.write_events(&drained.records, drained.dropped)?;
                // Without the pause, a busy engine would cause a write for every few events.
                if !events.is_finished() {
                    thread::park_timeout(WRITE_INTERVAL);
                }
            }
            writer.finish_trace()
        };
        let thread = thread::Builder::new().name("farandole-timeline".to_owned()).spawn(write)?;
        // Before the state: an event that finds the timeline on finds the ring, too.
        *self.ring.lock() = Some(Arc::clone(&ring));
        *running = Some(TimelineThread { ring, thread });
        self.arrivals_of.store(
            if extent.own_arrivals_only { title.rank } else { ALL_RANKS },
            Ordering::Relaxed,
        );
        self.state
            .store(STATE_ON | if extent.mark_cycles { STATE_CYCLES } else { 0 }, Ordering::Relaxed);
        Ok(())
    }

    /// Writes the remaining records and ends. Does nothing when nothing runs.
    ///
    /// # Errors
    /// When the file could not be written to its end.
    pub fn stop_writing(&self) -> io::Result<()> {
        self.end_writer_thread(&mut self.running.lock())
    }

    fn end_writer_thread(&self, running: &mut Option<TimelineThread>) -> io::Result<()> {
        let Some(TimelineThread { ring, thread }) = running.take() else { return Ok(()) };
        self.state.store(0, Ordering::Relaxed);
        *self.ring.lock() = None;
        ring.close();
        // The thread may be in its pause between two writes.
        thread.thread().unpark();
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the timeline's thread panicked")))
    }

    /// Begins a span on a track, inside the open spans of the track.
    pub fn begin_span(&self, track: &TimelineTrack, name: &'static str) {
        self.record_event(|| TimelineEventKind::Begin(track.clone(), name, None));
    }

    /// Begins a span for an operation of a list, whose number is the same on all ranks.
    pub fn begin_response_list_span(&self, track: &TimelineTrack, name: &'static str, list: u64) {
        self.record_event(|| TimelineEventKind::Begin(track.clone(), name, Some(list)));
    }

    /// Begins a phase of a training step, inside the phases that have begun.
    pub fn enter_step_phase(&self, name: &str) {
        self.record_event(|| TimelineEventKind::Enter(name.into()));
    }

    /// Ends the phase that began last.
    pub fn leave_step_phase(&self) {
        self.record_event(|| TimelineEventKind::Leave);
    }

    /// Records the arrival of a rank in the negotiation of a tensor.
    pub fn record_arrival(&self, track: &TimelineTrack, rank: u32) {
        self.record_event(|| TimelineEventKind::Arrived(track.clone(), rank));
    }

    /// Ends the last span that began on a track.
    pub fn end_span(&self, track: &TimelineTrack, produced: Option<ProducedTensor>) {
        self.record_event(|| TimelineEventKind::End(track.clone(), produced));
    }

    /// Marks a negotiation round, if cycles are marked.
    pub fn mark_cycle(&self) {
        if self.state.load(Ordering::Relaxed) & STATE_CYCLES != 0 {
            self.record_event(|| TimelineEventKind::Cycle);
        }
    }

    fn record_event(&self, what: impl FnOnce() -> TimelineEventKind) {
        if self.is_recording_events()
            && let Some(ring) = &*self.ring.lock()
        {
            // The time is taken under the lock, so that the times in the ring ascend.
            ring.push(TimelineEvent { at: Instant::now(), kind: what() });
        }
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // No caller is left for the error that the file is cut short.
        drop(self.stop_writing());
    }
}

#[cfg(test)]
mod tests;

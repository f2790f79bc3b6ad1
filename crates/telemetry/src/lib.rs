// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records of a running job, the bounded ring they wait in, the trait of those who take them, and the timeline.
//!
//! Owns the words for what workers say: log lines and metrics, progress being one kind of metric; and what becomes of the
//! events that the rooms emit by `tracing` ([`log`]). Refuses transport and presentation: `registrar` carries records, the
//! command and the Python package show them.
//!
//! ```text
//! worker's output -> LogLine --\                          /-> Ring -> driver's events
//! report(kind, data) -> Metric --> Outbox -> registrar --<
//!                                                         \-> Sink (a terminal)
//! ```
//!
//! Invariants:
//! - `TM-1`: a ring never holds more weight than its budget, except for one record that alone is heavier.
//! - `TM-2`: records leave a ring in the order they came; what is dropped is the oldest that may be dropped, and
//!   every drop is counted once.
//! - `TM-3`: a record that may not be dropped is never dropped.
//! - `TM-4`: a timeline's file is valid JSON after every flush; no span ends that did not begin.
//! - `TM-5`: an event that nobody wants costs one relaxed load; one that somebody wants never waits for who takes it.

#![deny(unsafe_code)]

pub mod log;
mod nvtx;
mod record;
mod ring;
mod timeline;

pub use nvtx::{Nvtx, Range};
pub use record::{LogLine, Metric, PROGRESS, Record, Sink, Stream};
pub use ring::{Drained, Ring, Weight};
pub use timeline::{Extent, OLD, Produced, Timeline, Title, Track};

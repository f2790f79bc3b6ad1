// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records of a running job, the bounded ring in which they wait, the trait of their receivers, and
//! the timeline.
//!
//! Owns the types of log lines and metrics of workers (progress is a kind of metric), and the path
//! of the events that other crates emit with `tracing` ([`log`]), and the names of all metrics
//! ([`metric_names`]). It neither transports nor shows
//! records: `registrar` carries them, the command and the Python package show them.
//!
//! ```text
//! worker's output -> LogLine ---------\                                /-> BoundedRing -> driver
//! report(kind, data) -> WorkerMetric ---> RecordOutbox -> registrar --<
//!                                                                      \-> RecordSink (a terminal)
//! ```
//!
//! Invariants:
//! - `TM-1`: a ring never holds more weight than its budget, except for one record that alone is
//!   heavier.
//! - `TM-2`: records leave a ring in the order in which they came. If one must be dropped, it is
//!   the oldest droppable one, and every drop is counted once.
//! - `TM-3`: a record that may not be dropped is never dropped.
//! - `TM-4`: a timeline's file is valid JSON after every flush; no span ends that did not begin.
//! - `TM-5`: a disabled event costs one relaxed load; an enabled event never waits for its
//!   receiver.

#![deny(unsafe_code)]

mod collective_wait;
mod exposition;
pub mod log;
pub mod metric_names;
mod nvtx;
mod record;
mod ring;
mod timeline;

pub use collective_wait::{collective_wait, count_collective_wait};
pub use exposition::{EXPOSITION_CONTENT_TYPE, MetricSample, format_exposition};
pub use nvtx::{NvtxDomain, NvtxRange};
pub use record::{LogLine, OutputStream, RecordSink, WorkerMetric, WorkerRecord};
pub use ring::{BoundedRing, DrainedRecords, RingWeight};
pub use timeline::{
    OLD_FILE_SUFFIX, ProducedTensor, Timeline, TimelineOptions, TimelineOwner, TimelineTrack,
};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records that workers send.

use std::fmt;

use crate::ring::{BoundedRing, RingWeight};

/// Fixed cost of a record in a ring, so that many empty ones are bounded too.
const RECORD_OVERHEAD_BYTES: usize = 64;

/// One of a worker's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl OutputStream {
    /// Returns `stdout` or `stderr`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

impl fmt::Display for OutputStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One line of a worker's output, without its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// The worker's task.
    pub task: u32,
    /// Its rank.
    pub rank: Option<u32>,
    /// Stream on which it was written.
    pub stream: OutputStream,
    /// The text.
    pub text: String,
}

/// A record a worker made on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerMetric {
    /// The worker's task.
    pub task: u32,
    /// Its rank.
    pub rank: Option<u32>,
    /// The kind, such as `progress`.
    pub kind: String,
    /// Its content; the two ends agree on the form.
    pub data: Vec<u8>,
}

/// Either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerRecord {
    /// A line of output.
    Log(LogLine),
    /// A metric.
    Metric(WorkerMetric),
}

impl RingWeight for WorkerRecord {
    fn weight_bytes(&self) -> usize {
        RECORD_OVERHEAD_BYTES
            + match self {
                Self::Log(line) => line.text.len(),
                Self::Metric(metric) => metric.kind.len() + metric.data.len(),
            }
    }
}

/// A receiver of records: a ring, a terminal, a file.
pub trait RecordSink: Send + Sync {
    /// Takes one record. May block to slow the sender down; must not panic.
    fn accept_record(&self, record: WorkerRecord);
}

impl RecordSink for BoundedRing<WorkerRecord> {
    fn accept_record(&self, record: WorkerRecord) {
        self.push(record);
    }
}

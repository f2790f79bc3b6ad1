// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The timelines of all ranks as one trace, with one clock.
//!
//! ```text
//! rank 0's file --\                                              /-> trace for Perfetto: a process for each rank
//! rank 1's file ---+-> ops (who came when) -> clocks -> lateness +
//! rank 2's file --/                                              \-> summary: who was late, how far clocks were off
//! ```
//!
//! Each file is read twice, so only the times of operations are held in memory.
//!
//! Invariants:
//! - `TL-1`: in the merged trace, no rank ends an operation before all ranks have begun it, beyond
//!   the stated error.
//! - `TL-2`: ranks of one host have one clock: their times are not changed against each other.

mod clocks;
mod lateness;
mod operation;
mod pieces;
mod read;
mod summary;
#[cfg(test)]
mod tests;
mod write;

use std::path::{Path, PathBuf};

pub use pieces::{TIMELINE_RECORD_KIND, TimelinePieces};
pub use summary::{StragglerShare, TimelineRankSummary, TimelineSummary};

use self::clocks::HostClocks;
use self::lateness::RankLateness;
use self::operation::PartsByOperation;
use self::read::RankTrace;
use crate::error::{Result, timeline_error};

/// Merges timelines into one trace.
///
/// `inputs` are files, and folders with files that end in `.json`. If there is a file with `.old`
/// after such a name, it comes before.
///
/// # Errors
/// `Timeline` if there is no timeline, a file is none, two have the same rank, or a file cannot be
/// read or written.
pub fn merge_timeline_files(inputs: &[PathBuf], output: &Path) -> Result<TimelineSummary> {
    let mut traces = Vec::new();
    for path in find_timeline_files(inputs)? {
        traces.push(RankTrace::open(&path)?);
    }
    merge_traces(traces, output, BrokenTracePolicy::Fail)
}

/// The treatment of a trace that cannot be read to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BrokenTracePolicy {
    /// Merging fails.
    Fail,
    /// The trace is left out, unless there is no other.
    Skip,
}

fn merge_traces(
    mut traces: Vec<RankTrace>,
    output: &Path,
    broken: BrokenTracePolicy,
) -> Result<TimelineSummary> {
    // Of an elastic job, the last world: ranks of others are other workers.
    let last = traces.iter().map(|trace| trace.generation).max();
    traces.retain(|trace| Some(trace.generation) == last);
    // The clock of the lowest rank's host is the reference.
    traces.sort_by_key(|trace| trace.rank);
    for pair in traces.windows(2) {
        if let [one, other] = pair
            && one.rank == other.rank
        {
            let reason = format!("it is of rank {}, as is {}", other.rank, one.path.display());
            return Err(timeline_error(&other.path, reason));
        }
    }
    let (traces, operations) = read_operations(traces, broken)?;
    let hosts: Vec<(u32, &str)> = traces.iter().map(|trace| (trace.rank, &*trace.host)).collect();
    let clocks = HostClocks::measure_clocks(&hosts, &operations);
    // Before this, some rank's part in operations was dropped, so the late rank is unknown.
    let cut = traces.iter().filter(|trace| trace.since > 0);
    let known = cut.map(|trace| clocks.corrected_time(trace.rank, trace.start + trace.since)).max();
    let lateness = RankLateness::from_operations(
        &operations,
        &clocks,
        known.unwrap_or(i64::MIN),
        traces.len(),
    );
    write::write_trace(output, &traces, &clocks, &lateness)?;
    Ok(TimelineSummary::from_traces(&traces, &clocks, &lateness))
}

/// Returns the operations of all traces, and the traces that can be read to their ends.
fn read_operations(
    traces: Vec<RankTrace>,
    broken: BrokenTracePolicy,
) -> Result<(Vec<RankTrace>, PartsByOperation)> {
    let (mut whole, mut operations) = (Vec::new(), PartsByOperation::new());
    let mut failure = None;
    for trace in traces {
        match trace.completed_operations() {
            Ok(own) => {
                for (operation, part) in own {
                    operations.entry(operation).or_default().push(part);
                }
                whole.push(trace);
            }
            Err(error) if broken == BrokenTracePolicy::Fail => return Err(error),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if whole.is_empty() => Err(error),
        _ => Ok((whole, operations)),
    }
}

fn find_timeline_files(inputs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for input in inputs {
        if input.is_dir() {
            let listing = std::fs::read_dir(input)
                .map_err(|error| timeline_error(input, error.to_string()))?;
            let before = found.len();
            for entry in listing {
                let path = entry.map_err(|error| timeline_error(input, error.to_string()))?.path();
                if path.extension().is_some_and(|ending| ending == "json") {
                    found.push(path);
                }
            }
            if found.len() == before {
                return Err(timeline_error(
                    input,
                    "the folder has no files that end in .json".to_owned(),
                ));
            }
        } else {
            found.push(input.clone());
        }
    }
    found.sort();
    Ok(found)
}

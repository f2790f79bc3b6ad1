// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The merged trace: a process for each rank, a thread for each of its tensors.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use super::clocks::HostClocks;
use super::lateness::RankLateness;
use super::read::{RankTrace, TraceRecord, track_name};
use crate::error::{Result, timeline_error};

/// Name of the track with the phases of training steps; it comes first.
const PHASES_TRACK: &str = "steps";

struct TraceOutput {
    file: BufWriter<File>,
    /// The first moment of the trace.
    zero: i64,
    is_first: bool,
    failed: Option<io::Error>,
}

impl TraceOutput {
    fn write_record(&mut self, record: &Value) {
        if self.failed.is_some() {
            return;
        }
        let begin = if std::mem::take(&mut self.is_first) { "" } else { ",\n" };
        // Kept for the end: the callers pass records on and return no error.
        if let Err(error) = write!(self.file, "{begin}{record}") {
            self.failed = Some(error);
        }
    }
}

/// Writes the trace, first beside its place.
pub(super) fn write_trace(
    path: &Path,
    traces: &[RankTrace],
    clocks: &HostClocks,
    lateness: &RankLateness,
) -> Result<()> {
    let failed = |error: io::Error| timeline_error(path, error.to_string());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    let file = BufWriter::with_capacity(1 << 18, File::create(&part).map_err(failed)?);
    let zero = traces
        .iter()
        .map(|trace| clocks.corrected_time(trace.rank, trace.start + trace.since))
        .min();
    let mut output =
        TraceOutput { file, zero: zero.unwrap_or_default(), is_first: true, failed: None };
    output.file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n").map_err(failed)?;
    write_straggler_waits(&mut output, traces, lateness);
    for trace in traces {
        write_rank(&mut output, trace, clocks)?;
    }
    let TraceOutput { mut file, failed: unwritten, .. } = output;
    if let Some(error) = unwritten {
        return Err(failed(error));
    }
    file.write_all(b"\n]}\n").and_then(|()| file.flush()).map_err(failed)?;
    std::fs::rename(&part, path).map_err(failed)
}

/// Writes a process before all ranks, which shows the rank that the others wait for.
fn write_straggler_waits(output: &mut TraceOutput, traces: &[RankTrace], lateness: &RankLateness) {
    // A number that no rank has.
    let pid = traces.last().map_or(0, |trace| u64::from(trace.rank) + 1);
    output.write_record(
        &json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "all ranks wait \
                                                                                 for"}}),
    );
    // Perfetto orders processes by this index.
    output.write_record(
        &json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": -1}}),
    );
    for wait in &lateness.waits {
        output.write_record(&json!({
            "name": format!("rank {}", wait.rank), "cat": "straggler", "ph": "X", "pid": pid, "tid": 0,
            "ts": wait.from - output.zero, "dur": wait.until - wait.from, "args": {"tensor": wait.tensor},
        }));
    }
}

/// A track of a rank.
#[derive(Default)]
struct TraceThread {
    tid: u64,
    depth: usize,
}

fn write_rank(output: &mut TraceOutput, trace: &RankTrace, clocks: &HostClocks) -> Result<()> {
    let pid = trace.rank;
    let shift = match clocks.first_clock_correction(pid) {
        Some((shift, error)) => json!({"clock_shift_us": shift, "clock_error_us": error}),
        None => json!({"clock_shift_us": null}),
    };
    let name = format!("rank {pid} on {}", trace.host);
    output.write_record(
        &json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name, "clock": shift}}),
    );
    output.write_record(
        &json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}),
    );
    let mut threads: HashMap<u32, TraceThread> = HashMap::new();
    let mut tids: HashMap<String, u64> = HashMap::new();
    trace.for_each_record(|record| {
        let ts = clocks.corrected_time(pid, trace.start + record.ts) - output.zero;
        match (&*record.ph, record.name.as_deref()) {
            // Number 0 names the rank of the file, and is no track.
            ("M", Some("process_name")) if record.pid != 0 => {
                let tensor = track_name(&record).unwrap_or_default();
                // A file that continues another one names its tracks again. A track that it does
                // not name at its begin has another number when it comes again.
                let tid = *tids.entry(tensor).or_insert_with_key(|tensor| {
                    // Number 1 is free for the steps, which a trace shows first.
                    let tid = if tensor == PHASES_TRACK { 1 } else { u64::from(record.pid) + 1 };
                    write_track_name(output, (pid, tid), tensor);
                    tid
                });
                threads
                    .entry(record.pid)
                    .or_insert_with(|| TraceThread { tid, ..TraceThread::default() });
            }
            ("i", Some(name)) => {
                output.write_record(
                    &json!({"name": name, "ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": ts}),
                );
            }
            _ => {
                if let Some(thread) = threads.get_mut(&record.pid) {
                    write_event(output, pid, thread, &record, ts);
                }
            }
        }
        Ok(true)
    })
}

/// Names the track of a tensor, or of the steps.
fn write_track_name(output: &mut TraceOutput, (pid, tid): (u32, u64), name: &str) {
    for (kind, args) in
        [("thread_name", json!({"name": name})), ("thread_sort_index", json!({"sort_index": tid}))]
    {
        output
            .write_record(&json!({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}));
    }
}

/// Writes the begin or end of a span.
fn write_event(
    output: &mut TraceOutput,
    pid: u32,
    thread: &mut TraceThread,
    record: &TraceRecord<'_>,
    ts: i64,
) {
    let tid = thread.tid;
    let args = record
        .args
        .and_then(|args| serde_json::from_str(args.get()).ok())
        .unwrap_or_else(|| json!({}));
    match (&*record.ph, record.name.as_deref()) {
        ("B", Some(name)) => {
            thread.depth += 1;
            output.write_record(
                &json!({"name": name, "ph": "B", "pid": pid, "tid": tid, "ts": ts, "args": args}),
            );
        }
        // What began before the file does not end in it.
        ("E", _) if thread.depth > 0 => {
            thread.depth -= 1;
            output
                .write_record(&json!({"ph": "E", "pid": pid, "tid": tid, "ts": ts, "args": args}));
        }
        _ => {}
    }
}

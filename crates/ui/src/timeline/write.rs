// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The merged trace: a process for each rank, a thread for each of its tensors.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use super::clocks::Clocks;
use super::late::Lateness;
use super::read::{Record, Trace, named};
use super::refused;
use crate::error::Result;

/// Name of the track with the phases of training steps; it comes first.
const PHASES: &str = "steps";

struct Output {
    file: BufWriter<File>,
    /// The first moment of the trace.
    zero: i64,
    first: bool,
    failed: Option<io::Error>,
}

impl Output {
    fn record(&mut self, record: &Value) {
        if self.failed.is_some() {
            return;
        }
        let begin = if std::mem::take(&mut self.first) { "" } else { ",\n" };
        if let Err(error) = write!(self.file, "{begin}{record}") {
            self.failed = Some(error);
        }
    }
}

/// Writes the trace, first beside its place.
pub(super) fn write(
    path: &Path,
    traces: &[Trace],
    clocks: &Clocks,
    lateness: &Lateness,
) -> Result<()> {
    let failed = |error: io::Error| refused(path, error.to_string());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    let file = BufWriter::with_capacity(1 << 18, File::create(&part).map_err(failed)?);
    let zero =
        traces.iter().map(|trace| clocks.corrected(trace.rank, trace.start + trace.since)).min();
    let mut output = Output { file, zero: zero.unwrap_or_default(), first: true, failed: None };
    output.file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n").map_err(failed)?;
    stragglers(&mut output, traces, lateness);
    for trace in traces {
        rank(&mut output, trace, clocks)?;
    }
    let Output { mut file, failed: unwritten, .. } = output;
    if let Some(error) = unwritten {
        return Err(failed(error));
    }
    file.write_all(b"\n]}\n").and_then(|()| file.flush()).map_err(failed)?;
    std::fs::rename(&part, path).map_err(failed)
}

/// A process before all ranks: which rank is waited for.
fn stragglers(output: &mut Output, traces: &[Trace], lateness: &Lateness) {
    let pid = traces.last().map_or(0, |trace| u64::from(trace.rank) + 1);
    output.record(
        &json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "all ranks wait \
                                                                                 for"}}),
    );
    output.record(
        &json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": -1}}),
    );
    for wait in &lateness.waits {
        output.record(&json!({
            "name": format!("rank {}", wait.rank), "cat": "straggler", "ph": "X", "pid": pid, "tid": 0,
            "ts": wait.from - output.zero, "dur": wait.until - wait.from, "args": {"tensor": wait.tensor},
        }));
    }
}

/// A track of a rank.
#[derive(Default)]
struct Thread {
    tid: u64,
    depth: usize,
}

fn rank(output: &mut Output, trace: &Trace, clocks: &Clocks) -> Result<()> {
    let pid = trace.rank;
    let shift = match clocks.shift(pid) {
        Some((shift, error)) => json!({"clock_shift_us": shift, "clock_error_us": error}),
        None => json!({"clock_shift_us": null}),
    };
    let name = format!("rank {pid} on {}", trace.host);
    output.record(
        &json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name, "clock": shift}}),
    );
    output.record(
        &json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}),
    );
    let mut threads: HashMap<u32, Thread> = HashMap::new();
    let mut tids: HashMap<String, u64> = HashMap::new();
    trace.each(|record| {
        let ts = clocks.corrected(pid, trace.start + record.ts) - output.zero;
        match (&*record.ph, record.name.as_deref()) {
            ("M", Some("process_name")) if record.pid != 0 => {
                let tensor = named(&record).unwrap_or_default();
                // A file that continues another one names its tracks again. A track that it does
                // not name at its begin has another number when it comes again.
                let tid = *tids.entry(tensor).or_insert_with_key(|tensor| {
                    let tid = if tensor == PHASES { 1 } else { u64::from(record.pid) + 1 };
                    track(output, (pid, tid), tensor);
                    tid
                });
                threads.entry(record.pid).or_insert_with(|| Thread { tid, ..Thread::default() });
            }
            ("i", Some(name)) => {
                output.record(
                    &json!({"name": name, "ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": ts}),
                );
            }
            _ => {
                if let Some(thread) = threads.get_mut(&record.pid) {
                    event(output, pid, thread, &record, ts);
                }
            }
        }
        Ok(true)
    })
}

/// Names the track of a tensor, or of the steps.
fn track(output: &mut Output, (pid, tid): (u32, u64), name: &str) {
    for (kind, args) in
        [("thread_name", json!({"name": name})), ("thread_sort_index", json!({"sort_index": tid}))]
    {
        output.record(&json!({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}));
    }
}

/// A span's begin or end.
fn event(output: &mut Output, pid: u32, thread: &mut Thread, record: &Record<'_>, ts: i64) {
    let tid = thread.tid;
    let args = record
        .args
        .and_then(|args| serde_json::from_str(args.get()).ok())
        .unwrap_or_else(|| json!({}));
    match (&*record.ph, record.name.as_deref()) {
        ("B", Some(name)) => {
            thread.depth += 1;
            output.record(
                &json!({"name": name, "ph": "B", "pid": pid, "tid": tid, "ts": ts, "args": args}),
            );
        }
        // What began before the file does not end in it.
        ("E", _) if thread.depth > 0 => {
            thread.depth -= 1;
            output.record(&json!({"ph": "E", "pid": pid, "tid": tid, "ts": ts, "args": args}));
        }
        _ => {}
    }
}

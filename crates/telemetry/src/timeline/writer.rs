// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The records of a trace.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::event::{
    ProducedTensor, TimelineEvent, TimelineEventKind, TimelineOwner, TimelineTrack,
};
use super::file::{TRACE_BEGIN, TraceFile};

/// Name of the track with the phases of training steps.
const PHASE_TRACK_NAME: &str = "steps";
/// Number of readings of both clocks at the start; the reading that took the least time counts.
const CLOCK_READINGS: usize = 5;

struct TrackState {
    /// Its "process" number, which no other track gets later.
    pid: u64,
    /// Spans that are open.
    depth: usize,
    /// The file that names it.
    file_number: u64,
}

/// The content of the first record.
struct TraceHeaderRecord {
    name: String,
    rank: u32,
    host: String,
    size: usize,
    generation: u64,
    /// Microseconds since the epoch when the timeline began.
    epoch: u128,
}

/// Turns events into records.
pub(super) struct TraceWriter {
    file: TraceFile,
    text: String,
    heading: TraceHeaderRecord,
    start: Instant,
    /// Tracks that this file or the one before names, and those with open spans.
    track_states: HashMap<TimelineTrack, TrackState>,
    /// Tracks that there have been.
    track_count: u64,
    /// Files that there have been before this one.
    file_number: u64,
    phase_track: TimelineTrack,
}

impl TraceWriter {
    pub(super) fn new(
        path: &Path,
        title: TimelineOwner<'_>,
        limit: Option<u64>,
    ) -> io::Result<Self> {
        let (start, epoch) = read_both_clocks();
        let heading = TraceHeaderRecord {
            name: title.name.to_owned(),
            rank: title.rank,
            host: title.host.to_owned(),
            size: title.size,
            generation: title.generation,
            epoch,
        };
        let mut writer = Self {
            file: TraceFile::new(path, limit)?,
            text: String::new(),
            heading,
            start,
            track_states: HashMap::new(),
            track_count: 0,
            file_number: 0,
            // The name cannot be a tensor's of a process set, so both tracks may have it.
            phase_track: TimelineTrack { set: u32::MAX, tensor: PHASE_TRACK_NAME.into() },
        };
        writer.write_header_record(0);
        writer.flush_records()?;
        Ok(writer)
    }

    /// Writes the owner of the timeline, and the time from which on the file has all events.
    fn write_header_record(&mut self, since: u128) {
        let TraceHeaderRecord { name, rank, host, size, generation, epoch } = &self.heading;
        let (mut quoted, mut on) = (String::new(), String::new());
        quote_json(name, &mut quoted);
        quote_json(host, &mut on);
        let record = format!(
            r#"{{"name":"process_name","ph":"M","pid":0,"args":{{"name":{quoted},"start_time_since_epoch_in_micros":{epoch},"rank":{rank},"host":{on},"size":{size},"generation":{generation},"since":{since}}}}}"#
        );
        self.push_record(&record);
        self.push_record(
            r#"{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}}"#,
        );
    }

    pub(super) fn write_events(
        &mut self,
        events: &[TimelineEvent],
        dropped: u64,
    ) -> io::Result<()> {
        if dropped > 0 {
            // Ends may be among the lost records: no span stays open.
            let at = events.first().map_or_else(
                || self.elapsed_micros(Instant::now()),
                |event| self.elapsed_micros(event.at),
            );
            self.close_open_spans(at);
            self.push_record(&format!(
                r#"{{"name":"EVENTS_LOST","ph":"i","ts":{at},"pid":0,"s":"g","args":{{"count":{dropped}}}}}"#
            ));
        }
        for event in events {
            self.write_event(event)?;
            if self.text.len() as u64 >= self.file.write_threshold_bytes() {
                self.flush_records()?;
            }
        }
        self.flush_records()
    }

    /// Ends open spans.
    pub(super) fn finish_trace(mut self) -> io::Result<()> {
        let at = self.elapsed_micros(Instant::now());
        self.close_open_spans(at);
        self.flush_records()
    }

    fn write_event(&mut self, event: &TimelineEvent) -> io::Result<()> {
        let ts = self.elapsed_micros(event.at);
        // Records that wait for a write have times of the present file.
        if self.text.is_empty() && self.file.is_full() {
            self.rotate_file(ts)?;
        }
        match &event.kind {
            TimelineEventKind::Begin(track, name, list) => {
                let place = self.track_state(track);
                place.depth += 1;
                let pid = place.pid;
                let args =
                    list.map_or_else(String::new, |list| format!(r#","args":{{"list":{list}}}"#));
                self.push_record(&format!(
                    r#"{{"name":"{name}","ph":"B","ts":{ts},"pid":{pid}{args}}}"#
                ));
            }
            TimelineEventKind::Arrived(track, rank) => {
                let pid = self.track_state(track).pid;
                self.push_record(&format!(
                    r#"{{"name":"{rank}","ph":"X","ts":{ts},"pid":{pid},"dur":0}}"#
                ));
            }
            TimelineEventKind::End(track, produced) => self.end_span(track, ts, produced.as_ref()),
            TimelineEventKind::Enter(name) => {
                let place = self.track_state(&self.phase_track.clone());
                place.depth += 1;
                let pid = place.pid;
                let mut quoted = String::new();
                quote_json(name, &mut quoted);
                self.push_record(&format!(r#"{{"name":{quoted},"ph":"B","ts":{ts},"pid":{pid}}}"#));
            }
            TimelineEventKind::Leave => self.end_span(&self.phase_track.clone(), ts, None),
            TimelineEventKind::Cycle => {
                self.push_record(&format!(
                    r#"{{"name":"CYCLE_START","ph":"i","ts":{ts},"pid":0,"s":"g"}}"#
                ));
            }
        }
        Ok(())
    }

    fn end_span(&mut self, track: &TimelineTrack, ts: u128, produced: Option<&ProducedTensor>) {
        // It began before the timeline did, or its begin was lost.
        if self.track_states.get(track).is_none_or(|place| place.depth == 0) {
            return;
        }
        let place = self.track_state(track);
        place.depth -= 1;
        let pid = place.pid;
        let args = produced.map_or_else(String::new, format_result_arguments);
        self.push_record(&format!(r#"{{"ph":"E","ts":{ts},"pid":{pid}{args}}}"#));
    }

    /// Returns the track's place, which the file names from now on.
    fn track_state(&mut self, track: &TimelineTrack) -> &mut TrackState {
        let page = self.file_number;
        let (pid, named) = match self.track_states.get(track) {
            Some(place) => (place.pid, place.file_number == page),
            None => {
                self.track_count += 1;
                (self.track_count, false)
            }
        };
        if !named {
            self.write_track_names(track, pid);
        }
        let place = self.track_states.entry(track.clone()).or_insert(TrackState {
            pid,
            depth: 0,
            file_number: page,
        });
        place.file_number = page;
        place
    }

    fn write_track_names(&mut self, track: &TimelineTrack, pid: u64) {
        let mut name = String::new();
        match track.set {
            0 | u32::MAX => quote_json(&track.tensor, &mut name),
            set => quote_json(&format!("{} (process set {set})", track.tensor), &mut name),
        }
        // As in Horovod's timelines, each tensor is a process of the trace.
        self.push_record(&format!(
            r#"{{"name":"process_name","ph":"M","pid":{pid},"args":{{"name":{name}}}}}"#
        ));
        self.push_record(&format!(
            r#"{{"name":"process_sort_index","ph":"M","pid":{pid},"args":{{"sort_index":{pid}}}}}"#
        ));
    }

    fn close_open_spans(&mut self, ts: u128) {
        let open = self.track_states.iter().filter(|(_, place)| place.depth > 0);
        let mut open: Vec<(u64, TimelineTrack)> =
            open.map(|(track, place)| (place.pid, track.clone())).collect();
        // The order of a hash map is random, and the same events must give the same file.
        open.sort_unstable_by_key(|(pid, _)| *pid);
        for (pid, track) in open {
            for _ in 0..std::mem::take(&mut self.track_state(&track).depth) {
                self.push_record(&format!(r#"{{"ph":"E","ts":{ts},"pid":{pid}}}"#));
            }
        }
    }

    fn push_record(&mut self, record: &str) {
        let first = self.file.is_empty() && self.text.is_empty();
        self.text.push_str(if first { TRACE_BEGIN } else { ",\n" });
        self.text.push_str(record);
    }

    fn flush_records(&mut self) -> io::Result<()> {
        if self.text.is_empty() {
            return Ok(());
        }
        self.file.write_records(&mut self.text)
    }

    /// Begins the next file, with the events from `since` on. The new file names a track at the
    /// first event of the track. Tracks that the last file did not name are forgotten, because they
    /// may never come again: each operation without a name has its own track.
    fn rotate_file(&mut self, since: u128) -> io::Result<()> {
        self.file.rotate_file()?;
        let page = self.file_number;
        self.file_number += 1;
        self.track_states.retain(|_, place| place.depth > 0 || place.file_number == page);
        self.write_header_record(since);
        Ok(())
    }

    fn elapsed_micros(&self, at: Instant) -> u128 {
        at.saturating_duration_since(self.start).as_micros()
    }
}

/// Returns one moment by both clocks, the second in microseconds since the epoch.
fn read_both_clocks() -> (Instant, u128) {
    let read = || {
        let start = Instant::now();
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        (start.elapsed(), start, epoch)
    };
    let best = (1..CLOCK_READINGS).fold(read(), |best, _| {
        let next = read();
        if next.0 < best.0 { next } else { best }
    });
    (best.1, best.2)
}

fn format_result_arguments(produced: &ProducedTensor) -> String {
    let mut shape = String::new();
    quote_json(&format!("{:?}", produced.shape), &mut shape);
    format!(r#","args":{{"dtype":"{}","shape":{shape}}}"#, produced.dtype)
}

/// Appends a text as a JSON string.
fn quote_json(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            // JSON allows no control characters in a text.
            c if (c as u32) < 0x20 => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

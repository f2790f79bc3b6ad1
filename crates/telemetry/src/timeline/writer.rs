// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The records of a trace.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::file::Pages;
use super::{Event, Produced, Title, Track, What};

/// Bytes of records that are written together at most.
const TOGETHER: usize = 64 << 10;
/// Name of the track with the phases of training steps.
const PHASES: &str = "steps";
/// How often both clocks are read at the start; the reading that took the least time counts.
const READINGS: usize = 5;

struct Place {
    /// Its "process" number.
    pid: usize,
    /// Spans that are open.
    depth: usize,
}

/// What the first record says.
struct Heading {
    name: String,
    rank: u32,
    host: String,
    size: usize,
    generation: u64,
    /// Microseconds since the epoch when the timeline began.
    epoch: u128,
}

/// Turns events into records.
pub(super) struct Writer {
    pages: Pages,
    text: String,
    /// When the first event in `text` was.
    since: Option<u128>,
    title: Heading,
    start: Instant,
    places: HashMap<Track, Place>,
    phases: Track,
}

impl Writer {
    pub(super) fn new(path: &Path, title: Title<'_>, limit: Option<u64>) -> io::Result<Self> {
        let (start, epoch) = clocks();
        let heading = Heading {
            name: title.name.to_owned(),
            rank: title.rank,
            host: title.host.to_owned(),
            size: title.size,
            generation: title.generation,
            epoch,
        };
        let mut writer = Self {
            pages: Pages::new(path, limit)?,
            text: String::new(),
            since: None,
            title: heading,
            start,
            places: HashMap::new(),
            // The name cannot be a tensor's of a process set, so both tracks may have it.
            phases: Track { set: u32::MAX, tensor: PHASES.into() },
        };
        writer.head(0);
        writer.flush()?;
        Ok(writer)
    }

    /// Whose timeline it is, and from when on the file has all events.
    fn head(&mut self, since: u128) {
        let Heading { name, rank, host, size, generation, epoch } = &self.title;
        let (mut quoted, mut on) = (String::new(), String::new());
        quote(name, &mut quoted);
        quote(host, &mut on);
        let record = format!(
            r#"{{"name":"process_name","ph":"M","pid":0,"args":{{"name":{quoted},"start_time_since_epoch_in_micros":{epoch},"rank":{rank},"host":{on},"size":{size},"generation":{generation},"since":{since}}}}}"#
        );
        self.record(&record);
        self.record(r#"{"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}}"#);
    }

    pub(super) fn write(&mut self, events: &[Event], dropped: u64) -> io::Result<()> {
        if dropped > 0 {
            // Ends may be among what was lost: nothing stays open.
            let at =
                events.first().map_or_else(|| self.elapsed(Instant::now()), |event| self.elapsed(event.at));
            self.close_all(at);
            self.record(&format!(
                r#"{{"name":"EVENTS_LOST","ph":"i","ts":{at},"pid":0,"s":"g","args":{{"count":{dropped}}}}}"#
            ));
        }
        for event in events {
            self.event(event);
            if self.text.len() >= TOGETHER {
                self.flush()?;
            }
        }
        self.flush()
    }

    /// Ends what is open.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let at = self.elapsed(Instant::now());
        self.close_all(at);
        self.flush()
    }

    fn event(&mut self, event: &Event) {
        let ts = self.elapsed(event.at);
        self.since.get_or_insert(ts);
        match &event.what {
            What::Begin(track, name, list) => {
                let place = self.place(track);
                place.depth += 1;
                let pid = place.pid;
                let args = list.map_or_else(String::new, |list| format!(r#","args":{{"list":{list}}}"#));
                self.record(&format!(r#"{{"name":"{name}","ph":"B","ts":{ts},"pid":{pid}{args}}}"#));
            }
            What::Arrived(track, rank) => {
                let pid = self.place(track).pid;
                self.record(&format!(r#"{{"name":"{rank}","ph":"X","ts":{ts},"pid":{pid},"dur":0}}"#));
            }
            What::End(track, produced) => self.end(track, ts, produced.as_ref()),
            What::Enter(name) => {
                let place = self.place(&self.phases.clone());
                place.depth += 1;
                let pid = place.pid;
                let mut quoted = String::new();
                quote(name, &mut quoted);
                self.record(&format!(r#"{{"name":{quoted},"ph":"B","ts":{ts},"pid":{pid}}}"#));
            }
            What::Leave => self.end(&self.phases.clone(), ts, None),
            What::Cycle => {
                self.record(&format!(r#"{{"name":"CYCLE_START","ph":"i","ts":{ts},"pid":0,"s":"g"}}"#));
            }
        }
    }

    fn end(&mut self, track: &Track, ts: u128, produced: Option<&Produced>) {
        let place = self.place(track);
        // It began before the timeline did.
        if place.depth == 0 {
            return;
        }
        place.depth -= 1;
        let pid = place.pid;
        let args = produced.map_or_else(String::new, arguments);
        self.record(&format!(r#"{{"ph":"E","ts":{ts},"pid":{pid}{args}}}"#));
    }

    fn place(&mut self, track: &Track) -> &mut Place {
        if !self.places.contains_key(track) {
            self.declare(track, self.places.len() + 1);
        }
        let pid = self.places.len() + 1;
        self.places.entry(track.clone()).or_insert(Place { pid, depth: 0 })
    }

    fn declare(&mut self, track: &Track, pid: usize) {
        let mut name = String::new();
        match track.set {
            0 | u32::MAX => quote(&track.tensor, &mut name),
            set => quote(&format!("{} (process set {set})", track.tensor), &mut name),
        }
        self.record(&format!(r#"{{"name":"process_name","ph":"M","pid":{pid},"args":{{"name":{name}}}}}"#));
        self.record(&format!(
            r#"{{"name":"process_sort_index","ph":"M","pid":{pid},"args":{{"sort_index":{pid}}}}}"#
        ));
    }

    fn close_all(&mut self, ts: u128) {
        let mut open: Vec<(usize, usize)> = Vec::new();
        for place in self.places.values_mut().filter(|place| place.depth > 0) {
            open.push((place.pid, std::mem::take(&mut place.depth)));
        }
        open.sort_unstable();
        for (pid, depth) in open {
            for _ in 0..depth {
                self.record(&format!(r#"{{"ph":"E","ts":{ts},"pid":{pid}}}"#));
            }
        }
    }

    fn record(&mut self, record: &str) {
        let first = self.pages.is_empty() && self.text.is_empty();
        self.text.push_str(if first { "[\n" } else { ",\n" });
        self.text.push_str(record);
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.text.is_empty() {
            return Ok(());
        }
        if self.pages.is_full(self.text.len()) {
            self.turn()?;
        }
        self.since = None;
        self.pages.write(&mut self.text)
    }

    /// Begins the next file, which names the tracks again, with the records that wait.
    fn turn(&mut self) -> io::Result<()> {
        let waiting = std::mem::take(&mut self.text);
        self.pages.turn()?;
        self.head(self.since.unwrap_or_default());
        let mut tracks: Vec<(usize, Track)> =
            self.places.iter().map(|(track, place)| (place.pid, track.clone())).collect();
        tracks.sort_unstable_by_key(|(pid, _)| *pid);
        for (pid, track) in tracks {
            self.declare(&track, pid);
        }
        self.text.push_str(&waiting);
        Ok(())
    }

    fn elapsed(&self, at: Instant) -> u128 {
        at.saturating_duration_since(self.start).as_micros()
    }
}

/// One moment by both clocks, the second in microseconds since the epoch.
fn clocks() -> (Instant, u128) {
    let read = || {
        let start = Instant::now();
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        (start.elapsed(), start, epoch)
    };
    let best = (1..READINGS).fold(read(), |best, _| {
        let next = read();
        if next.0 < best.0 { next } else { best }
    });
    (best.1, best.2)
}

fn arguments(produced: &Produced) -> String {
    let mut shape = String::new();
    quote(&format!("{:?}", produced.shape), &mut shape);
    format!(r#","args":{{"dtype":"{}","shape":{shape}}}"#, produced.dtype)
}

/// A JSON string.
fn quote(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if (c as u32) < 0x20 => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

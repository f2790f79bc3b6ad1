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

/// Name of the track with the phases of training steps.
const PHASES: &str = "steps";
/// Number of readings of both clocks at the start; the reading that took the least time counts.
const READINGS: usize = 5;

struct Place {
    /// Its "process" number, which no other track gets later.
    pid: u64,
    /// Spans that are open.
    depth: usize,
    /// The file that names it.
    page: u64,
}

/// The content of the first record.
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
    title: Heading,
    start: Instant,
    /// Tracks that this file or the one before names, and those with open spans.
    places: HashMap<Track, Place>,
    /// Tracks that there have been.
    tracks: u64,
    /// Files that there have been before this one.
    page: u64,
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
            title: heading,
            start,
            places: HashMap::new(),
            tracks: 0,
            page: 0,
            // The name cannot be a tensor's of a process set, so both tracks may have it.
            phases: Track { set: u32::MAX, tensor: PHASES.into() },
        };
        writer.head(0);
        writer.flush()?;
        Ok(writer)
    }

    /// Writes the owner of the timeline, and the time from which on the file has all events.
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
            // Ends may be among the lost records: no span stays open.
            let at = events
                .first()
                .map_or_else(|| self.elapsed(Instant::now()), |event| self.elapsed(event.at));
            self.close_all(at);
            self.record(&format!(
                r#"{{"name":"EVENTS_LOST","ph":"i","ts":{at},"pid":0,"s":"g","args":{{"count":{dropped}}}}}"#
            ));
        }
        for event in events {
            self.event(event)?;
            if self.text.len() as u64 >= self.pages.together() {
                self.flush()?;
            }
        }
        self.flush()
    }

    /// Ends open spans.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let at = self.elapsed(Instant::now());
        self.close_all(at);
        self.flush()
    }

    fn event(&mut self, event: &Event) -> io::Result<()> {
        let ts = self.elapsed(event.at);
        if self.text.is_empty() && self.pages.is_full() {
            self.turn(ts)?;
        }
        match &event.what {
            What::Begin(track, name, list) => {
                let place = self.place(track);
                place.depth += 1;
                let pid = place.pid;
                let args =
                    list.map_or_else(String::new, |list| format!(r#","args":{{"list":{list}}}"#));
                self.record(&format!(
                    r#"{{"name":"{name}","ph":"B","ts":{ts},"pid":{pid}{args}}}"#
                ));
            }
            What::Arrived(track, rank) => {
                let pid = self.place(track).pid;
                self.record(&format!(
                    r#"{{"name":"{rank}","ph":"X","ts":{ts},"pid":{pid},"dur":0}}"#
                ));
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
                self.record(&format!(
                    r#"{{"name":"CYCLE_START","ph":"i","ts":{ts},"pid":0,"s":"g"}}"#
                ));
            }
        }
        Ok(())
    }

    fn end(&mut self, track: &Track, ts: u128, produced: Option<&Produced>) {
        // It began before the timeline did, or its begin was lost.
        if self.places.get(track).is_none_or(|place| place.depth == 0) {
            return;
        }
        let place = self.place(track);
        place.depth -= 1;
        let pid = place.pid;
        let args = produced.map_or_else(String::new, arguments);
        self.record(&format!(r#"{{"ph":"E","ts":{ts},"pid":{pid}{args}}}"#));
    }

    /// Returns the track's place, which the file names from now on.
    fn place(&mut self, track: &Track) -> &mut Place {
        let page = self.page;
        let (pid, named) = match self.places.get(track) {
            Some(place) => (place.pid, place.page == page),
            None => {
                self.tracks += 1;
                (self.tracks, false)
            }
        };
        if !named {
            self.declare(track, pid);
        }
        let place = self.places.entry(track.clone()).or_insert(Place { pid, depth: 0, page });
        place.page = page;
        place
    }

    fn declare(&mut self, track: &Track, pid: u64) {
        let mut name = String::new();
        match track.set {
            0 | u32::MAX => quote(&track.tensor, &mut name),
            set => quote(&format!("{} (process set {set})", track.tensor), &mut name),
        }
        self.record(&format!(
            r#"{{"name":"process_name","ph":"M","pid":{pid},"args":{{"name":{name}}}}}"#
        ));
        self.record(&format!(
            r#"{{"name":"process_sort_index","ph":"M","pid":{pid},"args":{{"sort_index":{pid}}}}}"#
        ));
    }

    fn close_all(&mut self, ts: u128) {
        let open = self.places.iter().filter(|(_, place)| place.depth > 0);
        let mut open: Vec<(u64, Track)> =
            open.map(|(track, place)| (place.pid, track.clone())).collect();
        open.sort_unstable_by_key(|(pid, _)| *pid);
        for (pid, track) in open {
            for _ in 0..std::mem::take(&mut self.place(&track).depth) {
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
        self.pages.write(&mut self.text)
    }

    /// Begins the next file, with the events from `since` on. It names a track when an event of it
    /// comes. Tracks that the last file did not name are forgotten: they may never come again, as
    /// each operation without a name has a track of its own.
    fn turn(&mut self, since: u128) -> io::Result<()> {
        self.pages.turn()?;
        let page = self.page;
        self.page += 1;
        self.places.retain(|_, place| place.depth > 0 || place.page == page);
        self.head(since);
        Ok(())
    }

    fn elapsed(&self, at: Instant) -> u128 {
        at.saturating_duration_since(self.start).as_micros()
    }
}

/// Returns one moment by both clocks, the second in microseconds since the epoch.
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

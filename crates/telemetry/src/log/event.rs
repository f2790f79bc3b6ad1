// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An event as text.

use std::fmt::Debug;
use std::thread;
use std::time::SystemTime;

use chrono::{DateTime, Local};
use farandole_config::LogLevel;
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

use crate::ring::Weight;

/// The longest text of an event, in bytes.
const LONGEST: usize = 8 << 10;
/// The weight of an event in a queue besides its texts.
const OVERHEAD: usize = 200;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time of the event.
    pub time: SystemTime,
    /// Severity.
    pub level: LogLevel,
    /// Name of the logger: `farandole.engine.progress`.
    pub logger: String,
    /// The message, then each field as `name=value`.
    pub text: String,
    /// Whether one of the fields is the rank.
    pub has_rank: bool,
    /// Name of the thread, if it has one.
    pub thread: Option<String>,
    /// The file that emits it.
    pub file: Option<&'static str>,
    /// The line there.
    pub line: Option<u32>,
}

impl Event {
    pub(super) fn of(event: &tracing::Event<'_>) -> Self {
        let metadata = event.metadata();
        let mut words = Words::default();
        event.record(&mut words);
        let (text, has_rank) = words.done();
        Self {
            time: SystemTime::now(),
            level: level(metadata),
            logger: logger(metadata.target()),
            text,
            has_rank,
            thread: thread::current().name().map(str::to_owned),
            file: metadata.file(),
            line: metadata.line(),
        }
    }

    /// Returns the event as a line: `time level target: message field=value`.
    pub fn to_line(&self, hide_time: bool) -> String {
        let mut line = String::with_capacity(self.text.len() + 80);
        if !hide_time {
            let time = DateTime::<Local>::from(self.time);
            line.push_str(&time.format("%Y-%m-%d %H:%M:%S%.3f ").to_string());
        }
        for part in [self.level.name(), " ", &self.logger, ": ", &self.text, "\n"] {
            line.push_str(part);
        }
        line
    }
}

impl Weight for Event {
    fn weight(&self) -> usize {
        OVERHEAD + self.logger.len() + self.text.len()
    }
}

fn level(metadata: &Metadata<'_>) -> LogLevel {
    match *metadata.level() {
        Level::TRACE => LogLevel::Trace,
        Level::DEBUG => LogLevel::Debug,
        Level::INFO => LogLevel::Info,
        Level::WARN => LogLevel::Warning,
        Level::ERROR => LogLevel::Error,
    }
}

/// Name of a logger below `farandole` for the path of a module.
fn logger(target: &str) -> String {
    let path = target.replace("::", ".");
    match path.strip_prefix("farandole_") {
        Some(room) => format!("farandole.{room}"),
        None if path == "farandole" || path.starts_with("farandole.") => path,
        None => format!("farandole.{path}"),
    }
}

/// Collects message and fields.
#[derive(Default)]
struct Words {
    message: String,
    fields: String,
    has_rank: bool,
}

impl Words {
    fn add(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
            return;
        }
        self.has_rank |= field.name() == "rank";
        // A line stays one line, whatever a peer or a file has put into a value.
        let written = if value.contains(|c: char| c.is_control()) {
            value.escape_debug().to_string()
        } else {
            value.to_owned()
        };
        if !self.fields.is_empty() {
            self.fields.push(' ');
        }
        for part in [field.name(), "=", &written] {
            self.fields.push_str(part);
        }
    }

    fn done(self) -> (String, bool) {
        let Self { message: mut text, fields, has_rank } = self;
        if !text.is_empty() && !fields.is_empty() {
            text.push(' ');
        }
        text.push_str(&fields);
        if text.len() > LONGEST {
            text.truncate(text.floor_char_boundary(LONGEST));
            text.push_str("...");
        }
        (text, has_rank)
    }
}

impl Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "message" && (value.is_empty() || value.contains([' ', '"'])) {
            return self.add(field, &format!("{value:?}"));
        }
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_logger_is_named_by_room_and_module() {
        for (target, name) in [
            ("farandole_engine::set::join", "farandole.engine.set.join"),
            ("farandole_registrar", "farandole.registrar"),
            ("farandole", "farandole"),
            ("h2::client", "farandole.h2.client"),
        ] {
            assert_eq!(logger(target), name);
        }
    }

    #[test]
    fn a_line_has_time_level_logger_and_text() {
        let event = Event {
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(86_400_250),
            level: LogLevel::Warning,
            logger: "farandole.engine".to_owned(),
            text: "a rank is slow peer=3".to_owned(),
            has_rank: false,
            thread: None,
            file: None,
            line: None,
        };
        assert_eq!(event.to_line(true), "WARNING farandole.engine: a rank is slow peer=3\n");
        let line = event.to_line(false);
        assert!(line.starts_with("1970-01-0") && line.contains(".250 WARNING "), "{line}");
    }
}

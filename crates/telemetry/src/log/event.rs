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

use crate::ring::RingWeight;

/// The longest text of an event, in bytes.
const MAX_TEXT_BYTES: usize = 8 << 10;
/// The weight of an event in a queue besides its texts.
const EVENT_OVERHEAD_BYTES: usize = 200;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEvent {
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

impl LogEvent {
    pub(super) fn from_tracing(event: &tracing::Event<'_>) -> Self {
        let metadata = event.metadata();
        let mut words = EventText::default();
        event.record(&mut words);
        let (text, has_rank) = words.into_text();
        Self {
            time: SystemTime::now(),
            level: log_level(metadata),
            logger: logger_name(metadata.target()),
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
        for part in [self.level.as_str(), " ", &self.logger, ": ", &self.text, "\n"] {
            line.push_str(part);
        }
        line
    }
}

impl RingWeight for LogEvent {
    fn weight_bytes(&self) -> usize {
        EVENT_OVERHEAD_BYTES + self.logger.len() + self.text.len()
    }
}

fn log_level(metadata: &Metadata<'_>) -> LogLevel {
    match *metadata.level() {
        Level::TRACE => LogLevel::Trace,
        Level::DEBUG => LogLevel::Debug,
        Level::INFO => LogLevel::Info,
        Level::WARN => LogLevel::Warning,
        Level::ERROR => LogLevel::Error,
    }
}

/// Returns the name of a logger below `farandole` for the path of a module.
fn logger_name(target: &str) -> String {
    // Python's loggers form a tree by dots.
    let path = target.replace("::", ".");
    match path.strip_prefix("farandole_") {
        Some(room) => format!("farandole.{room}"),
        None if path == "farandole" || path.starts_with("farandole.") => path,
        None => format!("farandole.{path}"),
    }
}

/// Collects message and fields.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
    has_rank: bool,
}

impl EventText {
    fn add_field(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
            return;
        }
        self.has_rank |= field.name() == "rank";
        // An event stays on one line even if a value contains line breaks, as values from peers or
        // files may.
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

    fn into_text(self) -> (String, bool) {
        let Self { message: mut text, fields, has_rank } = self;
        if !text.is_empty() && !fields.is_empty() {
            text.push(' ');
        }
        text.push_str(&fields);
        if text.len() > MAX_TEXT_BYTES {
            text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
            text.push_str("...");
        }
        (text, has_rank)
    }
}

impl Visit for EventText {
    fn record_str(&mut self, field: &Field, value: &str) {
        // The quotes show where a value with spaces ends.
        if field.name() != "message" && (value.is_empty() || value.contains([' ', '"'])) {
            return self.add_field(field, &format!("{value:?}"));
        }
        self.add_field(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add_field(field, &format!("{value:?}"));
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
            assert_eq!(logger_name(target), name);
        }
    }

    #[test]
    fn a_line_has_time_level_logger_and_text() {
        let event = LogEvent {
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

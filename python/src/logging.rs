// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.logging`: the engine's events, for a thread of the interpreter that takes
//! them.

use std::time::{Duration, SystemTime};

use farandole::config::{Config, LogLevel};
use farandole::session;
use farandole::telemetry::log::{self, LogEvent};
use farandole::world::FaultOrigin;
use pyo3::prelude::*;

use crate::error::to_exception;

/// Levels of Python's `logging`; it has none for a trace.
const PYTHON_LOG_LEVELS: [(u8, LogLevel); 6] = [
    (5, LogLevel::Trace),
    (10, LogLevel::Debug),
    (20, LogLevel::Info),
    (30, LogLevel::Warning),
    (40, LogLevel::Error),
    (50, LogLevel::Fatal),
];

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EngineLogRecord>()?;
    module.add_function(wrap_pyfunction!(log_settings, module)?)?;
    module.add_function(wrap_pyfunction!(start_log_capture, module)?)?;
    module.add_function(wrap_pyfunction!(take_log_records, module)?)?;
    module.add_function(wrap_pyfunction!(end_log_capture, module)?)
}

/// One event.
#[pyclass(frozen, get_all, module = "farandole._native.logging")]
struct EngineLogRecord {
    time: f64,
    level: u8,
    logger: String,
    text: String,
    rank: Option<u32>,
    thread: Option<String>,
    file: &'static str,
    line: u32,
}

impl EngineLogRecord {
    fn from_event(event: LogEvent, rank: Option<u32>) -> Self {
        let LogEvent { time, level, logger, mut text, has_rank, thread, file, line } = event;
        if let Some(rank) = rank.filter(|_| !has_rank) {
            text.push_str(&format!(" rank={rank}"));
        }
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let (file, line) = (file.unwrap_or_default(), line.unwrap_or_default());
        Self { time, level: python_level(level), logger, text, rank, thread, file, line }
    }
}

fn python_level(level: LogLevel) -> u8 {
    PYTHON_LOG_LEVELS.iter().find(|(_, one)| *one == level).map_or(0, |(number, _)| *number)
}

/// Returns the least grave level that a level of Python's lets through.
fn log_level_at_least(number: u8) -> LogLevel {
    PYTHON_LOG_LEVELS
        .iter()
        .find(|(least, _)| *least >= number)
        .map_or(LogLevel::Fatal, |(_, level)| *level)
}

/// Returns the level, whether it was configured, and whether lines go without the time.
#[pyfunction]
fn log_settings() -> PyResult<(u8, bool, bool)> {
    let config = Config::from_env().map_err(|error| to_exception(FaultOrigin::Usage, &error))?;
    Ok((python_level(config.log_level), config.given.contains(&"log_level"), config.log_hide_time))
}

/// Keeps events like `telemetry::log::queue_events_for_logger`.
#[pyfunction]
#[pyo3(signature = (number, hide_time, /))]
fn start_log_capture(py: Python<'_>, number: u8, hide_time: bool) -> bool {
    py.detach(|| log::queue_events_for_logger(log_level_at_least(number), hide_time))
}

/// Takes events like `telemetry::log::take_events`; returns them and the number lost before them.
#[pyfunction]
#[pyo3(signature = (seconds, /))]
fn take_log_records(py: Python<'_>, seconds: u32) -> Option<(Vec<EngineLogRecord>, u64)> {
    py.detach(|| {
        let taken = log::take_events(Duration::from_secs(seconds.into()))?;
        let rank = session::current_session().ok().map(|session| session.engine().world().rank.0);
        Some((
            taken
                .events
                .into_iter()
                .map(|event| EngineLogRecord::from_event(event, rank))
                .collect(),
            taken.dropped,
        ))
    })
}

/// Ends the capture like `telemetry::log::stop_keeping_events`.
#[pyfunction]
fn end_log_capture(py: Python<'_>) {
    py.detach(log::stop_keeping_events);
}

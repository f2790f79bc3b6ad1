// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.logging`: the engine's events, for a thread of the interpreter that takes
//! them.

use std::time::{Duration, SystemTime};

use farandole::config::{Config, LogLevel};
use farandole::session;
use farandole::telemetry::log::{self, Event};
use farandole::world::Fault;
use pyo3::prelude::*;

use crate::error::raise;

/// Levels of Python's `logging`; it has none for a trace.
const LEVELS: [(u8, LogLevel); 6] = [
    (5, LogLevel::Trace),
    (10, LogLevel::Debug),
    (20, LogLevel::Info),
    (30, LogLevel::Warning),
    (40, LogLevel::Error),
    (50, LogLevel::Fatal),
];

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Record>()?;
    module.add_function(wrap_pyfunction!(settings, module)?)?;
    module.add_function(wrap_pyfunction!(keep, module)?)?;
    module.add_function(wrap_pyfunction!(take, module)?)?;
    module.add_function(wrap_pyfunction!(end, module)?)
}

/// One event.
#[pyclass(frozen, get_all, module = "farandole._native.logging")]
struct Record {
    time: f64,
    level: u8,
    logger: String,
    text: String,
    rank: Option<u32>,
    thread: Option<String>,
    file: &'static str,
    line: u32,
}

impl Record {
    fn of(event: Event, rank: Option<u32>) -> Self {
        let Event { time, level, logger, mut text, has_rank, thread, file, line } = event;
        if let Some(rank) = rank.filter(|_| !has_rank) {
            text.push_str(&format!(" rank={rank}"));
        }
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let (file, line) = (file.unwrap_or_default(), line.unwrap_or_default());
        Self { time, level: number(level), logger, text, rank, thread, file, line }
    }
}

fn number(level: LogLevel) -> u8 {
    LEVELS.iter().find(|(_, one)| *one == level).map_or(0, |(number, _)| *number)
}

/// Returns the least grave level that a level of Python's lets through.
fn level(number: u8) -> LogLevel {
    LEVELS.iter().find(|(least, _)| *least >= number).map_or(LogLevel::Fatal, |(_, level)| *level)
}

/// Level, whether it was configured, and whether lines go without the time.
#[pyfunction]
fn settings() -> PyResult<(u8, bool, bool)> {
    let config = Config::from_env().map_err(|error| raise(Fault::Usage, &error))?;
    Ok((number(config.log_level), config.given.contains(&"log_level"), config.log_hide_time))
}

/// Like `telemetry::log::keep`.
#[pyfunction]
#[pyo3(signature = (number, hide_time, /))]
fn keep(py: Python<'_>, number: u8, hide_time: bool) -> bool {
    py.detach(|| log::keep(level(number), hide_time))
}

/// Like `telemetry::log::take`: events, and how many were lost before them.
#[pyfunction]
#[pyo3(signature = (seconds, /))]
fn take(py: Python<'_>, seconds: u32) -> Option<(Vec<Record>, u64)> {
    py.detach(|| {
        let taken = log::take(Duration::from_secs(seconds.into()))?;
        let rank = session::current().ok().map(|session| session.engine().world().rank.0);
        Some((
            taken.events.into_iter().map(|event| Record::of(event, rank)).collect(),
            taken.dropped,
        ))
    })
}

/// Like `telemetry::log::end`.
#[pyfunction]
fn end(py: Python<'_>) {
    py.detach(log::end);
}

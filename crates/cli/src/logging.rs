// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The events of this process as lines on stderr.

use farandole::config::{Config, LogLevel};
use farandole::telemetry::log;

/// Shows events from `level` on, as `time level target: message field=value`. The last call counts.
pub(crate) fn install(level: LogLevel, hide_time: bool) {
    log::to_stderr(level, hide_time);
}

/// As the environment asks for. The command that reads a variable reports values that it cannot
/// parse.
pub(crate) fn install_from_environment() {
    match Config::from_env() {
        Ok(config) => install(config.log_level, config.log_hide_time),
        Err(_) => install(LogLevel::Warning, false),
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes the events of this process as lines to stderr.

use farandole::config::{Config, LogLevel};
use farandole::telemetry::log;

/// Writes events of `level` and above, as `time level target: message field=value`. The last call
/// counts.
pub(crate) fn install_logging(level: LogLevel, hide_time: bool) {
    log::log_to_stderr(level, hide_time);
}

/// Configures logging from the environment. Invalid values are ignored here: the command that reads
/// the variable reports them.
pub(crate) fn install_logging_from_environment() {
    match Config::from_env() {
        Ok(config) => install_logging(config.log_level, config.log_hide_time),
        Err(_) => install_logging(LogLevel::Warning, false),
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events from where they are emitted to where they are read. The subscriber is the process's: each
//! test has a process.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::process::{Command, Output};
use std::time::Duration;

use farandole_config::LogLevel;
use farandole_telemetry::log;

/// Runs a test of this file in a process of its own, where `ALONE` is set.
fn alone(test: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args([test, "--exact", "--nocapture"]).env("ALONE", "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

fn is_alone() -> bool {
    farandole_config::environment_variable("ALONE").is_some()
}

fn emit() {
    tracing::trace!(target: "farandole_engine::set", tensor = "a", "a trace");
    tracing::debug!(target: "farandole_engine::set", rank = 3, "a detail");
    tracing::warn!(target: "farandole_engine::set", peer = 1, tensor = "a b", error = %"line \
                                                                                        1\nline 2", "a warning");
    tracing::debug!(target: "h2::client", "a library's detail");
    tracing::error!(target: "h2::client", "a library's failure");
    tracing::info_span!("a span", rank = 1)
        .in_scope(|| tracing::info!(target: "farandole", rank = 1));
}

#[test]
fn lines_on_stderr_have_level_logger_message_and_fields() {
    if is_alone() {
        emit();
        log::log_to_stderr(LogLevel::Debug, true);
        emit();
        log::log_to_stderr(LogLevel::Fatal, true);
        emit();
        return;
    }
    let output = alone("lines_on_stderr_have_level_logger_message_and_fields");
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = "DEBUG farandole.engine.set: a detail rank=3\n\
        WARNING farandole.engine.set: a warning peer=1 tensor=\"a b\" error=line 1\\nline 2\n\
        ERROR farandole.h2.client: a library's failure\n\
        INFO farandole: rank=1\n";
    assert_eq!(text, expected);
}

#[test]
fn events_are_kept_until_the_end_and_then_go_to_stderr() {
    if is_alone() {
        assert!(log::queue_events_for_logger(LogLevel::Warning, true));
        emit();
        assert!(
            !log::queue_events_for_logger(LogLevel::Trace, true),
            "somebody takes them already"
        );
        emit();
        let taken = log::take_events(Duration::from_secs(60)).unwrap();
        let kept: Vec<_> = taken.events.iter().map(|event| (event.level, event.has_rank)).collect();
        assert_eq!(kept[..2], [(LogLevel::Warning, false), (LogLevel::Error, false)]);
        assert_eq!(kept[2..4], [(LogLevel::Trace, false), (LogLevel::Debug, true)]);
        assert_eq!((kept.len(), taken.dropped), (8, 0));
        let (first, thread) = (&taken.events[0], std::thread::current().name().map(str::to_owned));
        assert!(
            first.file.unwrap().ends_with("tests/log.rs") && first.thread == thread,
            "{first:?}"
        );
        log::stop_keeping_events();
        assert!(log::take_events(Duration::from_secs(60)).is_none());
        tracing::warn!(target: "farandole_store", "too late");
        return;
    }
    let output = alone("events_are_kept_until_the_end_and_then_go_to_stderr");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "WARNING farandole.store: too late\n");
}

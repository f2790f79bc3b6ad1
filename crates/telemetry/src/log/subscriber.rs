// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The receiver of events.
//!
//! The level is known to every place that emits: a place with unwanted events does one relaxed load
//! and a comparison.

use std::io::{Write as _, stderr};
use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use farandole_config::LogLevel;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Metadata, callsite};

use super::event::LogEvent;
use super::queue::EVENT_QUEUE;

/// Index into [`LEVEL_FILTERS`].
static LEVEL_INDEX: AtomicU8 = AtomicU8::new(0);
static HIDE_TIME: AtomicBool = AtomicBool::new(false);
/// The process whose events are kept, or 0. A forked child has another number, and its events go to
/// stderr.
static KEEPING_PROCESS: AtomicU32 = AtomicU32::new(0);

const LEVEL_FILTERS: [LevelFilter; 6] = [
    LevelFilter::OFF,
    LevelFilter::ERROR,
    LevelFilter::WARN,
    LevelFilter::INFO,
    LevelFilter::DEBUG,
    LevelFilter::TRACE,
];

/// Sets what passes and where it goes.
pub(super) fn install_subscriber(level: LogLevel, hide_time: bool, keep: bool) {
    static INSTALL_ONCE: Once = Once::new();
    let index = match level {
        LogLevel::Fatal => 0,
        LogLevel::Error => 1,
        LogLevel::Warning => 2,
        LogLevel::Info => 3,
        LogLevel::Debug => 4,
        LogLevel::Trace => 5,
    };
    // Relaxed: an event that is emitted at this moment may go by the earlier settings.
    LEVEL_INDEX.store(index, Ordering::Relaxed);
    HIDE_TIME.store(hide_time, Ordering::Relaxed);
    KEEPING_PROCESS.store(if keep { process::id() } else { 0 }, Ordering::Relaxed);
    INSTALL_ONCE.call_once(|| {
        // If the program that links this crate has already set a subscriber, that subscriber stays.
        drop(set_global_default(LogSubscriber));
    });
    // Every place in the code caches whether its events pass.
    callsite::rebuild_interest_cache();
}

/// Returns whether this process keeps its events.
pub(super) fn are_events_queued() -> bool {
    KEEPING_PROCESS.load(Ordering::Relaxed) == process::id()
}

/// Sends later events to stderr.
pub(super) fn redirect_events_to_stderr() {
    KEEPING_PROCESS.store(0, Ordering::Relaxed);
}

fn current_filter() -> LevelFilter {
    LEVEL_FILTERS
        .get(usize::from(LEVEL_INDEX.load(Ordering::Relaxed)))
        .copied()
        .unwrap_or(LevelFilter::WARN)
}

/// Returns whether a library's event passes: its debug events are about itself, and far more than
/// ours.
fn passes_filter(metadata: &Metadata<'_>, filter: LevelFilter) -> bool {
    let ours = metadata.target().starts_with("farandole");
    let filter =
        if ours || filter == LevelFilter::TRACE { filter } else { filter.min(LevelFilter::WARN) };
    metadata.is_event() && *metadata.level() <= filter
}

/// The subscriber of the process. Spans have no meaning here.
struct LogSubscriber;

impl Subscriber for LogSubscriber {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        passes_filter(metadata, current_filter())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(current_filter())
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let event = LogEvent::from_tracing(event);
        if are_events_queued() && EVENT_QUEUE.push(event.clone()) {
            return;
        }
        // In one piece. A closed reader is no reason to fail.
        let line = event.to_line(HIDE_TIME.load(Ordering::Relaxed));
        drop(stderr().write_all(line.as_bytes()));
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        // An id of 0 would panic.
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

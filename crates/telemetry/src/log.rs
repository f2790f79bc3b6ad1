// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The path of this workspace's `tracing` events: to stderr, or to records that another logger
//! takes.
//!
//! ```text
//! any thread: tracing::warn!(..) --level, one load--> Subscriber --> stderr                     (the command)
//!                                                               '-> queue --> take() --> logger (a Python thread)
//! ```
//!
//! An emitter never waits: the queue is bounded, and drops its oldest events. The level filters our
//! events. Events of libraries, which are far more verbose, pass from `warning` on; all of them
//! pass at `trace`.

mod event;
mod queue;
mod subscriber;

pub use event::LogEvent;
pub use queue::DrainedEvents;

use std::time::Duration;

use farandole_config::LogLevel;

/// Writes events from `level` on to stderr as lines, with the time at their beginning unless
/// `hide_time`.
///
/// May be called again: the last call counts, for the whole process.
pub fn log_to_stderr(level: LogLevel, hide_time: bool) {
    subscriber::install_subscriber(level, hide_time, false);
}

/// Keeps events from `level` on for [`take_events`]. Returns true if the caller must begin to take
/// them, because no thread of this process does.
///
/// In a child that was forked from a process whose events were kept, events go to stderr until this
/// is called.
pub fn queue_events_for_logger(level: LogLevel, hide_time: bool) -> bool {
    let Some(first) = queue::EVENT_QUEUE.start_keeping_events() else {
        // The fork came while another thread held the lock, which no thread will ever release here.
        subscriber::install_subscriber(level, hide_time, false);
        return false;
    };
    subscriber::install_subscriber(level, hide_time, true);
    first
}

/// Waits for kept events, at most for `limit`, and takes all of them. Returns `None` after
/// [`stop_keeping_events`], when all were taken.
pub fn take_events(limit: Duration) -> Option<DrainedEvents> {
    queue::EVENT_QUEUE.take_events(limit)
}

/// Lets the last [`take_events`] return; later events go to stderr. Does nothing in a forked child.
pub fn stop_keeping_events() {
    if subscriber::are_events_queued() {
        // Comes first, so that no event enters the queue after its last reader has left.
        subscriber::redirect_events_to_stderr();
        queue::EVENT_QUEUE.close();
    }
}

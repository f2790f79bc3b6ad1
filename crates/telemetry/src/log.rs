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
//! An emitter never waits: the queue is bounded, and drops its oldest events. Our events pass by
//! the level; those of the libraries underneath, which say far more, only from `warning` on, or all
//! of them at `trace`.

mod event;
mod queue;
mod subscriber;

pub use event::Event;
pub use queue::Taken;

use std::time::Duration;

use farandole_config::LogLevel;

/// Writes events from `level` on to stderr as lines, with the time at their beginning unless
/// `hide_time`.
///
/// May be called again: the last call counts, for the whole process.
pub fn to_stderr(level: LogLevel, hide_time: bool) {
    subscriber::install(level, hide_time, false);
}

/// Keeps events from `level` on for [`take`]. True if the caller must begin to take them, because
/// no thread of this process does.
///
/// In a child that was forked from a process whose events were kept, events go to stderr until this
/// is called.
pub fn keep(level: LogLevel, hide_time: bool) -> bool {
    let Some(first) = queue::KEPT.open() else {
        // The fork came while another thread held the lock, which no thread will ever release here.
        subscriber::install(level, hide_time, false);
        return false;
    };
    subscriber::install(level, hide_time, true);
    first
}

/// Waits for kept events, at most for `limit`, and takes all of them. `None` after [`end`], when
/// all were taken.
pub fn take(limit: Duration) -> Option<Taken> {
    queue::KEPT.take(limit)
}

/// Lets the last [`take`] return; later events go to stderr. Does nothing in a forked child.
pub fn end() {
    if subscriber::keeps() {
        subscriber::give_up_keeping();
        queue::KEPT.close();
    }
}

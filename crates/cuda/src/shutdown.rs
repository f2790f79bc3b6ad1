// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The end of communicators: they wait for a short time.

use std::time::{Duration, Instant};

use farandole_collectives::Communicator;

/// Pause between two looks at ending work.
const SHUTDOWN_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// The longest wait for queued or aborted work, and for peers that end at the same time. The wait
/// takes milliseconds, unless the work comes after unfinished work of the framework.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Polls until the condition is true or the time limit has passed; returns whether it is true.
pub(crate) fn poll_until(mut come: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !come() {
        if began.elapsed() > SHUTDOWN_TIMEOUT {
            return false;
        }
        std::thread::sleep(SHUTDOWN_POLL_INTERVAL);
    }
    true
}

/// Waits for launched work, at most so long; failures in the meantime are reported elsewhere.
pub(crate) fn drain_communicator(communicator: &mut dyn Communicator, limit: Duration) {
    let (began, mut over) = (Instant::now(), Vec::new());
    while communicator.pending_count() > 0 && began.elapsed() < limit {
        match communicator.make_progress(&mut over) {
            Ok(true) => {}
            Ok(false) => std::thread::sleep(SHUTDOWN_POLL_INTERVAL),
            Err(_) => return,
        }
    }
}

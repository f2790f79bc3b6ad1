// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The time for which calls of this process have waited for results, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

// Of the process, and not of an engine: a counter must not fall when an elastic job forms a new
// world.
static WAITED_NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// Counts a wait.
pub fn count_collective_wait(elapsed: Duration) {
    let elapsed = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
    // The counter orders nothing else.
    WAITED_NANOSECONDS.fetch_add(elapsed, Ordering::Relaxed);
}

/// Returns the time for which all threads together have waited since the process started.
pub fn collective_wait() -> Duration {
    Duration::from_nanos(WAITED_NANOSECONDS.load(Ordering::Relaxed))
}

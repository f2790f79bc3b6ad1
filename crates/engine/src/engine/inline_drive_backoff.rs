// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Back-off of help: a submitting thread helps while its help completes operations in time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longest help: several times the duration of a small operation, and too short to delay the
/// calling thread noticeably.
const HELP_BUDGET: Duration = Duration::from_micros(150);
/// Number of consecutive failed attempts after which help becomes rare.
const MAX_FAILED_HELPS: u32 = 3;
/// Help is then given in one of this many calls.
const RETRY_HELP_EVERY: u32 = 16;

/// Record of whether help has completed operations in time.
#[derive(Debug, Default)]
pub(super) struct InlineDriveBackoff {
    failed_helps: AtomicU32,
}

impl InlineDriveBackoff {
    /// Returns the time to help in this call.
    pub(super) fn next_inline_drive_budget(&self) -> Duration {
        let vain = self.failed_helps.load(Ordering::Relaxed);
        if vain < MAX_FAILED_HELPS || vain.is_multiple_of(RETRY_HELP_EVERY) {
            HELP_BUDGET
        } else {
            Duration::ZERO
        }
    }

    pub(super) fn record_drive_outcome(&self, over: bool) {
        if over {
            self.failed_helps.store(0, Ordering::Relaxed);
        } else {
            self.failed_helps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_help_becomes_rare_and_is_complete_again_once_it_pays() {
        let backoff = InlineDriveBackoff::default();
        let given = || {
            let budget = backoff.next_inline_drive_budget();
            backoff.record_drive_outcome(false);
            !budget.is_zero()
        };
        assert_eq!((0..32).filter(|_| given()).count(), 4, "the first three, and the sixteenth");
        backoff.record_drive_outcome(true);
        assert_eq!(backoff.next_inline_drive_budget(), HELP_BUDGET);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Pauses between the attempts of a request, the same for all services.

use std::time::Duration;

use object_store::{BackoffConfig, RetryConfig};

/// First pause between two attempts.
pub(crate) const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Returns the longest pause between two attempts.
pub(crate) fn longest_retry_pause(timeout: Duration) -> Duration {
    // With the default timeout of 3 minutes, both limits are 15 s.
    Duration::from_secs(15).min(timeout / 12).max(FIRST_RETRY_PAUSE)
}

/// Returns the retry settings. Only the time limits them, because services ask for minutes of
/// patience: S3 while it splits a partition. The pauses grow and are random.
pub(crate) fn retry_config(timeout: Duration) -> RetryConfig {
    let max_backoff = longest_retry_pause(timeout);
    let backoff = BackoffConfig { init_backoff: FIRST_RETRY_PAUSE, max_backoff, base: 2.0 };
    // More pauses than the timeout has room for.
    let pauses = 2 * timeout.as_millis() / FIRST_RETRY_PAUSE.as_millis();
    let max_retries = usize::try_from(pauses).unwrap_or(usize::MAX);
    RetryConfig { backoff, max_retries, retry_timeout: timeout }
}

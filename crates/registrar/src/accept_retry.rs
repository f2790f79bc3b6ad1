// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Accepts connections, and continues after an error.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};

/// Pause after a failed attempt to accept. Without the pause, a process that has run out of file
/// descriptors would spin on a whole core.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Shortest time between two log messages about failed attempts.
const ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Back-off of a listener after failed attempts to accept; limits its log messages.
pub(crate) struct AcceptRetry {
    who: &'static str,
    last_logged: Option<Instant>,
}

impl AcceptRetry {
    /// Creates the state of a listener, which log messages call `who`.
    pub(crate) fn new(who: &'static str) -> Self {
        Self { who, last_logged: None }
    }

    /// Logs the error, at most once per `ERROR_LOG_INTERVAL`, and returns the pause before the next
    /// attempt.
    pub(crate) fn delay_after_error(&mut self, error: &io::Error, now: Instant) -> Duration {
        if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
        {
            // Only this caller is gone; the listener still works.
            return Duration::ZERO;
        }
        if self
            .last_logged
            .is_none_or(|logged_at| now.saturating_duration_since(logged_at) >= ERROR_LOG_INTERVAL)
        {
            self.last_logged = Some(now);
            tracing::error!(%error, "{} cannot accept connections; it tries again", self.who);
        }
        ACCEPT_RETRY_DELAY
    }

    /// Returns the next connection; retries after failed attempts.
    pub(crate) async fn accept_next(&mut self, listener: &TcpListener) -> (TcpStream, SocketAddr) {
        loop {
            match listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tokio::time::sleep(self.delay_after_error(&error, Instant::now())).await
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_to_accept_is_reported_once_in_a_while_and_never_retried_at_once() {
        let (mut failing, start) = (AcceptRetry::new("it"), Instant::now());
        let full = io::Error::from_raw_os_error(24);
        assert_eq!(failing.delay_after_error(&full, start), ACCEPT_RETRY_DELAY);
        assert_eq!(failing.last_logged, Some(start));
        assert_eq!(
            failing.delay_after_error(&full, start + ERROR_LOG_INTERVAL / 2),
            ACCEPT_RETRY_DELAY
        );
        assert_eq!(failing.last_logged, Some(start));
        failing.delay_after_error(&full, start + ERROR_LOG_INTERVAL);
        assert_eq!(failing.last_logged, Some(start + ERROR_LOG_INTERVAL));
        let gone = io::ErrorKind::ConnectionAborted.into();
        assert_eq!(
            failing.delay_after_error(&gone, start + 3 * ERROR_LOG_INTERVAL),
            Duration::ZERO
        );
        assert_eq!(failing.last_logged, Some(start + ERROR_LOG_INTERVAL));
    }
}

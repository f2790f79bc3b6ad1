// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Accepts connections, and continues after an error.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};

/// Between two attempts to accept, after one that failed: descriptors that ran out do not come back
/// by asking, and without the pause the loop would take a whole core.
const RETRY: Duration = Duration::from_millis(100);
/// Between two messages about that.
const AGAIN: Duration = Duration::from_secs(10);

/// Connections that could not be accepted.
pub(crate) struct Failing {
    who: &'static str,
    told: Option<Instant>,
}

impl Failing {
    /// `who` accepts.
    pub(crate) fn of(who: &'static str) -> Self {
        Self { who, told: None }
    }

    /// Says it, once in a while; how long to wait before the next attempt.
    pub(crate) fn met(&mut self, error: &io::Error, now: Instant) -> Duration {
        if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
        {
            // Only that caller is gone.
            return Duration::ZERO;
        }
        if self.told.is_none_or(|told| now.saturating_duration_since(told) >= AGAIN) {
            self.told = Some(now);
            tracing::error!(%error, "{} cannot accept connections; it tries again", self.who);
        }
        RETRY
    }

    /// Returns the next connection, however many attempts fail before.
    pub(crate) async fn next(&mut self, listener: &TcpListener) -> (TcpStream, SocketAddr) {
        loop {
            match listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => tokio::time::sleep(self.met(&error, Instant::now())).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_to_accept_is_reported_once_in_a_while_and_never_retried_at_once() {
        let (mut failing, start) = (Failing::of("it"), Instant::now());
        let full = io::Error::from_raw_os_error(24);
        assert_eq!(failing.met(&full, start), RETRY);
        assert_eq!(failing.told, Some(start));
        assert_eq!(failing.met(&full, start + AGAIN / 2), RETRY);
        assert_eq!(failing.told, Some(start));
        failing.met(&full, start + AGAIN);
        assert_eq!(failing.told, Some(start + AGAIN));
        let gone = io::ErrorKind::ConnectionAborted.into();
        assert_eq!(failing.met(&gone, start + 3 * AGAIN), Duration::ZERO);
        assert_eq!(failing.told, Some(start + AGAIN));
    }
}

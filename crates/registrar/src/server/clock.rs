// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The clock of the registrar, which excludes the times in which the process was stopped.
//!
//! A driver can be stopped: by a debugger, by Ctrl-Z, by the suspension of a laptop. Meanwhile it
//! receives no heartbeats. When it continues, every agent has been silent for the whole time,
//! although the agents may be alive. So this time does not count.

use std::time::Duration;

/// Shortest time between two readings that counts as a stop of the process. The clock is read
/// twenty times a second.
const MIN_STOPPED_TIME: Duration = Duration::from_secs(2);

/// A clock that stops while its process is stopped.
#[derive(Debug, Default)]
pub(super) struct JobClock {
    last_reading: Duration,
    stopped_time: Duration,
}

impl JobClock {
    /// Converts a monotonic reading to job time, which excludes the time this process was stopped.
    pub(super) fn job_time(&mut self, running: Duration) -> Duration {
        let since = running.saturating_sub(self.last_reading);
        if since >= MIN_STOPPED_TIME {
            tracing::warn!(
                "this process did not run for {:.1} s: it was stopped, its host slept or had no \
                 time for it",
                since.as_secs_f64()
            );
            self.stopped_time += since;
        }
        self.last_reading = running.max(self.last_reading);
        self.last_reading.saturating_sub(self.stopped_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_a_look_does_not_count() {
        let second = Duration::from_secs(1);
        let mut clock = JobClock::default();
        assert_eq!(clock.job_time(second), second);
        assert_eq!(clock.job_time(second), second);
        assert_eq!(clock.job_time(61 * second), second, "stopped for a minute");
        assert_eq!(clock.job_time(61 * second + second / 2), second + second / 2);
        assert_eq!(clock.job_time(61 * second), second + second / 2, "it does not run backwards");
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The clock of the registrar, without the times in which the process did not run.
//!
//! A driver can be stopped: by a debugger, by Ctrl-Z, by a laptop that sleeps. While it is, it
//! hears no agent. When it continues, every agent has been silent for as long. That says nothing of
//! them, so such time does not count.

use std::time::Duration;

/// Time is looked at twenty times a second: after so long without a look, the process was stopped.
const STOPPED: Duration = Duration::from_secs(2);

/// A clock that stands while its process does.
#[derive(Debug, Default)]
pub(super) struct Clock {
    looked: Duration,
    stood: Duration,
}

impl Clock {
    /// Returns the time, given that of a clock that never stands.
    pub(super) fn read(&mut self, running: Duration) -> Duration {
        let since = running.saturating_sub(self.looked);
        if since >= STOPPED {
            tracing::warn!(
                "this process did not run for {:.1} s: it was stopped, its host slept or had no \
                 time for it",
                since.as_secs_f64()
            );
            self.stood += since;
        }
        self.looked = running.max(self.looked);
        self.looked.saturating_sub(self.stood)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_a_look_does_not_count() {
        let second = Duration::from_secs(1);
        let mut clock = Clock::default();
        assert_eq!(clock.read(second), second);
        assert_eq!(clock.read(second), second);
        assert_eq!(clock.read(61 * second), second, "stopped for a minute");
        assert_eq!(clock.read(61 * second + second / 2), second + second / 2);
        assert_eq!(clock.read(61 * second), second + second / 2, "it does not run backwards");
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The time for which a waiting thread spins before it sleeps.
//!
//! On a quiet machine a peer answers within microseconds, and a spinning thread gets the answer
//! sooner than a sleeping one. On a busy machine the spinning thread keeps the peer from its core.
//! So the time is halved whenever it ran out and doubled whenever it was enough. Now and then a
//! waiter spins for the full time, to notice that a machine is quiet again. If the full time was
//! enough, the next wait gets twice the time that was spent, not twice the short time before it.
//!
//! If ranks of other hosts take part, a long operation may wait for the network most of the time.
//! The bytes that the kernel has buffered keep the network busy while a thread wakes up, so such a
//! drive sleeps without spinning: see [`PeerWaits`].

use std::time::{Duration, Instant};

/// Shortest spin; it costs about as much as a wake-up.
const MIN_SPIN_TIME: Duration = Duration::from_micros(4);
/// One in this many consecutive waits that timed out spins for the full time.
const FULL_SPIN_EVERY: u32 = 128;
/// Time of spinning after which a waiter yields its core in every turn.
const MAX_SPIN_BEFORE_YIELD: Duration = Duration::from_micros(20);

/// Adaptive spin time of one driver.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    most: Duration,
    current: Duration,
    timeouts: u32,
}

impl SpinBudget {
    /// Starts with the full time.
    pub(crate) fn new(most: Duration) -> Self {
        Self { most, current: most, timeouts: 0 }
    }

    /// Returns the time to spin in this wait.
    pub(crate) fn spin_limit(&self) -> Duration {
        if self.timeouts % FULL_SPIN_EVERY == FULL_SPIN_EVERY - 1 {
            self.most
        } else {
            self.current
        }
    }

    /// Records that the event came after spinning for `spun`.
    pub(crate) fn record_success(&mut self, spun: Duration) {
        self.current = (self.current.max(spun) * 2).min(self.most);
        self.timeouts = 0;
    }

    /// Records that the time ran out.
    pub(crate) fn record_timeout(&mut self) {
        // A setting of zero must stay zero.
        self.current = (self.current / 2).max(MIN_SPIN_TIME.min(self.most));
        self.timeouts = self.timeouts.wrapping_add(1);
    }

    /// Returns whether a waiter that has spun for `spun` should yield its core in every turn.
    pub(crate) fn should_yield(spun: Duration) -> bool {
        spun > MAX_SPIN_BEFORE_YIELD
    }
}

/// The share of its time that one drive has waited for peers.
#[derive(Debug)]
pub(crate) struct PeerWaits {
    began: Instant,
    waited: Duration,
}

impl PeerWaits {
    pub(crate) fn begin_drive(now: Instant) -> Self {
        Self { began: now, waited: Duration::ZERO }
    }

    /// Records a wait, with or without sleep.
    pub(crate) fn record_wait(&mut self, time: Duration) {
        self.waited += time;
    }

    /// Returns whether the drive has waited for more than `spin` and for most of its time.
    pub(crate) fn exceed_work(&self, now: Instant, spin: Duration) -> bool {
        self.waited > spin && self.waited * 2 > now.duration_since(self.began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_exceed_work_in_a_long_drive_only() {
        let (spin, began) = (Duration::from_millis(1), Instant::now());
        let mut waits = PeerWaits::begin_drive(began);
        waits.record_wait(spin);
        assert!(!waits.exceed_work(began + spin, spin), "a short operation spins to its end");
        waits.record_wait(spin);
        assert!(waits.exceed_work(began + 3 * spin, spin));
        assert!(!waits.exceed_work(began + 5 * spin, spin), "copies and sums take longer");
    }

    #[test]
    fn useless_spinning_becomes_short_and_recovers_when_it_pays() {
        let most = Duration::from_millis(1);
        let mut timeout = SpinBudget::new(most);
        (0..20).for_each(|_| timeout.record_timeout());
        assert_eq!(timeout.spin_limit(), MIN_SPIN_TIME);
        (0..10).for_each(|_| timeout.record_success(MIN_SPIN_TIME));
        assert_eq!(timeout.spin_limit(), most);
    }

    #[test]
    fn a_sleeper_tries_the_full_time_now_and_then() {
        let most = Duration::from_millis(1);
        let mut timeout = SpinBudget::new(most);
        let full = (0..2 * FULL_SPIN_EVERY).filter(|_| {
            timeout.record_timeout();
            timeout.spin_limit() == most
        });
        assert_eq!(full.count(), 2);
    }

    #[test]
    fn a_full_time_that_was_enough_says_how_long_to_spin() {
        let mut timeout = SpinBudget::new(Duration::from_millis(1));
        (0..20).for_each(|_| timeout.record_timeout());
        // Twice the 4 us before would time out again, and every wait would sleep.
        timeout.record_success(Duration::from_micros(35));
        assert_eq!(timeout.spin_limit(), Duration::from_micros(70));
    }

    #[test]
    fn a_thread_that_may_not_spin_never_spins() {
        let mut timeout = SpinBudget::new(Duration::ZERO);
        timeout.record_timeout();
        assert_eq!(timeout.spin_limit(), Duration::ZERO);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The time for which a waiting thread spins before it sleeps.
//!
//! On a quiet machine a peer answers within microseconds, and a thread that spins has the answer
//! sooner than a thread that must be woken. On a busy one the spinning itself keeps the peer from
//! its core. So the time is halved whenever it ran out and doubled whenever it was enough. Now and
//! then a waiter tries the full time, to find a machine quiet again. If that was enough, the next
//! wait gets twice the time that it took, and not twice the short time before it.

use std::time::Duration;

/// Costs about as much as being woken.
const LEAST: Duration = Duration::from_micros(4);
/// One in so many waits that slept spins for the full time.
const PROBE: u32 = 128;
/// After this the core is offered to others with every turn.
const ALONE: Duration = Duration::from_micros(20);

/// The spinning of one driver.
#[derive(Debug)]
pub(crate) struct Patience {
    most: Duration,
    now: Duration,
    slept: u32,
}

impl Patience {
    /// Starts with the full time.
    pub(crate) fn new(most: Duration) -> Self {
        Self { most, now: most, slept: 0 }
    }

    /// Returns the time to spin this time.
    pub(crate) fn limit(&self) -> Duration {
        if self.slept % PROBE == PROBE - 1 { self.most } else { self.now }
    }

    /// Notes that the awaited event came after this time of spinning.
    pub(crate) fn paid(&mut self, spun: Duration) {
        self.now = (self.now.max(spun) * 2).min(self.most);
        self.slept = 0;
    }

    /// The time ran out.
    pub(crate) fn ran_out(&mut self) {
        self.now = (self.now / 2).max(LEAST.min(self.most));
        self.slept = self.slept.wrapping_add(1);
    }

    /// Returns whether a waiter that has spun for `spun` should offer its core with every turn.
    pub(crate) fn yields(spun: Duration) -> bool {
        spun > ALONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_spinning_becomes_short_and_recovers_when_it_pays() {
        let most = Duration::from_millis(1);
        let mut patience = Patience::new(most);
        (0..20).for_each(|_| patience.ran_out());
        assert_eq!(patience.limit(), LEAST);
        (0..10).for_each(|_| patience.paid(LEAST));
        assert_eq!(patience.limit(), most);
    }

    #[test]
    fn a_sleeper_tries_the_full_time_now_and_then() {
        let most = Duration::from_millis(1);
        let mut patience = Patience::new(most);
        let full = (0..2 * PROBE).filter(|_| {
            patience.ran_out();
            patience.limit() == most
        });
        assert_eq!(full.count(), 2);
    }

    #[test]
    fn a_full_time_that_was_enough_says_how_long_to_spin() {
        let mut patience = Patience::new(Duration::from_millis(1));
        (0..20).for_each(|_| patience.ran_out());
        // Twice the 4 us before would run out again, and every wait would sleep.
        patience.paid(Duration::from_micros(35));
        assert_eq!(patience.limit(), Duration::from_micros(70));
    }

    #[test]
    fn a_thread_that_may_not_spin_never_spins() {
        let mut patience = Patience::new(Duration::ZERO);
        patience.ran_out();
        assert_eq!(patience.limit(), Duration::ZERO);
    }
}

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
//! If more threads can run than there are cores, spinning costs more than the time itself: a thread
//! that has used its share of a core waits until all others had theirs, and a thread that yields
//! waits at once. A thread that sleeps gets a core soon after the event. So when a spinning thread
//! has lost its core, the event that came meanwhile is no success: the next waits are short and do
//! not yield, and full times become rare until one is enough.

use std::time::Duration;

/// Shortest spin; it costs about as much as a wake-up.
const MIN_SPIN_TIME: Duration = Duration::from_micros(4);
/// One in this many consecutive waits that timed out spins for the full time.
const FULL_SPIN_EVERY: u32 = 128;
/// The same, after many full times in which the thread lost its core.
const RAREST_FULL_SPIN_EVERY: u32 = 128 << 5;
/// Number of consecutive successful spins after which a lost core is forgotten.
const CALM_SPINS: u32 = 64;
/// A turn of a spinning thread takes about a microsecond. After this time, other threads had the
/// core meanwhile.
// Less than the scheduler's shortest time slice, and more than a peer on the same core needs for a
// small operation.
const MAX_SPIN_TURN_TIME: Duration = Duration::from_micros(300);
/// Time of spinning after which a waiter yields its core in every turn.
const MAX_SPIN_BEFORE_YIELD: Duration = Duration::from_micros(20);

/// Adaptive spin time of one driver.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    most: Duration,
    current: Duration,
    timeouts: u32,
    full_spin_every: u32,
    /// Number of consecutive successful spins until a lost core is forgotten.
    calm_spins_missing: u32,
    /// Whether a full time was enough since the core was lost.
    has_full_time_paid: bool,
}

impl SpinBudget {
    /// Starts with the full time.
    pub(crate) fn new(most: Duration) -> Self {
        Self {
            most,
            current: most,
            timeouts: 0,
            full_spin_every: FULL_SPIN_EVERY,
            calm_spins_missing: 0,
            has_full_time_paid: false,
        }
    }

    fn is_full_time_due(&self) -> bool {
        self.timeouts % self.full_spin_every == self.full_spin_every - 1
    }

    /// Returns the time to spin in this wait.
    pub(crate) fn spin_limit(&self) -> Duration {
        if self.is_full_time_due() { self.most } else { self.current }
    }

    /// Records that the event came after spinning for `spun`.
    pub(crate) fn record_success(&mut self, spun: Duration) {
        self.has_full_time_paid |= self.is_full_time_due();
        self.current = (self.current.max(spun) * 2).min(self.most);
        self.timeouts = 0;
        self.calm_spins_missing = self.calm_spins_missing.saturating_sub(1);
        if self.calm_spins_missing == 0 {
            self.full_spin_every = FULL_SPIN_EVERY;
        }
    }

    /// Records that the time ran out.
    pub(crate) fn record_timeout(&mut self) {
        // A setting of zero must stay zero.
        self.current = (self.current / 2).max(MIN_SPIN_TIME.min(self.most));
        self.timeouts = self.timeouts.wrapping_add(1);
        if self.calm_spins_missing > 0 {
            self.calm_spins_missing = CALM_SPINS;
        }
    }

    /// Records that other threads had the core of the spinning thread.
    pub(crate) fn record_lost_core(&mut self) {
        if self.calm_spins_missing > 0 {
            self.full_spin_every = (self.full_spin_every * 2).min(RAREST_FULL_SPIN_EVERY);
        }
        self.calm_spins_missing = CALM_SPINS;
        self.has_full_time_paid = false;
        self.current = MIN_SPIN_TIME.min(self.most);
        self.timeouts = 0;
    }

    /// Returns whether a waiter may yield its core. While other threads want the core, it would
    /// wait until all of them had it.
    ///
    /// If the host has more ranks than cores (`oversubscribed`), peers need the core. Full times
    /// then yield, and the waits after one that was enough.
    pub(crate) fn may_yield(&self, oversubscribed: bool) -> bool {
        self.calm_spins_missing == 0
            || (oversubscribed && (self.has_full_time_paid || self.is_full_time_due()))
    }

    /// Returns whether a turn of a spinning thread took so long that other threads had its core.
    pub(crate) fn is_core_lost(turn: Duration) -> bool {
        turn > MAX_SPIN_TURN_TIME
    }

    /// Returns whether a waiter that has spun for `spun` should yield its core in every turn.
    pub(crate) fn should_yield(spun: Duration) -> bool {
        spun > MAX_SPIN_BEFORE_YIELD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_thread_that_loses_its_core_sleeps_soon_and_rarely_tries_the_full_time() {
        let most = Duration::from_millis(1);
        let mut budget = SpinBudget::new(most);
        assert!(budget.may_yield(false));
        let mut full_times = 0;
        for _ in 0..RAREST_FULL_SPIN_EVERY {
            let limit = budget.spin_limit();
            if limit == most {
                full_times += 1;
                // The event came while another thread had the core.
                budget.record_lost_core();
            } else {
                assert_eq!(limit, MIN_SPIN_TIME);
                assert!(!budget.may_yield(false) && !budget.may_yield(true));
                budget.record_timeout();
            }
        }
        assert_eq!(full_times, 6, "the first, then after 128, 256, 512, 1024 and 2048 waits");
    }

    #[test]
    fn a_lost_core_is_forgotten_after_many_successful_spins() {
        let most = Duration::from_millis(1);
        let mut budget = SpinBudget::new(most);
        budget.record_lost_core();
        (1..CALM_SPINS).for_each(|_| budget.record_success(MIN_SPIN_TIME));
        budget.record_timeout();
        assert!(!budget.may_yield(false), "not successful in a row");
        (0..CALM_SPINS).for_each(|_| budget.record_success(MIN_SPIN_TIME));
        assert!(budget.may_yield(false));
        assert_eq!(budget.spin_limit(), most);
    }

    #[test]
    fn ranks_that_share_cores_yield_again_after_a_full_time_that_was_enough() {
        let mut budget = SpinBudget::new(Duration::from_millis(1));
        budget.record_lost_core();
        assert!(!budget.may_yield(true));
        (1..FULL_SPIN_EVERY).for_each(|_| budget.record_timeout());
        assert!(budget.may_yield(true) && !budget.may_yield(false), "a full time is due");
        budget.record_success(MIN_SPIN_TIME);
        assert!(budget.may_yield(true) && !budget.may_yield(false));
        budget.record_lost_core();
        assert!(!budget.may_yield(true), "other threads want the core, not only peers");
    }

    #[test]
    fn a_thread_that_may_not_spin_never_spins() {
        let mut timeout = SpinBudget::new(Duration::ZERO);
        timeout.record_timeout();
        assert_eq!(timeout.spin_limit(), Duration::ZERO);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Limit on the shared memory of the rings that this process creates, with the amount in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct RingByteBudget {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

/// Reserved bytes; released on drop.
#[derive(Debug)]
pub(crate) struct RingByteReservation {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl RingByteBudget {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, taken: Arc::default() }
    }

    /// Reserves bytes, or returns the reason why that is impossible.
    pub(crate) fn reserve_bytes(&self, bytes: u64) -> Result<RingByteReservation, String> {
        let within = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        // Only a count: the code that allocates the memory enforces the limit.
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within) {
            Ok(_) => Ok(RingByteReservation { bytes, taken: Arc::clone(&self.taken) }),
            Err(_) => {
                Err(format!("{bytes} bytes more than this process may take of {}", self.bytes))
            }
        }
    }
}

impl Drop for RingByteReservation {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_given_back_by_their_taker() {
        let budget = RingByteBudget::new(100);
        let most = budget.reserve_bytes(60).unwrap();
        assert_eq!(
            budget.reserve_bytes(41).unwrap_err(),
            "41 bytes more than this process may take of 100"
        );
        assert!(budget.reserve_bytes(u64::MAX).is_err());
        let rest = budget.reserve_bytes(40).unwrap();
        drop(most);
        assert!(budget.reserve_bytes(60).is_ok());
        drop(rest);
        assert!(budget.reserve_bytes(100).is_ok());
    }
}

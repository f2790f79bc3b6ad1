// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The limit on shared memory for this process's own rings, and the amount in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Budget {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

/// Bytes that were taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, taken: Arc::default() }
    }

    /// Takes bytes, or says why not.
    pub(crate) fn take(&self, bytes: u64) -> Result<Lease, String> {
        let within = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        // Only a count: the code that allocates the memory enforces the limit.
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within) {
            Ok(_) => Ok(Lease { bytes, taken: Arc::clone(&self.taken) }),
            Err(_) => {
                Err(format!("{bytes} bytes more than this process may take of {}", self.bytes))
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_given_back_by_their_taker() {
        let budget = Budget::new(100);
        let most = budget.take(60).unwrap();
        assert_eq!(budget.take(41).unwrap_err(), "41 bytes more than this process may take of 100");
        assert!(budget.take(u64::MAX).is_err());
        let rest = budget.take(40).unwrap();
        drop(most);
        assert!(budget.take(60).is_ok());
        drop(rest);
        assert!(budget.take(100).is_ok());
    }
}

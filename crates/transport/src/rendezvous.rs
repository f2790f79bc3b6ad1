// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! How ranks that know nothing of each other meet: a key-value service somebody else runs.

use std::time::Instant;

use crate::Result;

/// A key-value meeting point. The registrar client implements it in `session`; `MemoryRendezvous` serves tests.
pub trait Rendezvous: Send + Sync {
    /// Publishes `value` under `key`; the last value wins.
    ///
    /// # Errors
    /// `Rendezvous` when the service cannot be reached.
    fn put(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` has a value.
    ///
    /// # Errors
    /// `Rendezvous` when the service cannot be reached, `Timeout` at `deadline`.
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>>;
}

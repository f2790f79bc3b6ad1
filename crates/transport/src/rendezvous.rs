// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The rendezvous of ranks that do not know each other's addresses: an external service exchanges
//! them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use farandole_world::{Generation, Rank};
use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

/// A rank of one world, which takes part in a rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RendezvousParticipant {
    /// Generation of the world in the job.
    pub generation: Generation,
    /// The rank.
    pub rank: Rank,
    /// Number of ranks in the world.
    pub size: u32,
}

/// A service through which ranks exchange their addresses. `session` has one that uses the
/// registrar; [`MemoryRendezvous`] serves tests.
pub trait Rendezvous: Send + Sync {
    /// Publishes the encoded addresses of the rank at `point`, waits for the addresses of all ranks
    /// of its world, and returns them by rank.
    ///
    /// # Errors
    /// `Rendezvous` when the service cannot be reached, `Timeout` naming a rank that did not
    /// publish its addresses before `deadline`.
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>>;
}

/// A rendezvous in memory; clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryRendezvous {
    shared: Arc<PeerAddressTable>,
}

#[derive(Debug, Default)]
struct PeerAddressTable {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryRendezvous {
    /// Publishes `value` under `key`; the last value wins.
    pub fn publish_value(&self, key: &str, value: &[u8]) {
        self.shared.values.lock().insert(key.to_owned(), value.to_owned());
        self.shared.changed.notify_all();
    }

    /// Waits until `key` has a value. The addresses of a rank have the key `mesh/GENERATION/RANK`.
    ///
    /// # Errors
    /// `Timeout` at `deadline`.
    pub fn await_value(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        let mut values = self.shared.values.lock();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            if self.shared.changed.wait_until(&mut values, deadline).timed_out() {
                return Err(Error::Timeout {
                    what: format!("key {key}"),
                    elapsed: started.elapsed(),
                });
            }
        }
    }
}

impl Rendezvous for MemoryRendezvous {
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let RendezvousParticipant { generation, rank, size } = point;
        // With the generation, so that a new world cannot read addresses of an earlier one.
        let key = |rank: u32| format!("mesh/{generation}/{rank}");
        self.publish_value(&key(rank.0), addresses);
        let all_addresses = (0..size).map(|peer| {
            self.await_value(&key(peer), deadline).map_err(|error| match error {
                Error::Timeout { elapsed, .. } => {
                    Error::Timeout { what: format!("rank {peer} of {size} to join"), elapsed }
                }
                other => other,
            })
        });
        all_addresses.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn get_waits_for_a_late_put() {
        let rendezvous = MemoryRendezvous::default();
        let late = rendezvous.clone();
        let other = thread::spawn(move || late.publish_value("key", b"value"));
        assert_eq!(
            rendezvous.await_value("key", Instant::now() + Duration::from_secs(10)).unwrap(),
            b"value"
        );
        other.join().unwrap();
    }

    #[test]
    fn get_gives_up_at_the_deadline() {
        let error = MemoryRendezvous::default().await_value("nobody", Instant::now()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

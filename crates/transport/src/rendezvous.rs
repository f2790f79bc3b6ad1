// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The meeting of ranks that do not know each other: an external service exchanges their cards.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use farandole_world::{Generation, Rank};
use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

/// A rank of one world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The world among the worlds of the job.
    pub generation: Generation,
    /// The rank.
    pub rank: Rank,
    /// Ranks of the world.
    pub size: u32,
}

/// A meeting place at which ranks exchange their cards. `session` has one that asks the registrar;
/// `MemoryRendezvous` serves tests.
pub trait Rendezvous: Send + Sync {
    /// Publishes the card of the rank at `place`, and waits for those of all ranks of its world: by
    /// rank.
    ///
    /// # Errors
    /// `Rendezvous` when the service cannot be reached, `Timeout` naming a rank that did not come
    /// by `deadline`.
    fn meet(&self, place: Place, card: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>>;
}

/// A meeting point in memory; clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryRendezvous {
    shared: Arc<Board>,
}

#[derive(Debug, Default)]
struct Board {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryRendezvous {
    /// Publishes `value` under `key`; the last value wins.
    pub fn put(&self, key: &str, value: &[u8]) {
        self.shared.values.lock().insert(key.to_owned(), value.to_owned());
        self.shared.changed.notify_all();
    }

    /// Waits until `key` has a value. The card of a rank has the key `mesh/GENERATION/RANK`.
    ///
    /// # Errors
    /// `Timeout` at `deadline`.
    pub fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
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
    fn meet(&self, place: Place, card: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let Place { generation, rank, size } = place;
        let key = |rank: u32| format!("mesh/{generation}/{rank}");
        self.put(&key(rank.0), card);
        let cards = (0..size).map(|peer| {
            self.get(&key(peer), deadline).map_err(|error| match error {
                Error::Timeout { elapsed, .. } => {
                    Error::Timeout { what: format!("rank {peer} of {size} to join"), elapsed }
                }
                other => other,
            })
        });
        cards.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn get_waits_for_a_late_put() {
        let meeting = MemoryRendezvous::default();
        let late = meeting.clone();
        let other = thread::spawn(move || late.put("key", b"value"));
        assert_eq!(meeting.get("key", Instant::now() + Duration::from_secs(10)).unwrap(), b"value");
        other.join().unwrap();
    }

    #[test]
    fn get_gives_up_at_the_deadline() {
        let error = MemoryRendezvous::default().get("nobody", Instant::now()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

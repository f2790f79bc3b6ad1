// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! How ranks that know nothing of each other meet: a key-value service somebody else runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::{Error, Result};

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

impl Rendezvous for MemoryRendezvous {
    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.shared.values.lock().insert(key.to_owned(), value.to_owned());
        self.shared.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        let mut values = self.shared.values.lock();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            if self.shared.changed.wait_until(&mut values, deadline).timed_out() {
                return Err(Error::Timeout { what: format!("key {key}"), elapsed: started.elapsed() });
            }
        }
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
        let other = thread::spawn(move || late.put("key", b"value").unwrap());
        assert_eq!(meeting.get("key", Instant::now() + Duration::from_secs(10)).unwrap(), b"value");
        other.join().unwrap();
    }

    #[test]
    fn get_gives_up_at_the_deadline() {
        let error = MemoryRendezvous::default().get("nobody", Instant::now()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

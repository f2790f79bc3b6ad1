// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The registrar's key-value service as the ranks' meeting point.

use std::time::{Duration, Instant};

use farandole_registrar::{Client, Error as RegistrarError};
use farandole_transport::{Error, Rendezvous, Result};
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::{Error as Fail, claim};

/// The longest time between two questions whether to give up.
pub(crate) const SLICE: Duration = Duration::from_millis(250);

/// Asks whether to give up.
pub(crate) type Interrupted<'a> = dyn FnMut() -> bool + Send + 'a;

/// One session's part of the service: keys are the registrar's per generation, and here per session, so that no rank
/// meets what another has left there before it shut down and began anew.
pub(crate) struct Meeting<'a, 'b> {
    client: &'a Client,
    session: u64,
    /// This rank in the launched world, and those it forms a world with, if that is not all.
    place: (Rank, Option<&'a [Rank]>),
    failure: Mutex<Option<Fail>>,
    interrupted: Mutex<&'a mut Interrupted<'b>>,
}

impl<'a, 'b> Meeting<'a, 'b> {
    pub(crate) fn new(
        client: &'a Client,
        session: u64,
        place: (Rank, Option<&'a [Rank]>),
        interrupted: &'a mut Interrupted<'b>,
    ) -> Self {
        Self { client, session, place, failure: Mutex::new(None), interrupted: Mutex::new(interrupted) }
    }

    /// What the registrar said, if it was that which failed.
    pub(crate) fn failure(self) -> Option<Fail> {
        self.failure.into_inner()
    }

    fn failed(&self, key: &str, error: impl Into<Fail>) -> Error {
        let error = error.into();
        let reason = error.to_string();
        *self.failure.lock() = Some(error);
        Error::Rendezvous { key: key.to_owned(), reason }
    }

    fn key(&self, key: &str) -> String {
        match self.place.1.and_then(<[Rank]>::first) {
            None => format!("session/{}/{key}", self.session),
            // Disjoint parts have different lowest ranks.
            Some(lowest) => format!("session/{}/from/{lowest}/{key}", self.session),
        }
    }
}

impl Rendezvous for Meeting<'_, '_> {
    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        self.client.put(&self.key(key), value).map_err(|error| self.failed(key, error))
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        let full = self.key(key);
        loop {
            match self.client.get(&full, deadline.min(Instant::now() + SLICE)) {
                Ok(value) => return Ok(value),
                Err(RegistrarError::Timeout { .. }) if Instant::now() >= deadline => {
                    return Err(Error::Timeout { what: format!("key {key}"), elapsed: started.elapsed() });
                }
                Err(RegistrarError::Timeout { .. }) => {
                    let (own, part) = self.place;
                    claim::hopeless(self.client, self.session, own, part)
                        .map_err(|error| self.failed(key, error))?;
                }
                Err(error) => return Err(self.failed(key, error)),
            }
            if (self.interrupted.lock())() {
                return Err(Error::Rendezvous { key: key.to_owned(), reason: "interrupted".to_owned() });
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ranks' meeting point, which the registrar holds: each asks once for a world, and gets the
//! cards of all ranks.

use std::fs;
use std::process;
use std::time::{Duration, Instant};

use farandole_registrar::{Client, Error as RegistrarError, Meet};
use farandole_transport::{Error as TransportError, Place, Rendezvous};
use farandole_world::{Rank, World};
use parking_lot::Mutex;

use crate::{Error, Result};

/// The longest time between two questions whether to give up.
pub(crate) const SLICE: Duration = Duration::from_millis(250);

/// Asks whether to give up.
pub(crate) type Interrupted<'a> = dyn FnMut() -> bool + Send + 'a;

/// One rank's request to the registrar.
pub(crate) struct Meeting<'a, 'b> {
    client: &'a Client,
    /// This rank in the launched world.
    own: Rank,
    /// The ranks that it forms a world with, if not all.
    part: Option<&'a [Rank]>,
    failure: Mutex<Option<Error>>,
    interrupted: Mutex<&'a mut Interrupted<'b>>,
}

impl<'a, 'b> Meeting<'a, 'b> {
    pub(crate) fn new(
        client: &'a Client,
        whole: &World,
        part: Option<&'a [Rank]>,
        interrupted: &'a mut Interrupted<'b>,
    ) -> Self {
        let interrupted = Mutex::new(interrupted);
        Self { client, own: whole.rank, part, failure: Mutex::new(None), interrupted }
    }

    /// Waits until all ranks have asked for this world, and returns their cards in the order of the
    /// ranks.
    ///
    /// # Errors
    /// `Taken`, `Worlds`, `Ended`, `Interrupted`; what the registrar says.
    pub(crate) fn ask(&self, card: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let mut interrupted = self.interrupted.lock();
        match self.client.meet(self.part, &identity(), card, deadline, &mut **interrupted)? {
            Meet::All(cards) => Ok(cards.into_iter().map(Vec::from).collect()),
            Meet::Taken { holder } => Err(Error::Taken { rank: self.own, holder }),
            Meet::Elsewhere { rank, members } => Err(Error::Worlds {
                rank,
                theirs: asked(members.as_deref()),
                own: self.own,
                ours: asked(self.part),
            }),
            Meet::Ended { rank, host } => Err(Error::Ended { rank, host }),
            Meet::Interrupted => Err(Error::Interrupted),
        }
    }

    /// Returns the reason why this rank has not met the others, where it is more than transport's
    /// error says.
    pub(crate) fn failure(self) -> Option<Error> {
        self.failure.into_inner()
    }
}

impl Rendezvous for Meeting<'_, '_> {
    fn meet(
        &self,
        _place: Place,
        card: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        self.ask(card, deadline).map_err(|error| match error {
            Error::Registrar(RegistrarError::Timeout { what, elapsed }) => {
                TransportError::Timeout { what, elapsed }
            }
            Error::Interrupted => TransportError::Interrupted,
            other => {
                let (what, reason) = ("all ranks".to_owned(), other.to_string());
                *self.failure.lock() = Some(other);
                TransportError::Rendezvous { what, reason }
            }
        })
    }
}

fn asked(part: Option<&[Rank]>) -> String {
    let Some(part) = part else { return "all ranks".to_owned() };
    let ranks: Vec<String> = part.iter().map(ToString::to_string).collect();
    format!("ranks {}", ranks.join(", "))
}

/// Tells this process from every other of its host: a number is used again one day, but not at the
/// same tick. A program that replaces itself (`exec`) stays the same process.
pub(crate) fn identity() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Counting starts behind the name, which may hold anything: field 3 is the state, field 22 the
    // start.
    let started = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(19));
    format!("process {} (started at tick {})", process::id(), started.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_stays_the_same() {
        assert_eq!(identity(), identity());
        assert!(identity().starts_with(&format!("process {} (started at tick ", process::id())));
    }
}

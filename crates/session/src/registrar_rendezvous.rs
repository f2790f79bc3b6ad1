// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ranks' rendezvous at the registrar: each rank asks once for a world, and gets the addresses
//! of all ranks.

use std::fs;
use std::process;
use std::time::{Duration, Instant};

use farandole_registrar::{Error as RegistrarError, FormationOutcome, TaskClient};
use farandole_transport::{Error as TransportError, Rendezvous, RendezvousParticipant};
use farandole_world::{Rank, World};
use parking_lot::Mutex;

use crate::{Error, Result};

/// Longest time between two calls of `interrupted`.
pub(crate) const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Returns whether to give up.
pub(crate) type InterruptCheck<'a> = dyn FnMut() -> bool + Send + 'a;

/// # Errors
/// `Interrupted` when the caller gives up.
pub(crate) fn check_interrupted(interrupted: &mut InterruptCheck<'_>) -> Result<()> {
    if interrupted() { Err(Error::Interrupted) } else { Ok(()) }
}

/// One rank's request to the registrar.
pub(crate) struct RegistrarRendezvous<'a, 'b> {
    client: &'a TaskClient,
    /// The rank of this process in the launched world.
    own: Rank,
    /// The ranks that form the world, if not all do.
    part: Option<&'a [Rank]>,
    failure: Mutex<Option<Error>>,
    interrupted: Mutex<&'a mut InterruptCheck<'b>>,
}

impl<'a, 'b> RegistrarRendezvous<'a, 'b> {
    pub(crate) fn new(
        client: &'a TaskClient,
        whole: &World,
        part: Option<&'a [Rank]>,
        interrupted: &'a mut InterruptCheck<'b>,
    ) -> Self {
        let interrupted = Mutex::new(interrupted);
        Self { client, own: whole.rank, part, failure: Mutex::new(None), interrupted }
    }

    /// Waits until all ranks have asked for this world, and returns their addresses in the order of
    /// the ranks.
    ///
    /// # Errors
    /// `RankTaken`, `DifferentWorlds`, `RankEnded`, `Interrupted`; the errors of the registrar.
    pub(crate) fn form_world(&self, addresses: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let mut interrupted = self.interrupted.lock();
        match self.client.form_world(
            self.part,
            &process_identity(),
            addresses,
            deadline,
            &mut **interrupted,
        )? {
            FormationOutcome::Formed(all_addresses) => {
                Ok(all_addresses.into_iter().map(Vec::from).collect())
            }
            FormationOutcome::RankTaken { holder } => {
                Err(Error::RankTaken { rank: self.own, holder })
            }
            FormationOutcome::MembersDiffer { rank, members } => Err(Error::DifferentWorlds {
                rank,
                theirs: describe_ranks(members.as_deref()),
                own: self.own,
                ours: describe_ranks(self.part),
            }),
            FormationOutcome::WorkerEnded { rank, host } => Err(Error::RankEnded { rank, host }),
            FormationOutcome::Interrupted => Err(Error::Interrupted),
        }
    }

    /// Returns why the world did not form, if this is more precise than the transport's error.
    pub(crate) fn into_formation_failure(self) -> Option<Error> {
        self.failure.into_inner()
    }
}

impl Rendezvous for RegistrarRendezvous<'_, '_> {
    fn exchange_addresses(
        &self,
        _point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        self.form_world(addresses, deadline).map_err(|error| match error {
            Error::Registrar(RegistrarError::Timeout { what, elapsed }) => {
                TransportError::Timeout { what, elapsed }
            }
            Error::Interrupted => TransportError::Interrupted,
            other => {
                let (what, reason) = ("all ranks".to_owned(), other.to_string());
                // The transport's error has only text; Python chooses the exception by the original
                // one.
                *self.failure.lock() = Some(other);
                TransportError::Rendezvous { what, reason }
            }
        })
    }
}

fn describe_ranks(part: Option<&[Rank]>) -> String {
    let Some(part) = part else { return "all ranks".to_owned() };
    let ranks: Vec<String> = part.iter().map(ToString::to_string).collect();
    format!("ranks {}", ranks.join(", "))
}

/// Returns a text that identifies this process on its host. It includes the start, because the
/// system reuses numbers, but not at the same tick. A program that replaces itself (`exec`) stays
/// the same process.
pub(crate) fn process_identity() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may hold any characters, so fields are counted after it: field 3 is
    // the state, 22 the start.
    let started = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(19));
    format!("process {} (started at tick {})", process::id(), started.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_stays_the_same() {
        assert_eq!(process_identity(), process_identity());
        assert!(
            process_identity().starts_with(&format!("process {} (started at tick ", process::id()))
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! State of the process at the other end, shared by all links to it and by its liveness watch.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use farandole_shm::ProcessDoorbell;
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::Error;
use crate::addresses::AddressPair;

/// A peer, with the reason of its loss if it was lost.
#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) rank: Rank,
    /// Set once the addresses of the peer are known.
    pub(crate) host: OnceLock<String>,
    /// Address at which the peer answered last.
    pub(crate) last_address: Mutex<Option<SocketAddr>>,
    /// Pairs of addresses over which no connection could be made.
    pub(crate) failed_pairs: Mutex<Vec<AddressPair>>,
    /// Held while a segment is exchanged with the peer, or a heartbeat connection is dialled.
    pub(crate) handover: Mutex<()>,
    bell: OnceLock<Arc<ProcessDoorbell>>,
    lost: OnceLock<String>,
}

impl PeerState {
    pub(crate) fn new(rank: Rank) -> Self {
        Self {
            rank,
            host: OnceLock::new(),
            last_address: Mutex::default(),
            failed_pairs: Mutex::default(),
            handover: Mutex::new(()),
            bell: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    /// Returns the doorbell of the peer, and whether it is new. The first one that was received
    /// serves all links.
    pub(crate) fn adopt_doorbell(
        &self,
        memory: OwnedFd,
        event: OwnedFd,
    ) -> Result<(Arc<ProcessDoorbell>, bool), farandole_shm::Error> {
        // A second mapping of the same page would only cost memory and descriptors.
        if let Some(bell) = self.bell.get() {
            return Ok((Arc::clone(bell), false));
        }
        let new = Arc::new(ProcessDoorbell::from_descriptors(memory, event)?);
        // Two threads may adopt at the same time; `get_or_init` lets only one doorbell win.
        let bell = Arc::clone(self.bell.get_or_init(|| Arc::clone(&new)));
        let first = Arc::ptr_eq(&bell, &new);
        Ok((bell, first))
    }

    /// Records the reason of a loss, and returns true if it is the first. Later reasons are
    /// dropped, because they are consequences of the loss.
    pub(crate) fn mark_lost(&self, reason: String) -> bool {
        self.lost.set(reason).is_ok()
    }

    pub(crate) fn loss_error(&self) -> Option<Error> {
        self.lost.get().map(|reason| self.peer_lost_error(reason.clone()))
    }

    /// Returns the error with the recorded reason, or else with `reason`.
    pub(crate) fn loss_error_or(&self, reason: &str) -> Error {
        self.loss_error().unwrap_or_else(|| self.peer_lost_error(reason.to_owned()))
    }

    /// Converts an error of shared memory into an error of a link.
    pub(crate) fn convert_shm_error(&self, error: farandole_shm::Error) -> Error {
        match error {
            // Only the peer writes there, so a corrupt ring means that the peer cannot be trusted.
            farandole_shm::Error::Corrupt { .. } => self.loss_error_or(&error.to_string()),
            other => Error::from(other),
        }
    }

    fn peer_lost_error(&self, reason: String) -> Error {
        let host = self.host.get().map_or("an unknown host", String::as_str).to_owned();
        Error::PeerLost { rank: self.rank, host, reason }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What is known of the process at the other end; shared by all links to it and by the liveness watch.

use std::sync::OnceLock;

use farandole_world::Rank;

use crate::Error;

/// A peer, and how it was lost if it was.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: Rank,
    pub(crate) host: String,
    lost: OnceLock<String>,
}

impl Peer {
    pub(crate) fn new(rank: Rank, host: String) -> Self {
        Self { rank, host, lost: OnceLock::new() }
    }

    /// Remembers the first reason only: what follows a death is its consequence. True when it is the first.
    pub(crate) fn lose(&self, reason: String) -> bool {
        self.lost.set(reason).is_ok()
    }

    pub(crate) fn lost(&self) -> Option<Error> {
        self.lost.get().map(|reason| self.error(reason.clone()))
    }

    /// The first reason, or this one.
    pub(crate) fn gone(&self, reason: &str) -> Error {
        self.lost().unwrap_or_else(|| self.error(reason.to_owned()))
    }

    /// A refusal of shared memory, as a link's error.
    pub(crate) fn fault(&self, error: farandole_shm::Error) -> Error {
        match error {
            farandole_shm::Error::Forked => Error::Forked,
            farandole_shm::Error::Corrupt { .. } => self.gone(&error.to_string()),
            other => Error::System { what: "link", reason: other.to_string() },
        }
    }

    fn error(&self, reason: String) -> Error {
        Error::PeerLost { rank: self.rank, host: self.host.clone(), reason }
    }
}

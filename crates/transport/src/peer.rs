// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state of the process at the other end; shared by all links to it and by the liveness watch.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use farandole_shm::Bell;
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::Error;
use crate::spread::Pair;

/// A peer, and how it was lost if it was.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: Rank,
    /// Known as soon as its card is.
    pub(crate) host: OnceLock<String>,
    /// The address at which it answered last.
    pub(crate) reached: Mutex<Option<SocketAddr>>,
    /// Pairs of addresses over which no connection came about.
    pub(crate) dead: Mutex<Vec<Pair>>,
    /// Held while memory is handed over to it, or a control connection is dialled.
    pub(crate) handover: Mutex<()>,
    bell: OnceLock<Arc<Bell>>,
    lost: OnceLock<String>,
}

impl Peer {
    pub(crate) fn new(rank: Rank) -> Self {
        Self {
            rank,
            host: OnceLock::new(),
            reached: Mutex::default(),
            dead: Mutex::default(),
            handover: Mutex::new(()),
            bell: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    /// Its doorbell; the one handed over first serves all links. True when it is new.
    pub(crate) fn adopt(
        &self,
        memory: OwnedFd,
        event: OwnedFd,
    ) -> Result<(Arc<Bell>, bool), farandole_shm::Error> {
        if let Some(bell) = self.bell.get() {
            return Ok((Arc::clone(bell), false));
        }
        let new = Arc::new(Bell::adopt(memory, event)?);
        let bell = Arc::clone(self.bell.get_or_init(|| Arc::clone(&new)));
        let first = Arc::ptr_eq(&bell, &new);
        Ok((bell, first))
    }

    /// Remembers the first reason only: what follows a death is its consequence. True when it is
    /// the first.
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
            farandole_shm::Error::Corrupt { .. } => self.gone(&error.to_string()),
            other => Error::from(other),
        }
    }

    fn error(&self, reason: String) -> Error {
        let host = self.host.get().map_or("an unknown host", String::as_str).to_owned();
        Error::PeerLost { rank: self.rank, host, reason }
    }
}

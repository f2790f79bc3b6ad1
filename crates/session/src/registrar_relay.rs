// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links to ranks of other hosts through the registrar, for hosts that cannot accept connections.

use std::net::SocketAddr;

use farandole_registrar::{Error as RegistrarError, RelayedLinks, TaskClient};
use farandole_transport::{Error, LinkRelay, Result};
use farandole_world::{Rank, TaskId, World};

/// The relay of one world.
pub(crate) struct RegistrarRelay {
    relay: RelayedLinks,
    /// Task of each rank.
    tasks: Vec<TaskId>,
    relay_world: u64,
}

impl RegistrarRelay {
    /// Opens the relay for a world of this process.
    ///
    /// # Errors
    /// The registrar's `Unreachable`.
    pub(crate) fn new(client: &TaskClient, world: &World) -> Result<Self, RegistrarError> {
        let tasks = world.seats.iter().map(|seat| seat.task).collect();
        // 0 means no world.
        // Random: a process may form several worlds, and its peers must not reach an earlier one.
        let relay_world = rand::random_range(1..=u64::MAX);
        Ok(Self { relay: client.open_relay(relay_world)?, tasks, relay_world })
    }
}

impl LinkRelay for RegistrarRelay {
    fn forward_to_port(&self, port: u16) -> Result<()> {
        self.relay.accept_relay_calls(port).map_err(|error| relay_error(&error))
    }

    fn relay_world_number(&self) -> u64 {
        self.relay_world
    }

    fn relayed_address(&self, rank: Rank, relay_world: u64) -> Result<SocketAddr> {
        let unknown = || Error::Handshake { reason: format!("no rank {rank} to relay to") };
        let task = self.tasks.get(rank.index()).copied().ok_or_else(unknown)?;
        self.relay.open_listener_to_task(task, relay_world).map_err(|error| relay_error(&error))
    }
}

fn relay_error(error: &RegistrarError) -> Error {
    Error::Rendezvous { what: "the relay".to_owned(), reason: error.to_string() }
}

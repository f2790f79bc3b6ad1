// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links to ranks of other hosts through the registrar, if hosts open connections but accept none.

use std::net::SocketAddr;

use farandole_registrar::{Client, Error as RegistrarError, Relay};
use farandole_transport::{Error, Gateway, Result};
use farandole_world::{Rank, TaskId, World};

/// The relay of one world.
pub(crate) struct ByRegistrar {
    relay: Relay,
    /// By rank.
    tasks: Vec<TaskId>,
    door: u64,
}

impl ByRegistrar {
    /// For a world of this process.
    ///
    /// # Errors
    /// The registrar's `Unreachable`.
    pub(crate) fn new(client: &Client, world: &World) -> Result<Self, RegistrarError> {
        let tasks = world.seats.iter().map(|seat| seat.task).collect();
        // 0 stands for none.
        let door = rand::random_range(1..=u64::MAX);
        Ok(Self { relay: client.relay(door)?, tasks, door })
    }
}

impl Gateway for ByRegistrar {
    fn open(&self, port: u16) -> Result<()> {
        self.relay.answer(port).map_err(|error| failed(&error))
    }

    fn door(&self) -> u64 {
        self.door
    }

    fn to(&self, rank: Rank, door: u64) -> Result<SocketAddr> {
        let unknown = || Error::Handshake { reason: format!("no rank {rank} to relay to") };
        let task = self.tasks.get(rank.index()).copied().ok_or_else(unknown)?;
        self.relay.door(task, door).map_err(|error| failed(&error))
    }
}

fn failed(error: &RegistrarError) -> Error {
    Error::Rendezvous { what: "the relay".to_owned(), reason: error.to_string() }
}

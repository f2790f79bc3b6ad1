// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A relay to ranks that cannot be dialled.

use std::net::SocketAddr;

use farandole_world::Rank;

use crate::Result;

/// Relays connections between ranks of different hosts that cannot be dialled: bytes sent to a
/// loopback address of one host come out on the loopback of another. `session` has one that uses
/// the registrar.
pub trait LinkRelay: Send + Sync {
    /// Forwards connections for this rank to `port` of the loopback from now on.
    ///
    /// # Errors
    /// `Rendezvous` when the relay is unavailable.
    fn forward_to_port(&self, port: u16) -> Result<()>;

    /// Returns a number that identifies the current world of this process to callers.
    fn relay_world_number(&self) -> u64;

    /// Returns a loopback address of this host that leads to `rank` in the world with the number
    /// `relay_world`, which is the [`relay_world_number`](Self::relay_world_number) of that rank.
    ///
    /// # Errors
    /// `Rendezvous` when there is no such address.
    fn relayed_address(&self, rank: Rank, relay_world: u64) -> Result<SocketAddr>;
}

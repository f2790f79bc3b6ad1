// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A way to ranks that cannot be dialled.

use std::net::SocketAddr;

use farandole_world::Rank;

use crate::Result;

/// Stands between the ranks of different hosts where none of them can be dialled: what it is given
/// on the loopback of one host it hands out on that of another. `session` has one that goes through
/// the registrar.
pub trait Gateway: Send + Sync {
    /// Hands what comes for this rank to `port` of the loopback, from now on.
    ///
    /// # Errors
    /// `Rendezvous` when there is nothing to go through.
    fn open(&self, port: u16) -> Result<()>;

    /// Returns a number that distinguishes this process's worlds for callers.
    fn door(&self) -> u64;

    /// An address of this host's loopback that leads to `rank`, in its world of this door.
    ///
    /// # Errors
    /// `Rendezvous` when there is none.
    fn to(&self, rank: Rank, door: u64) -> Result<SocketAddr>;
}

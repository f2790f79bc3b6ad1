// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of communication between ranks.

use std::time::Duration;

use farandole_world::Rank;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed link, handshake or rendezvous.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process of a peer ended, its connection closed, or it sent no sign of life for too long.
    #[error("lost rank {rank} on {host}: {reason}")]
    PeerLost {
        /// The peer.
        rank: Rank,
        /// Its host.
        host: String,
        /// The observed reason.
        reason: String,
    },
    /// No process listens or answers at any address that a peer published.
    #[error(
        "cannot reach rank {rank} at any of its addresses {addresses:?} after {elapsed:?}: {reason}"
    )]
    Unreachable {
        /// The peer.
        rank: Rank,
        /// The addresses that the peer published.
        addresses: Vec<String>,
        /// Time spent.
        elapsed: Duration,
        /// The last failure.
        reason: String,
    },
    /// A process without the job's key, or with another protocol, connected.
    #[error("refused a peer during the handshake: {reason}")]
    Handshake {
        /// The reason.
        reason: String,
    },
    /// The exchange of addresses failed.
    #[error("cannot meet the other ranks: {what}: {reason}")]
    Rendezvous {
        /// The operation that failed.
        what: String,
        /// The reason.
        reason: String,
    },
    /// A deadline passed.
    #[error("timed out after {elapsed:?} waiting for {what}")]
    Timeout {
        /// The awaited event.
        what: String,
        /// Time spent.
        elapsed: Duration,
    },
    /// The caller of [`Mesh::open_links_until`](crate::Mesh::open_links_until) asked to give up.
    #[error("gave up waiting for the other ranks to open their links, as the caller asked")]
    Interrupted,
    /// A frame does not decode, or is longer than allowed.
    #[error("bad frame from rank {rank}: {reason}")]
    Frame {
        /// The sender.
        rank: Rank,
        /// The reason.
        reason: String,
    },
    /// The process forked after it joined the mesh; the child cannot use the mesh.
    #[error(
        "the mesh of the parent process was used in a forked child: use spawn or forkserver, or \
         initialise after the fork"
    )]
    Forked,
    /// A call of the operating system failed.
    #[error("{what} failed: {reason}")]
    System {
        /// The call.
        what: &'static str,
        /// The error of the call.
        reason: String,
    },
}

impl From<farandole_shm::Error> for Error {
    fn from(error: farandole_shm::Error) -> Self {
        match error {
            farandole_shm::Error::Forked => Self::Forked,
            other => Self::System { what: "shared memory", reason: other.to_string() },
        }
    }
}

impl Error {
    /// Creates a function for `map_err` that adds the name of the failed call.
    pub(crate) fn failed_call_mapper<E: std::fmt::Display>(
        what: &'static str,
    ) -> impl Fn(E) -> Self {
        move |error| Self::System { what, reason: error.to_string() }
    }
}

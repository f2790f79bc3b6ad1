// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.
//!
//! Owns how bytes get from one rank to another and how the loss of a rank is noticed. Refuses to know what the bytes
//! mean, who assigns ranks, and what to do about a loss. Nothing from a socket is ever interpreted before its sender
//! proved that it holds the job's key, and then only as fixed-size messages. What follows on TCP is sealed in records, so
//! that whoever relays a handshake has nothing of the link (`docs/developer-guide/network-security.md`).
//!
//! ```text
//! Rendezvous (somebody's exchange of cards) <- card: host, addresses, name of the Unix socket
//!      |
//!    Mesh::join -> service thread: accepts and proves peers, heartbeats, pidfds
//!      |
//!    Mesh::open(channel, peers) -> Link per peer -> sender: window, commit, flush     frames: messages on a link
//!                                                -> receiver: window, release
//!    Parker: one epoll for the doorbell, TCP sockets and losses; prepare, poll, park
//! ```
//!
//! Ranks of one host hand each other a segment over a Unix socket: that both could map it is the proof that they share
//! memory, whatever their host names say. Everybody else uses TCP. A sleeping rank is woken through an eventfd and not
//! through a futex, so that one wait covers memory, sockets and peers.
//!
//! Invariants:
//! - `TR-1`: what is committed arrives once and in order, or the link fails with the name of the peer.
//! - `TR-2`: whoever does not hold the key is told nothing and gets no link; strangers cannot hold up a peer.
//! - `TR-3`: a thread that prepared, polled and parked is woken by every later commit, release and loss.
//! - `TR-4`: a peer that dies or stops is lost within the peer timeout; one that is only busy is not.
//! - `TR-5`: an orderly close loses nothing that was flushed.
//! - `TR-6`: in a forked child everything fails, and nothing it drops is felt by the parent or its peers.
//! - `TR-7`: no byte of a TCP connection is used that the peer did not seal for that place in it; a record that does not open
//!   ends the link with an error that names the connection.

#![deny(unsafe_code)]

mod addresses;
mod beat;
mod budget;
mod card;
#[cfg(feature = "_test-harness")]
pub mod contract;
mod dial;
mod error;
mod frames;
mod gateway;
mod handshake;
mod incoming;
mod link;
pub mod loopback;
mod mesh;
mod parker;
mod peer;
mod race;
mod record;
mod rendezvous;
mod ring;
mod service;
mod shared;
mod sync;
mod tcp;
mod watch;

pub use error::{Error, Result};
pub use frames::{Frame, FrameReceiver, FrameSender, MAX_FRAME, MAX_QUEUED, frames};
pub use gateway::Gateway;
pub use link::{ALIGNMENT, Link, LinkKind, LinkReceiver, LinkSender};
pub use mesh::{Mesh, MeshOptions};
pub use parker::{Parker, Unparker, Wake};
pub use rendezvous::{MemoryRendezvous, Place, Rendezvous};
pub use watch::hearsay;

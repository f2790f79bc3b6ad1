// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.
//!
//! Owns the transport of bytes between ranks and the detection of lost ranks. It does not know what
//! the bytes mean, who assigns ranks, or how to react to a loss. Data from a socket is interpreted
//! only after its sender has proved that it has the job's key, and then only as fixed-size
//! messages. Later data on TCP is sealed in records, so a relay of the handshake can neither read
//! nor change it (`docs/developer-guide/network-security.md`).
//!
//! ```text
//! Rendezvous (an exchange of cards)         <- card: host, addresses, name of the Unix socket
//!      |
//!    Mesh::join -> service thread: accepts and proves peers, heartbeats, pidfds
//!      |
//!    Mesh::open(channel, peers) -> Link per peer -> sender: window, commit, flush     frames: messages on a link
//!                                                -> receiver: window, release
//!    Parker: one epoll for the doorbell, TCP sockets and losses; prepare, poll, park
//! ```
//!
//! Ranks of one host pass each other a segment over a Unix socket. If both can map it, they share
//! memory, whatever their host names say. All other ranks use TCP. A sleeping rank is woken through
//! an eventfd and not through a futex, so that one wait covers memory, sockets and peers.
//!
//! Invariants:
//! - `TR-1`: committed bytes arrive once and in order, or the link fails with an error that names
//!   the peer.
//! - `TR-2`: a process without the key gets no information and no link; strangers cannot delay a
//!   peer.
//! - `TR-3`: a thread that prepared, polled and parked is woken by every later commit, release and
//!   loss.
//! - `TR-4`: a peer that dies or stops is lost within the peer timeout; a busy peer is not. A rank
//!   that does not watch the peer itself hears of it from ranks that do, within the same time.
//! - `TR-5`: an orderly close loses nothing that was flushed.
//! - `TR-6`: in a forked child everything fails, and its drops affect neither the parent nor the
//!   peers.
//! - `TR-7`: no byte of a TCP connection is used that the peer did not seal for that place in it; a
//!   record that does not open ends the link with an error that names the connection.

#![deny(unsafe_code)]

mod addresses;
mod beat;
mod budget;
mod card;
mod circle;
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
mod spread;
mod sync;
mod tcp;
mod watch;

pub use addresses::Interface;
pub use circle::heartbeats;
pub use error::{Error, Result};
pub use frames::{Frame, FrameReceiver, FrameSender, MAX_FRAME, MAX_QUEUED, frames};
pub use gateway::Gateway;
pub use link::{ALIGNMENT, Link, LinkKind, LinkReceiver, LinkSender};
pub use mesh::{Mesh, MeshOptions, dials_at_once};
pub use parker::{Parker, Unparker, Wake};
pub use record::PACKET;
pub use rendezvous::{MemoryRendezvous, Place, Rendezvous};
pub use watch::hearsay;

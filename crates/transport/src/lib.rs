// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.
//!
//! Owns the transport of bytes between ranks and the detection of lost ranks. It does not know the
//! meaning of the bytes, the source of rank numbers, or the reaction to a loss. Data from a socket
//! is interpreted only after its sender has proved that it has the job's key, and then only as
//! fixed-size messages. Later data on TCP is sealed in records, so a relay of the handshake can
//! neither read nor change it (`docs/developer-guide/network-security.md`).
//!
//! ```text
//! Rendezvous (exchanges the addresses of all ranks: host, TCP addresses, Unix socket)
//!      |
//!    Mesh::join -> service thread: authenticates incoming peers, heartbeats, pidfds
//!      |
//!    Mesh::open_links(channel, peers) -> Link per peer -> sender: window, commit, flush
//!                                                      -> receiver: window, release
//!                                                         LinkFrame: messages on a link
//!    Parker: one epoll for the doorbell, TCP sockets and losses; prepare_park, poll, park
//! ```
//!
//! Ranks of one host exchange a segment over a Unix socket. If both can map it, they share memory.
//! All other ranks use TCP. A sleeping rank is woken through an eventfd and not through a futex, so
//! that one wait covers memory, sockets and peers.
//!
//! Invariants:
//! - `TR-1`: committed bytes arrive once and in order, or the link fails with an error that names
//!   the peer.
//! - `TR-2`: a process without the key gets no information and no link, and cannot delay a peer.
//! - `TR-3`: a thread that prepared, polled and parked is woken by every later commit, release and
//!   loss.
//! - `TR-4`: a peer that dies or stops is lost within the peer timeout; a busy peer is not. A rank
//!   that does not watch the peer itself receives a report from ranks that do, within the same
//!   time.
//! - `TR-5`: an orderly close loses no flushed bytes.
//! - `TR-6`: in a forked child every operation fails, and drops affect neither the parent nor the
//!   peers.
//! - `TR-7`: a byte of a TCP connection is used only if the peer sealed it for exactly this
//!   position; a record that cannot be opened ends the link with an error that names the
//!   connection.

#![deny(unsafe_code)]

mod acceptor_handshake;
mod addresses;
mod connection_arrivals;
mod dial;
mod dial_failure;
mod error;
mod frames;
mod handshake;
mod happy_eyeballs;
mod heartbeat_channel;
mod heartbeat_topology;
mod link;
#[cfg(feature = "_test-harness")]
pub mod link_contract;
mod link_traffic;
pub mod loopback;
mod mesh;
mod mesh_state;
mod multi_nic;
mod parker;
mod peer_addresses;
mod peer_state;
mod peer_watch;
mod record;
mod relay;
mod rendezvous;
mod ring_byte_budget;
mod ring_link;
mod secured_connection;
mod service;
mod service_inbox;
mod sync;
mod tcp;

pub use addresses::NumberedInterfaceAddress;
pub use error::{Error, Result};
pub use frames::{
    FrameReceiver, FrameSender, LinkFrame, MAX_FRAME_BYTES, MAX_QUEUED_BYTES, into_frame_halves,
};
pub use heartbeat_topology::heartbeat_peers;
pub use link::{Link, LinkKind, LinkReceiver, LinkSender, MESSAGE_ALIGNMENT};
pub use link_traffic::sent_link_bytes;
pub use mesh::{Mesh, MeshOptions, max_concurrent_dials};
pub use parker::{Parker, Unparker, WakeReason};
pub use peer_watch::loss_report_allowance;
pub use record::PACKET_PAYLOAD_BYTES;
pub use relay::LinkRelay;
pub use rendezvous::{MemoryRendezvous, Rendezvous, RendezvousParticipant};

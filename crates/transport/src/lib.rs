// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.

#![forbid(unsafe_code)]

mod addresses;
mod card;
#[cfg(feature = "_test-harness")]
pub mod contract;
mod dial;
mod error;
mod frames;
mod handshake;
mod incoming;
mod link;
pub mod loopback;
mod mesh;
mod parker;
mod peer;
mod rendezvous;
mod ring;
mod service;
mod shared;
mod tcp;
mod watch;

pub use error::{Error, Result};
pub use frames::{Frame, FrameReceiver, FrameSender, MAX_FRAME, MAX_QUEUED, frames};
pub use link::{ALIGNMENT, Link, LinkKind, LinkReceiver, LinkSender};
pub use mesh::{Mesh, MeshOptions};
pub use parker::{Parker, Unparker, Wake};
pub use rendezvous::{MemoryRendezvous, Rendezvous};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.

#![forbid(unsafe_code)]

mod error;
mod frames;
mod link;
pub mod loopback;
mod parker;
mod peer;
mod rendezvous;
mod ring;

pub use error::{Error, Result};
pub use frames::{Frame, FrameReceiver, FrameSender, MAX_FRAME, MAX_QUEUED, frames};
pub use link::{ALIGNMENT, Link, LinkKind, LinkReceiver, LinkSender};
pub use parker::{Parker, Unparker, Wake};
pub use rendezvous::{MemoryRendezvous, Rendezvous};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between ranks over shared memory, TCP and loopback; rendezvous, frames, liveness.

mod error;
mod link;
mod rendezvous;

pub use error::{Error, Result};
pub use link::{ALIGNMENT, Link, LinkKind, LinkReceiver, LinkSender};
pub use rendezvous::Rendezvous;

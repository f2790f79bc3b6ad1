// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The registrar of a job: registration, assignment of ranks, key-value pairs, logs, metrics,
//! results.
//!
//! Owns the gRPC protocol (`proto/`), the decision which tasks are in the job (`membership`, pure),
//! the server in the driver, and the client in the tasks. It starts no processes (`launcher` does)
//! and links no ranks (`transport` does). It does not interpret the values that pass through, and
//! unpickles nothing from a socket.
//!
//! ```text
//! driver                              task
//! Registrar --- TLS, one certificate per job --- Client (agent): register, watch, log, exit
//!   | membership  meetings  key-values  events    \------- Client (worker): await_assignment, meet, metric
//!   v
//! events()
//! ```
//!
//! Every call carries the token of the [`Ticket`]; the client accepts only the certificate that the
//! ticket names. `farandole_world::assign` assigns the ranks. If another launcher has assigned
//! them, they are the numbers of the tasks ([`Registrar::start_in_order`]). Both ends compute them
//! from the same registrations.
//!
//! Invariants: `MB-1` to `MB-5` of `membership`, and
//! - `RG-1`: a call without the job's token gets no information and changes nothing.
//! - `RG-2`: the resources that any caller can take are bounded: connections, calls per second,
//!   message size, key-value pairs, results, and records (the oldest are dropped and counted).
//! - `RG-3`: a generation that is over can neither write nor read key-values; its waiting calls end
//!   at once.
//! - `RG-5`: in an elastic job with a journal, every answer stays valid after the registrar has
//!   started again.
//! - `RG-4`: a client or a registrar that is used in a fork of its process returns an error instead
//!   of hanging.

#![forbid(unsafe_code)]

mod accepting;
pub mod client;
mod codec;
mod convert;
mod error;
mod event;
mod exit;
#[rustfmt::skip]
mod generated;
pub mod host;
mod journal;
mod kv;
mod meetings;
mod membership;
pub mod outline;
mod secret;
mod server;
mod ticket;
mod tls;
mod wire;

pub use client::{Cancel, Client, HostChange, Meet, Relay};
pub use error::{Error, Result};
pub use event::Event;
pub use exit::{Exit, How, Verdict, signal_name};
pub use journal::Journal;
pub use secret::Secret;
pub use server::{Elastic, Options, Registrar, Resumed};
pub use ticket::Ticket;
pub use wire::{MAX_RESULT, PROTOCOL_VERSION};

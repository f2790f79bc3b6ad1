// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The job's meeting point: registration, assignment, key-value, logs, metrics, results.
//!
//! Owns the gRPC protocol (`proto/`), the decision of who is in the job (`membership`, pure), the server that the
//! driver runs and the client that tasks use. Refuses to start processes (`launcher`) and to link ranks
//! (`transport`); values that pass through are bytes to it, and nothing from a socket is unpickled.
//!
//! ```text
//! driver                              task
//! Registrar --- TLS, one certificate per job --- Client (agent): register, watch, log, exit
//!   | membership  meetings  key-values  events    \------- Client (worker): await_assignment, meet, metric
//!   v
//! events()
//! ```
//!
//! Every call proves the token of the [`Ticket`]; the client accepts only the certificate that the ticket names.
//! Ranks go by `farandole_world::assign`, or are the tasks' numbers where somebody else gave them out
//! ([`Registrar::start_in_order`]); both ends compute them from the same registrations.
//!
//! Invariants: `MB-1` to `MB-5` of `membership`, and
//! - `RG-1`: a call without the job's token learns and changes nothing.
//! - `RG-2`: what a task, or anybody else, can make the registrar hold is bounded: connections, calls a second,
//!   message size, key-values, results, and records (oldest dropped and counted).
//! - `RG-3`: a generation that is over can neither write nor read key-values; its waiting calls end at once.
//! - `RG-5`: what a task has heard of an elastic job with a journal holds after the registrar has started again.
//! - `RG-4`: a client or a registrar used in a fork of its process says so instead of hanging.

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

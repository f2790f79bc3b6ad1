// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The registrar of a job: registration, assignment of ranks, key-value pairs, logs, metrics,
//! results.
//!
//! This crate owns the gRPC protocol (`proto/`), the server in the driver, and the client in the
//! tasks. It carries out which tasks are in the job, and does not decide it (`membership` does). It
//! starts no processes (`launcher` does) and links no ranks (`transport` does). It does not
//! interpret the values that pass through, and unpickles nothing from a socket.
//!
//! ```text
//! driver                                      task
//! Registrar --- TLS, one certificate per job --- TaskClient (agent): register, beat, log, exit
//!   | membership  formation                  \-- TaskClient (worker): assignment, world, metric
//!   | key-values  events
//!   v
//! drain_events()
//! ```
//!
//! Every call carries the token of the [`Ticket`]. The client accepts only the certificate whose
//! digest is in the ticket. `farandole_world::assign_ranks` assigns the ranks; if another launcher
//! has assigned them, the task numbers are the ranks ([`Registrar::start_with_ranked_tasks`]). Both
//! ends compute the ranks from the same registrations.
//!
//! The exits of workers are types of `membership`. They are part of calls and events, so this crate
//! exports them.
//!
//! Invariants; `membership` has more:
//! - `RG-1`: a call without the job's token gets no information and changes nothing.
//! - `RG-2`: the resources that any caller can take are bounded: connections, calls per second,
//!   message size, key-value pairs, results, and records (the oldest are dropped and counted).
//! - `RG-3`: a generation that is over can neither write nor read key-value pairs; its waiting
//!   calls end at once.
//! - `RG-5`: in an elastic job with a journal, every answer stays valid after the registrar has
//!   restarted.
//! - `RG-4`: a client or a registrar that is used in a fork of its process returns an error instead
//!   of hanging.

#![forbid(unsafe_code)]

mod accept_retry;
pub mod client;
mod codec;
mod error;
mod event;
mod wire_conversions;
#[rustfmt::skip]
mod generated;
mod formation;
pub mod formation_model;
mod generation_key_values;
mod journal;
pub mod local_host_facts;
mod secret;
mod server;
mod ticket;
mod tls;
mod wire;

pub use client::{
    CancellationToken, FormationOutcome, HostChange, RegistrarOrder, RelayedLinks, TaskClient,
};
pub use error::{Error, Result};
pub use event::JobEvent;
pub use farandole_membership::{ExitKind, ExitReport, GenerationVerdict, signal_name};
pub use journal::MembershipJournal;
pub use secret::JobSecret;
pub use server::{ElasticOptions, Registrar, RegistrarOptions, ResumedJob};
pub use ticket::Ticket;
pub use wire::{MAX_RESULT_BYTES, PROTOCOL_VERSION};

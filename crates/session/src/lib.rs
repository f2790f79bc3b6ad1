// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The worker's side: joins registrar, transports and engine behind [`init`].
//!
//! Owns the session of this process, and the order of its start and end:
//!
//! ```text
//! Client::of_process -> await_assignment -> Mesh::join -> links -> HostCommunicator -> Engine -> sets
//!      registrar            World           Meeting    control and data                 all agree
//! started (mpirun, srun, torchrun, ...)
//! ```
//!
//! The place of this process comes from the ticket that our own launcher has set (`FARANDOLE_JOB`),
//! or from the variables of another launcher (`started`), or from the caller, which has its own
//! communicator ([`Told`], [`host`]). A process that was started alone gets a world of one.
//!
//! Each rank makes one call to meet the others (`meeting`). The registrar returns all cards when
//! the last rank has called, or at once an error if some cannot meet.
//!
//! In an elastic job, a worker asks the registrar for each new world (`rejoin`).
//!
//! The registrar or the other launcher decides which process gets which rank. The training loop
//! decides when to form a new world.
//!
//! Invariants:
//! - `SE-1`: at most one session per process; `init` while one runs does nothing.
//! - `SE-2`: when `init` returns, every rank has joined, and every link works that is not opened at
//!   its first use.
//! - `SE-3`: no wait is longer than its deadline, and each gives up within seconds when asked to.
//! - `SE-4`: a forked child can read its rank, but neither uses nor ends its parent's session.
//! - `SE-5`: a rank belongs to one process; process sets have the same numbers and members on all
//!   ranks.
//! - `SE-6`: a process that was started as one of several never forms a world of one: it joins the
//!   others or fails.

#![forbid(unsafe_code)]

mod carried;
mod devices;
mod error;
mod form;
mod gateway;
mod links;
mod meeting;
mod memory;
mod process;
mod rejoin;
mod rest;
mod session;
mod sets;
mod stalls;
mod started;
mod wishes;

pub use error::{Error, Result};
pub use links::{at_start, crossover, ring_bytes};
pub use process::{begin, current, init, is_initialized, shutdown};
pub use rejoin::{host_changes, resign};
pub use session::Session;
pub use stalls::Stacks;
pub use started::{holder, host, leave};
pub use wishes::{Told, Wishes};

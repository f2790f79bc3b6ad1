// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The worker's side: joins registrar, transports and engine behind [`init`].
//!
//! Owns the one session of this process and the order in which it comes up and goes down:
//!
//! ```text
//! Client::of_process -> await_assignment -> Mesh::join -> links -> HostCommunicator -> Engine -> sets
//!      registrar            World           Meeting    control and data                 all agree
//! started (mpirun, srun, torchrun, ...)
//! ```
//!
//! Where this process belongs is told by the ticket that our own launcher has set (`FARANDOLE_JOB`), or else by the
//! variables of another starter (`started`), or by the caller, who has a communicator of his own ([`Told`], [`host`]). A
//! process that nobody started gets a world of one.
//!
//! Ranks meet by one question each (`meeting`): the registrar hands out all cards when the last has asked, and says at
//! once why some cannot meet.
//!
//! In an elastic job a worker asks the registrar for each world by itself (`rejoin`), as often as worlds break.
//!
//! Refuses policy: who gets which rank is the registrar's or the starter's, when to form a new world the trainer's.
//!
//! Invariants:
//! - `SE-1`: at most one session per process; `init` while one runs does nothing.
//! - `SE-2`: when `init` returns, every rank has joined and every link works.
//! - `SE-3`: no wait is longer than its deadline, and each gives up within seconds when asked to.
//! - `SE-4`: a forked child sees the world but neither uses nor ends its parent's session.
//! - `SE-5`: a rank belongs to one process; process sets have the same numbers and members on all ranks.
//! - `SE-6`: a process that was started as one of several is never alone by accident: it joins them or fails.

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
pub use process::{begin, current, init, is_initialized, shutdown};
pub use rejoin::{host_changes, resign};
pub use session::Session;
pub use stalls::Stacks;
pub use started::{holder, host, leave};
pub use wishes::{Told, Wishes};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Queue, negotiation, fusion and completion: one engine per process.
//!
//! Owns the order of collectives. It knows neither frameworks nor registrars, and not how links and
//! arithmetic work: it gets a world, control links, communicators, devices and a way to sleep.
//!
//! ```text
//!  callers            whoever holds the progress lock                                     peers
//!  submit -> Desk --> ProcessSet: announce --> (tree of hosts) --> coordinator: decide, fuse
//!  wait   <- handles <-  execute <-- communicator <-- list <------------------------------/
//! ```
//!
//! An operation has four steps. Every rank announces the tensor. An announcement goes up the tree
//! when a whole subtree has made it (as a number, if all agreed on the same request before). The
//! coordinator puts tensors that all ranks have announced into a list and fuses them. Every rank
//! executes the lists in order. Tensors that become ready while a list is executed form the next
//! one.
//!
//! All methods of [`Engine`] may be called from any thread. A thread that waits drives the engine.
//! If no thread waits, the background thread drives it. The engine never takes Python's lock, and
//! callbacks run on their own thread, outside of all locks.
//!
//! For bindings: [`Error::Mismatch`] and [`Error::Failed`] come from `wait`, never from `submit`;
//! Horovod raises both as its internal error. All other errors of
//! [`Fault::Usage`](farandole_world::Fault) come from the submitting call.
//!
//! Invariants:
//! - `EN-1`: a handle completes exactly once; after its failure nothing accesses its buffers.
//! - `EN-2`: all ranks of a set execute the same operations in the same order, whatever the order
//!   of submissions.
//! - `EN-3`: members of a group are in one list, or all fail; if ranks group a tensor differently,
//!   all stop with an error.
//! - `EN-4`: after the same list the caches of all ranks are equal.
//! - `EN-5`: no wake-up is lost: submitted and received data is processed without waiting for a
//!   timer.
//! - `EN-6`: the first failure stops the engine; every later call returns the reason, with rank and
//!   host.
//! - `EN-7`: if nothing is pending, no thread runs, except for a heartbeat four times a second.

#![forbid(unsafe_code)]

mod background;
mod cache;
mod callbacks;
mod check;
mod desk;
mod devices;
mod engine;
mod error;
mod hash;
mod options;
pub mod outline;
mod progress;
mod registry;
mod request;
mod set;
mod signature;
mod stall;
mod sync;
mod tally;
mod timeline;
mod tree;
mod tune;
mod wire;

/// The control plane of large worlds, simulated.
#[cfg(any(test, feature = "_test-harness"))]
pub mod simulation {
    pub use crate::set::simulation::{ControlPlane, Traffic};
}

pub use callbacks::Callback;
pub use engine::{Engine, Statistics};
pub use error::{Cause, Error, Result};
pub use options::{EngineOptions, ProgressHost, SetOptions, Settings};
pub use request::{Change, Completion, Handle, Kind, Request};
pub use stall::{Absentee, Answer, Observer, Silent, Stack, Stall, StallReport, Wait};
pub use timeline::RANK_PLACEHOLDER;
pub use tree::control_peers;
pub use tune::Tune;

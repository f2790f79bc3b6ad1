// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Queue, negotiation, fusion and completion: one engine per process.
//!
//! Owns the order in which collectives happen. Refuses to know frameworks, registrars and what carries a link or does
//! the arithmetic: it is handed a world, control links, communicators, devices and a way to sleep.
//!
//! ```text
//!  callers            whoever holds the progress lock                                     peers
//!  submit -> Desk --> ProcessSet: announce --> (tree of hosts) --> coordinator: decide, fuse
//!  wait   <- handles <-  execute <-- communicator <-- list <------------------------------/
//! ```
//!
//! An operation: every rank announces the tensor; an announcement goes up the tree when a whole subtree has made it
//! (by number, if all agreed on the same request before); the coordinator puts tensors that everybody wants into a
//! list, fused; every rank executes lists in order. What becomes ready while a list is executed makes the next one.
//!
//! All of [`Engine`] may be called from any thread. Whoever waits, drives; the background thread drives when nobody
//! waits. Nothing here takes Python's lock, and callbacks run on a thread of their own, outside of all locks.
//!
//! For bindings: [`Error::Mismatch`] and [`Error::Failed`] come from `wait`, never from `submit`; Horovod raises both
//! as its internal error. Everything else of [`Fault::Usage`](farandole_world::Fault) is the submitting call's.
//!
//! Invariants:
//! - `EN-1`: a handle completes exactly once; after its failure nobody touches its buffers.
//! - `EN-2`: all ranks of a set execute the same operations in the same order, whatever the order of submissions.
//! - `EN-3`: members of a group are in one list, or all fail; ranks that group a tensor differently all stop and say so.
//! - `EN-4`: after the same list the caches of all ranks are equal.
//! - `EN-5`: no wake-up is lost: what is submitted or arrives is looked at without waiting for a timer.
//! - `EN-6`: the first failure stops the engine; every later call says why, naming rank and host.
//! - `EN-7`: with nothing pending no thread runs, but for a heartbeat four times a second.

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

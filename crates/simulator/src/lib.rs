// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Computes times on a cluster that does not exist: to form a world, for an allreduce, for a
//! training step.
//!
//! Owns a model of hosts and their network. What goes over it is decided by the code that runs in a
//! job: the schedules of `collectives`, the tree and the fusion of `engine`, the membership of
//! `registrar`, the ring sizes of `session`. It opens no socket and reads no clock: the same
//! question has the same answer.
//!
//! ```text
//! Cluster                                              hosts, ranks, bandwidth, latency, loss, stragglers
//!    |-- Allreduce::simulate    collectives::program -> steps of each rank -> events over cores, memory, interfaces
//!    |-- Step::simulate         layers of a model -> engine::outline (tree, fusion) -> allreduces beside the backward pass
//!    |-- Forming::simulate      registrar::outline (membership) -> calls, answers, dialled links
//!    |-- live::allreduce        real communicators over modelled links: small worlds, to check the first
//!    `-- goal::write            the steps in the GOAL format
//! ```
//!
//! `docs/user-guide/simulate.md` says what is modelled and what is not.
//!
//! Invariants:
//! - `SM-1`: every byte that a schedule sends arrives once, and is counted once.
//! - `SM-2`: nothing gets faster by less bandwidth, more latency, slower cores or a straggler;
//!   within an algorithm, nothing by more bytes.
//! - `SM-3`: the same question has the same answer.

#![forbid(unsafe_code)]

mod allreduce;
mod cluster;
mod control;
mod error;
mod events;
mod forming;
pub mod goal;
pub mod live;
mod models;
mod network;
mod published;
mod step;

pub use allreduce::{Allreduce, Collective};
pub use cluster::Cluster;
pub use control::Control;
pub use error::{Error, Result};
pub use forming::Forming;
pub use models::{Layer, Model};
pub use published::{PUBLISHED, Published};
pub use step::{Step, Timing};

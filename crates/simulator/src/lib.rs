// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Computes times on a cluster that does not exist: to form a world, for an allreduce, for a
//! training step.
//!
//! Owns a model of hosts and their network. The simulated messages come from the code that runs in
//! a job: the algorithms of `collectives`, the tree and the fusion of `engine`, the membership of
//! `registrar`, the ring sizes of `session`. The crate opens no socket and reads no clock: the same
//! input has the same result.
//!
//! ```text
//! SimulatedCluster                 hosts, ranks, bandwidth, latency, loss, stragglers
//!    |-- AllreduceSimulator        jobs of `collectives` -> events over cores, memory, interfaces
//!    |-- StepEstimate              layers of a model -> tree, fusion -> allreduces, backward pass
//!    |-- FormationEstimate         membership -> calls, answers, dialled links
//!    `-- goal_format               the steps in the GOAL format
//! ```
//!
//! `docs/user-guide/simulate.md` lists the modelled effects and the omitted ones.
//!
//! Invariants:
//! - `SM-1`: every byte that a job sends arrives once, and is counted once.
//! - `SM-2`: nothing gets faster by less bandwidth, more latency, slower cores or a straggler;
//!   within an algorithm, nothing by more bytes.
//! - `SM-3`: the same input has the same result.

#![forbid(unsafe_code)]

mod allreduce;
mod cluster;
mod control_round;
mod error;
mod events;
mod formation;
pub mod goal_format;
mod models;
mod network;
mod published_results;
#[cfg(test)]
mod tests;
mod training_step;

pub use allreduce::{AllreduceEstimate, AllreduceSimulator};
pub use cluster::SimulatedCluster;
pub use control_round::ControlRound;
pub use error::{Error, Result};
pub use formation::FormationEstimate;
pub use models::{ModelLayer, ModelProfile, PassTiming};
pub use published_results::{PUBLISHED_EFFICIENCIES, PublishedEfficiency};
pub use training_step::{StepEstimate, StepOptions};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The terms of a distributed job: ranks, hosts, slots, topology, generations, process sets, host
//! hash.
//!
//! This crate owns the types that all other crates use for them, the pure rule that assigns ranks
//! to registered tasks, and how counts are written (`1 rank`, `2 ranks`). It has no I/O, no clock,
//! no environment and no threads.
//!
//! ```text
//! TaskPlacement of each task ── assign_ranks ──> World: a RankPlacement for each task
//! (TaskId, HostHash)                             (Rank by position, LocalRank, CrossRank, sizes)
//! ```
//!
//! Invariants:
//! - `W-1`: equal registrations give equal ranks, whatever the order of arrival.
//! - `W-2`: rank 0 is on the host of the lowest task; ranks of a host are consecutive, unless ranks
//!   were assigned before.
//! - `W-3`: `local_rank < local_size`, `cross_rank < cross_size`, and both pairs address every rank
//!   once.
//! - `W-4`: ranks that another launcher has assigned are kept: the task number is the rank.

mod assign_task_ranks;
mod counted_noun;
mod fault;
mod host;
mod index_newtypes;
pub mod slurm_nodelist;
mod sub_world;
mod topology;

pub use assign_task_ranks::{
    TaskPlacement, assign_in_task_order, assign_ranks, assign_ranks_as_listed,
};
pub use counted_noun::format_counted_noun;
pub use fault::FaultOrigin;
pub use host::{HostFacts, HostHash};
pub use index_newtypes::{CrossRank, Generation, JobId, LocalRank, ProcessSetId, Rank, TaskId};
pub use topology::{Error, RankPlacement, World};

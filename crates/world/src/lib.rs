// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The words of a distributed job: ranks, hosts, slots, topology, generations, process sets, host hash.
//!
//! Owns the newtypes every other room speaks in and the pure rule that turns registered tasks into ranks.
//! Refuses all work: no I/O, no clock, no environment, no threads.
//!
//! Invariants:
//! - `W-1`: equal registrations give equal ranks, whatever the order of arrival.
//! - `W-2`: rank 0 is on the host of the lowest task; ranks of a host are consecutive, unless they were given out before.
//! - `W-3`: `local_rank < local_size`, `cross_rank < cross_size`, and both pairs address every rank once.
//! - `W-4`: ranks that somebody else has given out are kept: task and rank are one number then.

mod assign;
mod fault;
mod host;
mod ids;
pub mod nodelist;
mod part;
mod topology;

pub use assign::{TaskPlace, assign, assign_as_listed, assign_in_order};
pub use fault::Fault;
pub use host::{HostFacts, HostHash};
pub use ids::{CrossRank, Generation, JobId, LocalRank, ProcessSetId, Rank, TaskId};
pub use topology::{Error, Seat, World};

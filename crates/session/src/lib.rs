// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The worker's side: joins registrar, transports and engine behind [`init`].
//!
//! Owns the session of this process, and the order in which its parts start and end:
//!
//! ```text
//! TaskClient::for_this_process --> await_assignment --> Mesh::join --> links --> HostCommunicator
//!  or foreign_launcher (mpirun,     World               registrar_     control
//!  srun, torchrun, ...)                                 rendezvous     and data
//!
//! HostCommunicator --> Engine --> process sets, on which all ranks agree
//! ```
//!
//! The rank of this process comes from the ticket that our own launcher sets (`FARANDOLE_JOB`), or
//! from the variables of another launcher (`foreign_launcher`), or from the caller, which has its
//! own communicator ([`AssignedRank`], [`host_registrar`]). A process that was started alone gets a
//! world of one rank.
//!
//! Each rank asks the registrar once to form the world (`registrar_rendezvous`). When the last rank
//! has asked, the registrar returns the addresses of all ranks. If some ranks cannot form a world,
//! it returns an error at once.
//!
//! In an elastic job, a worker asks the registrar for each new world (`rejoin`).
//!
//! The registrar or the other launcher decides which process gets which rank. The training loop
//! decides when to form a new world.
//!
//! Invariants:
//! - `SE-1`: at most one session per process; `init` while one runs does nothing.
//! - `SE-2`: when `init` returns, every rank has joined, and all links that are not opened on
//!   demand work.
//! - `SE-3`: no wait is longer than its deadline, and each wait ends within seconds when the caller
//!   interrupts it.
//! - `SE-4`: a forked child can read its rank, but neither uses nor ends its parent's session.
//! - `SE-5`: a rank belongs to one process; process sets have the same numbers and members on all
//!   ranks, except member sets, which only their members know (`member_sets`).
//! - `SE-6`: a process that was started as one of several never forms a world of one: it joins the
//!   others or fails.

#![forbid(unsafe_code)]

mod carried_sets;
mod devices;
mod error;
mod foreign_launcher;
mod gpu_policy;
mod init_options;
mod member_sets;
mod mesh_parker;
mod process_session;
mod process_set_changes;
mod rank_links;
mod registrar_relay;
mod registrar_rendezvous;
mod rejoin;
mod session;
mod session_formation;
mod set_table;
mod stalls;
mod tensor_memory;

pub use error::{Error, Result};
pub use foreign_launcher::{host_registrar, rank_not_inherited_variable, report_orderly_exit};
pub use init_options::{AssignedRank, InitOptions};
pub use process_session::{current_session, init, init_with_options, is_initialized, shutdown};
pub use rank_links::{partition_eager_peers, read_crossover_rules, world_ring_bytes};
pub use rejoin::{resign_worker, take_host_changes};
pub use session::Session;
pub use stalls::StackRequests;

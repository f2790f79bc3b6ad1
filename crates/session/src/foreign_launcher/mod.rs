// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Processes that mpirun, srun, torchrun or another launcher started: they have ranks already, and
//! must find each other.
//!
//! ```text
//! environment --detect_launch--> DetectedRank --select_rendezvous--> RankZeroRendezvous
//!  KNOWN_LAUNCHERS               rank, size                          file or address
//!
//! RankZeroRendezvous --RankZeroSearch--> TaskClient of the registrar in rank 0
//! ```
//!
//! Rank 0 runs the registrar in its own process, until that process ends. The other ranks need the
//! registrar's address and the job's token. They get both in one of two ways
//! ([`RankZeroRendezvous`]):
//!
//! - **A file** of mode 0600 that rank 0 writes: on one host in a private directory of the user, on
//!   several hosts in a directory that all of them share. A reader checks the owner and the mode
//!   before it uses the content. Rank 0 removes the file when all ranks have registered.
//! - **A secret** that the launcher forwards (`FARANDOLE_JOB_SECRET`): all ranks derive the same
//!   token and certificate from it, and only need `host:port`, which comes from the batch system or
//!   from `FARANDOLE_RENDEZVOUS`.
//!
//! PMIx is not used to carry the token: its daemons pass values on unencrypted, its library would
//! have to be linked in the version of each site, and half of the launchers do not have it.
//!
//! If the environment says that the world has more than one rank, the process joins that world or
//! fails: it never trains alone.

mod detect;
mod first_host;
mod job_identity;
mod launcher_table;
mod rank_search;
mod rank_zero_rendezvous;
mod ticket_file;

pub(crate) use detect::{DetectedRank, LaunchDetection, detect_launch};
pub(crate) use rank_search::{connect_assigned_rank, connect_detected_rank};
pub use rank_search::{host_registrar, rank_not_inherited_variable, report_orderly_exit};

/// Returns a variable's value, by its name.
pub(crate) type VariableLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

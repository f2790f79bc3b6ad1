// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Processes that mpirun, srun, torchrun or another foreign starter has started: they have ranks
//! already, and have to find each other.
//!
//! ```text
//! environment --detect--> Started --way--> Way --meet--> Client of the registrar in rank 0
//!  (starters)             rank, size       file or address
//! ```
//!
//! Rank 0 holds the registrar in its own process, for that process's life. The others need its
//! address and the job's token, and get them one of these ways ([`Way`]):
//!
//! - **A file** of mode 0600 that rank 0 writes: on one host in a private directory of the user, on
//!   several in a directory that all of them see. Owner and mode are checked before a byte of it is
//!   believed, and it is removed as soon as all ranks have come.
//! - **A secret** that the starter forwards (`FARANDOLE_JOB_SECRET`): all ranks make the same token
//!   and certificate from it, and only need `host:port`, which comes from the batch system or from
//!   `FARANDOLE_RENDEZVOUS`.
//!
//! PMIx could carry the token, too, and does not: its daemons pass values on in clear, its library
//! would have to be linked in the version of each site, and it is missing under half of the
//! starters.
//!
//! A process that finds a world of more than one in its environment joins it or fails: it never
//! trains alone.

mod detect;
mod file;
mod identity;
mod meet;
mod nodes;
mod starters;
mod way;

pub(crate) use detect::{Found, Started, detect};
pub(crate) use meet::{as_told, client};
pub use meet::{holder, host, leave};

/// A variable's value, by its name.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Elastic jobs: workers come and go while the job runs.
//!
//! Owns the search for hosts and the execution of what the registrar decides: it starts and ends
//! agents, and tells the registrar which hosts there are and which could not be reached. It does
//! not decide which workers are members, which wait and which are out: the registrar does.
//!
//! ```text
//! Discovery --every second--> Watch --hosts that changed--> Registrar
//!                                                             | Start, Stop, Assigned, Finished, Aborted
//!                                                             v
//! agents of this host, connections to others <------------- ElasticJob
//! ```
//!
//! Invariants:
//! - `EL-1`: a search that fails changes nothing: the hosts found last stay, and it is made again.
//! - `EL-2`: a search ends: a program is killed with all that it started after its time.
//! - `EL-3`: what the registrar wants started is started, or it hears why not.
//! - `EL-4`: workers end with this process. With a journal, they continue without it for as long as
//!   they wait for a registrar.

mod choice;
mod discovery;
mod job;
mod program;
mod script;
mod slurm;
mod tally;
mod watch;

pub use choice::chosen;
pub use discovery::{Discovery, Fixed, HostFile, Stop};
pub use job::{ElasticJob, Happening};
pub use script::Script;
pub use slurm::Slurm;

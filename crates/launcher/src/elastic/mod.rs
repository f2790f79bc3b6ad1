// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Elastic jobs: workers come and go while the job runs.
//!
//! Owns the host discovery, and carries out the registrar's decisions: it starts and ends agents,
//! and reports to the registrar the present hosts and the hosts that could not be reached. The
//! registrar decides which workers are members, which wait and which are out.
//!
//! ```text
//! DiscoverySource --every second--> HostWatcher --changed hosts--> Registrar
//!                                                                     | Start, Stop, Assigned,
//!                                                                     | Finished, Aborted
//!                                                                     v
//! agents of this host, connections to other hosts <-------------- ElasticJob
//! ```
//!
//! Invariants:
//! - `EL-1`: a failed discovery changes nothing: the hosts found last remain, and discovery is
//!   repeated.
//! - `EL-2`: a discovery ends: after its time limit, a script is killed with all processes that it
//!   started.
//! - `EL-3`: each worker that the registrar wants is started, or the registrar gets the reason why
//!   not.
//! - `EL-4`: workers end with this process. With a journal, they continue without it for as long as
//!   they wait for a registrar.

mod discovery;
mod discovery_choice;
pub(crate) mod host_watcher;
mod job;
pub(crate) mod program_query;
mod script;
mod slurm;

pub use discovery::{DiscoverySource, DiscoveryStopFlag, HostFile, StaticHostList};
pub use discovery_choice::choose_discovery;
pub use job::ElasticJob;
pub use script::DiscoveryScript;
pub use slurm::SlurmNodes;

pub use crate::job_run::ElasticJobUpdate;

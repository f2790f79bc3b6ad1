// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Starts and watches worker processes.
//!
//! Owns the agent, one task's side of a job (register, wait for a rank, start the worker, watch it, report its end), and
//! the local launch of several agents in one process. Refuses to decide whose failure came first (the registrar does)
//! and to look into payloads and results.
//!
//! ```text
//! agent thread: Client --register, assignment--> env --> spawner thread --fork, exec--> worker (own session)
//!      |  ^                                                                    |-- stdout, stderr: lines -> Output
//!      |  '-- exit, stop, cancel                                               |-- payload pipe, result pipe
//!      '-- guard (a shell on a pipe): ends the worker's group when this process is gone
//! ```
//!
//! Invariants:
//! - `LN-1`: a worker does not outlive its agent's process, whatever ends that, SIGKILL included: the kernel signals the
//!   worker (`PR_SET_PDEATHSIG`), the guard everything in its process group.
//! - `LN-2`: when an agent returns, its worker and all that the worker left in its process group have ended.
//! - `LN-3`: a launcher's variables win over those of the user's environment: a stale `RANK` has no effect.
//! - `LN-4`: memory for output is bounded: a slow reader slows the worker down, and loses nothing by it.

#![deny(unsafe_code)]

mod agent;
mod environment;
mod error;
mod guard;
mod lines;
mod local;
mod spawn;
mod worker;

pub use agent::{Agent, Outcome, Output, Task};
pub use error::{Error, Result};
pub use local::{Local, Report, run_local, run_local_into};

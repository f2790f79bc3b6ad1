// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Starts and watches worker processes, on this host and on others.
//!
//! Owns the agent, which is one task's side of a job (it registers, waits for a rank, starts the
//! worker, watches it, and reports its end); the job, which is a registrar and an agent for each
//! task; hosts and slots, also those of batch systems; and the protocol with the agent of another
//! host through ssh or a similar program. The registrar decides which failure came first, and ssh
//! knows keys and passwords. Payloads and results are not interpreted here.
//!
//! ```text
//! agent thread: Client --register, assignment--> env --> spawner thread --fork, exec--> worker (own session)
//!      |  ^                                                                    |-- stdout, stderr: lines -> Output
//!      |  '-- exit, stop, cancel                                               |-- payload pipe, result pipe
//!      '-- guard (a shell on a pipe): ends the worker's group when this process is gone
//! ```
//!
//! One connection and one process for each other host:
//!
//! ```text
//! Job --Remote--> ssh HOST "exec sh -c 'exec python -m farandole agent'" --> serve_host --> Agent, Agent, ...
//!      order, payload: standard input      ends, results: standard output      output of workers: registrar
//! ```
//!
//! Invariants:
//! - `LN-1`: a worker does not outlive its agent's process, even if SIGKILL ends the agent: the
//!   kernel signals the worker (`PR_SET_PDEATHSIG`), and the guard signals its whole process group.
//! - `LN-2`: when an agent returns, its worker and all processes of the worker's process group have
//!   ended.
//! - `LN-3`: a launcher's variables have priority over the user's environment: a stale `RANK` has
//!   no effect.
//! - `LN-4`: memory for output is bounded: a slow reader slows the worker down and loses nothing.
//! - `LN-5`: no secret and no variable of a job is in a command line, here or on another host.
//! - `LN-6`: no worker starts before every host has answered; one error names all hosts that cannot
//!   be used.

#![deny(unsafe_code)]

mod agent;
pub mod allocation;
mod crew;
pub mod elastic;
mod environment;
mod error;
mod gather;
mod guard;
mod hosted;
pub mod hosts;
mod job;
mod lines;
mod master;
mod near;
mod orders;
mod remote;
mod report;
mod shell;
mod spawn;
mod work;
mod worker;

pub use agent::{Agent, Outcome, Output, Task};
pub use crew::Wish;
pub use environment::forwarded_environment;
pub use error::{Error, Result};
pub use hosted::serve_host;
pub use hosts::HostSlots;
pub use job::Job;
pub use near::placements;
pub use orders::Hello;
pub use remote::{Notice, Remote, RemoteTasks};
pub use report::Report;
pub use shell::Shell;
pub use work::Work;
pub use worker::ALLOCATOR;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Starts and watches worker processes, on this host and on others.
//!
//! Owns the agent, which is one task's side of a job (it registers, waits for a rank, starts the
//! worker, watches it, and reports its end); the job, which is a registrar and an agent for each
//! task, and the conductor, which decides its end; hosts and slots, also of batch systems; and the
//! protocol with the agent of another host through ssh or a similar program. The registrar decides
//! which failure came first, and ssh manages keys and passwords. Payloads and results are not
//! interpreted here.
//!
//! ```text
//! agent thread: TaskClient --register, assignment--> environment --> spawner thread
//!      |  ^                                                               |
//!      |  |                                                           fork, exec
//!      |  |                                                               v
//!      |  |                                                      worker (own session)
//!      |  |                                        stdout, stderr: lines --> OutputTarget
//!      |  |                                                payload pipe, result pipe
//!      |  '-- exit, stop, cancel
//!      '-- guard (a shell on a pipe): kills the worker's group after the end of this process
//! ```
//!
//! Each other host has one connection and one agent process:
//!
//! ```text
//! StaticJob --RemoteAgent--> ssh HOST "exec sh -c 'exec python -m farandole agent'"
//!                               --> serve_one_launcher --> Agent, Agent, ...
//!  standard input: order, payload   standard output: ends, results   registrar: workers' output
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
mod agent_pool;
mod agent_protocol;
pub mod allocation;
mod cloud_hosts;
mod cluster_variables;
mod conductor;
pub mod elastic;
mod environment;
mod error;
mod guard;
mod host_agent;
pub mod hosts;
mod job;
mod job_run;
mod launch_environment;
mod lines;
mod local_hosts;
mod master_address;
mod remote;
mod report;
mod shell;
mod slurm_requeue;
mod spawn;
mod suspension;
mod timeline_upload;
mod worker;
mod worker_program;

pub use agent::{Agent, AgentTask, OutputTarget, WorkerOutcome};
pub use agent_protocol::AgentHello;
pub use cluster_variables::{RecognizedCluster, recognize_cluster};
pub use conductor::StopLevel;
pub use environment::forwarded_environment;
pub use error::{Error, Result};
pub use host_agent::serve_one_launcher;
pub use hosts::HostSlots;
pub use job::StaticJob;
pub use local_hosts::split_local_tasks;
pub use remote::{AgentNotice, RemoteAgent, RemoteTasks};
pub use report::JobReport;
pub use shell::RemoteShell;
pub use slurm_requeue::SlurmBatchJob;
pub use suspension::{SUSPENSION_RECORD_KIND, SuspensionRequest};
pub use worker::ALLOCATOR_VARIABLES;
pub use worker_program::WorkerProgram;

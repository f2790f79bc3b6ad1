// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors between a task and its registrar.

use std::time::Duration;

use farandole_world::FaultOrigin;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no ticket.
    #[error("not a ticket of a Farandole job: {reason}")]
    Ticket {
        /// The reason. Never the text itself, which may be most of a secret.
        reason: &'static str,
    },
    /// An option cannot be used.
    #[error("cannot start a registrar: {reason}")]
    Options {
        /// The reason.
        reason: String,
    },
    /// A knob does not parse.
    #[error(transparent)]
    Config(#[from] farandole_config::KnobError),
    /// The process may open fewer file descriptors than the job has connections.
    #[error(
        "a job of this size needs {needed} open files in this process, {connections} of them for \
         connections of agents and workers, and the limit is {limit}: raise it (ulimit -n \
         {needed}), also the hard one"
    )]
    Descriptors {
        /// Connections of agents and workers.
        connections: u32,
        /// Descriptors in all.
        needed: u64,
        /// The hard limit.
        limit: u64,
    },
    /// No port of the range could be listened on.
    #[error("cannot listen on {host} with ports {first} to {last}: {reason}")]
    Listen {
        /// The address.
        host: String,
        /// First port of the range.
        first: u16,
        /// Last port of the range.
        last: u16,
        /// The last failure.
        reason: String,
    },
    /// No certificate could be made, or no TLS set up.
    #[error("cannot set up TLS: {reason}")]
    Tls {
        /// The reason.
        reason: String,
    },
    /// The journal of an elastic job cannot be used.
    #[error("the journal {path}: {reason}")]
    Journal {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// No thread could be started.
    #[error("cannot start a runtime: {reason}")]
    Runtime {
        /// The reason.
        reason: String,
    },
    /// The registrar answers at none of its addresses.
    #[error("cannot reach the registrar of job {job} within {elapsed:.1?}: {}", format_attempts(.tried))]
    Unreachable {
        /// The job.
        job: String,
        /// Every address, and what happened there.
        tried: Vec<(String, String)>,
        /// Time spent.
        elapsed: Duration,
    },
    /// The registrar refused the call.
    #[error("the registrar of job {job} refused {call}: {reason}")]
    Refused {
        /// The job.
        job: String,
        /// The call.
        call: &'static str,
        /// Its reason.
        reason: String,
    },
    /// The job, or this process's generation of it, is over.
    #[error("job {job} has ended: {reason}")]
    Aborted {
        /// The job.
        job: String,
        /// The reason.
        reason: String,
        /// Whether the tasks may form another generation, because no worker failed.
        retry: bool,
    },
    /// The elastic job does not need this worker any more. The worker may end, which is not a
    /// failure.
    #[error("this worker leaves job {job}: {reason}")]
    Dismissed {
        /// The job.
        job: String,
        /// The reason.
        reason: String,
    },
    /// The connection broke during a call.
    #[error("lost the registrar of job {job} during {call}: {reason}")]
    Lost {
        /// The job.
        job: String,
        /// The call.
        call: &'static str,
        /// The observed reason.
        reason: String,
    },
    /// A deadline passed.
    #[error("timed out after {elapsed:.1?} waiting for {what}")]
    Timeout {
        /// The awaited event.
        what: String,
        /// Time spent.
        elapsed: Duration,
    },
    /// The other end runs another version.
    #[error(
        "protocol versions differ: this process speaks {ours}, the registrar {theirs}; install one \
         version of farandole everywhere"
    )]
    Version {
        /// Ours.
        ours: u32,
        /// Theirs.
        theirs: u32,
    },
    /// The registrar sent an invalid reply.
    #[error("the registrar of job {job} sent a malformed answer to {call}: {reason}")]
    Malformed {
        /// The job.
        job: String,
        /// The call.
        call: &'static str,
        /// The reason why it is invalid.
        reason: String,
    },
    /// The process was forked after the connection was made; a connection belongs to one process.
    #[error(
        "made in process {made_in} and used in its fork {used_in}: start processes by spawn or \
         forkserver"
    )]
    Forked {
        /// The process that made the connection.
        made_in: u32,
        /// The process that used it.
        used_in: u32,
    },
    /// Closed by its owner.
    #[error("closed: {what}")]
    Closed {
        /// The closed object.
        what: &'static str,
    },
}

impl Error {
    /// Returns the party at fault.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::Ticket { .. } | Self::Options { .. } | Self::Config(_) | Self::Forked { .. } => {
                FaultOrigin::Usage
            }
            Self::Descriptors { .. }
            | Self::Listen { .. }
            | Self::Tls { .. }
            | Self::Journal { .. }
            | Self::Runtime { .. }
            | Self::Unreachable { .. }
            | Self::Refused { .. }
            | Self::Timeout { .. }
            | Self::Version { .. } => FaultOrigin::Environment,
            Self::Aborted { .. } | Self::Dismissed { .. } => FaultOrigin::Membership,
            Self::Lost { .. } | Self::Closed { .. } => FaultOrigin::Peer,
            Self::Malformed { .. } => FaultOrigin::Bug,
        }
    }
}

fn format_attempts(tried: &[(String, String)]) -> String {
    let each: Vec<String> =
        tried.iter().map(|(address, reason)| format!("{address}: {reason}")).collect();
    if each.is_empty() { "the ticket has no address".to_owned() } else { each.join("; ") }
}

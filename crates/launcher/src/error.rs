// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors that prevent a worker from running.

use std::io;

use farandole_world::{FaultOrigin, TaskId, format_counted_noun};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A launch that failed. A worker that ran and failed is an [`crate::WorkerOutcome`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments of the launch are invalid.
    #[error("cannot launch: {reason}")]
    Usage {
        /// The reason.
        reason: String,
    },
    /// The job has no registrar.
    #[error("the job cannot begin")]
    JobStart {
        /// The failure.
        source: Box<farandole_registrar::Error>,
    },
    /// The registrar refused, or could not be reached.
    #[error("task {task} did not get a rank")]
    Registrar {
        /// The task.
        task: TaskId,
        /// The failure.
        source: Box<farandole_registrar::Error>,
    },
    /// The program could not be started.
    #[error("cannot start {program}")]
    Spawn {
        /// The program.
        program: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused a call that the launch needs.
    #[error("{what} failed")]
    System {
        /// The failed call.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The launch was cancelled before a worker started.
    #[error("cancelled: {reason}")]
    Cancelled {
        /// The reason.
        reason: String,
    },
    /// A host cannot be used.
    #[error("{host}: {reason}")]
    Host {
        /// The host.
        host: String,
        /// The reason, in the words of the program that connects to the host, if it printed one.
        reason: String,
    },
    /// Several hosts cannot be used.
    #[error("{} cannot be used: {}", format_counted_noun(.0.len() as u64, "host"), .0.join("; "))]
    Hosts(Vec<String>),
    /// The first discovery of an elastic job's hosts failed.
    #[error("{reason}")]
    Discovery {
        /// The reason, with the name of the source.
        reason: String,
    },
    /// A thread of the launcher ended without a result.
    #[error("the launcher's thread of task {task} ended unexpectedly")]
    ThreadEnded {
        /// The task.
        task: TaskId,
    },
}

impl Error {
    /// Returns the most important error; errors of several hosts are combined into one.
    pub(crate) fn combine_host_errors(mut errors: Vec<Self>) -> Option<Self> {
        let of_hosts = errors.iter().filter(|error| matches!(error, Self::Host { .. })).count();
        if of_hosts < 2 {
            // The failure of a host causes the failures of the other agents.
            let first =
                errors.iter().position(|error| matches!(error, Self::Host { .. })).unwrap_or(0);
            return (!errors.is_empty()).then(|| errors.swap_remove(first));
        }
        errors.retain(|error| matches!(error, Self::Host { .. }));
        let mut reasons: Vec<String> = errors.iter().map(Self::message_with_causes).collect();
        reasons.sort();
        Some(Self::Hosts(reasons))
    }

    /// Returns the message with its causes, in one line.
    pub fn message_with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }

    /// Returns the party at fault.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::Usage { .. } => FaultOrigin::Usage,
            Self::JobStart { source } | Self::Registrar { source, .. } => source.fault(),
            Self::Spawn { .. } | Self::System { .. } | Self::Cancelled { .. } => {
                FaultOrigin::Environment
            }
            Self::Host { .. } | Self::Hosts(_) | Self::Discovery { .. } => FaultOrigin::Environment,
            Self::ThreadEnded { .. } => FaultOrigin::Bug,
        }
    }
}

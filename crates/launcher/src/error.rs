// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors that prevent a worker from running.

use std::io;

use farandole_world::{Fault, TaskId};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A launch that failed. A worker that ran and failed is an [`crate::Outcome`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call cannot be carried out as made.
    #[error("cannot launch: {reason}")]
    Usage {
        /// The reason.
        reason: String,
    },
    /// There is no registrar for the job.
    #[error("the job cannot begin")]
    Begin {
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
        /// The system's answer.
        source: io::Error,
    },
    /// The system refused something that a launch needs.
    #[error("{what} failed")]
    System {
        /// The call.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The launch was cancelled before there was a worker.
    #[error("cancelled: {reason}")]
    Cancelled {
        /// The reason.
        reason: String,
    },
    /// A host cannot be worked with.
    #[error("{host}: {reason}")]
    Host {
        /// The host.
        host: String,
        /// The reason, in the words of the program that connects to the host, if it gave one.
        reason: String,
    },
    /// Several hosts cannot be worked with.
    #[error("{} hosts cannot be used: {}", .0.len(), .0.join("; "))]
    Hosts(Vec<String>),
    /// The hosts of an elastic job could not be found at its beginning.
    #[error("{reason}")]
    Discovery {
        /// The reason, with the name of the request.
        reason: String,
    },
    /// A thread of the launcher ended without an answer.
    #[error("the launcher's thread of task {task} ended unexpectedly")]
    Vanished {
        /// The task.
        task: TaskId,
    },
}

impl Error {
    /// Returns the first error, or all hosts' in one.
    pub(crate) fn of_hosts(mut errors: Vec<Self>) -> Option<Self> {
        let of_hosts = errors.iter().filter(|error| matches!(error, Self::Host { .. })).count();
        if of_hosts < 2 {
            // A host's failure is what the other agents' failures come from.
            let first =
                errors.iter().position(|error| matches!(error, Self::Host { .. })).unwrap_or(0);
            return (!errors.is_empty()).then(|| errors.swap_remove(first));
        }
        errors.retain(|error| matches!(error, Self::Host { .. }));
        let mut reasons: Vec<String> = errors.iter().map(Self::told).collect();
        reasons.sort();
        Some(Self::Hosts(reasons))
    }

    /// With its causes, in one line.
    pub fn told(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }

    /// Returns the party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Usage { .. } => Fault::Usage,
            Self::Begin { source } | Self::Registrar { source, .. } => source.fault(),
            Self::Spawn { .. } | Self::System { .. } | Self::Cancelled { .. } => Fault::Environment,
            Self::Host { .. } | Self::Hosts(_) | Self::Discovery { .. } => Fault::Environment,
            Self::Vanished { .. } => Fault::Bug,
        }
    }
}

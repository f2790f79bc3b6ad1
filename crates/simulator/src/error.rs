// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The reason why a simulation has no result.

use farandole_world::FaultOrigin;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A question that cannot be answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The cluster cannot be.
    #[error("{what} must be {expected}: {value}")]
    Cluster {
        /// Name of the fact.
        what: &'static str,
        /// The expected value.
        expected: &'static str,
        /// The value that was found.
        value: String,
    },
    /// More messages than can be simulated one by one, among hosts that are not alike.
    #[error("an allreduce of {bytes} bytes has about {messages} messages, more than {most}")]
    Messages {
        /// Bytes of the allreduce.
        bytes: u64,
        /// Its messages.
        messages: u64,
        /// The most that are simulated.
        most: u64,
    },
    /// A schedule came to a stop: a mistake in this crate.
    #[error("the simulated schedule stopped before all ranks were done, which are left: {left}")]
    Stuck {
        /// Ranks that were not done.
        left: usize,
    },
    /// A simulated job failed: a mistake in this crate, because its links cannot break.
    #[error(transparent)]
    Job(#[from] farandole_collectives::Error),
    /// A setting cannot be read.
    #[error(transparent)]
    Config(#[from] farandole_config::KnobError),
    /// The export could not be written.
    #[error("cannot write the schedule: {0}")]
    Write(#[from] std::io::Error),
}

impl Error {
    /// Returns the reactions that are open to the caller.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::Cluster { .. } | Self::Messages { .. } | Self::Config(_) => FaultOrigin::Usage,
            Self::Stuck { .. } | Self::Job(_) => FaultOrigin::Bug,
            Self::Write(_) => FaultOrigin::Environment,
        }
    }
}

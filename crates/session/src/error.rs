// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What can go wrong while a world forms.

use std::time::Duration;

use farandole_world::Fault;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A session that could not begin, or is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody has called `init`, or `shutdown` came after it.
    #[error("farandole has not been initialized; call init() first")]
    NotInitialized,
    /// The caller asked to give up.
    #[error("interrupted while the world was forming")]
    Interrupted,
    /// This process was forked from one that runs a session.
    #[error(
        "process {pid} was forked from process {parent}, which had called init(); start workers with the spawn or forkserver method"
    )]
    Forked {
        /// The process that called.
        pid: u32,
        /// The process whose session it is.
        parent: u32,
    },
    /// A knob does not parse.
    #[error(transparent)]
    Config(#[from] farandole_config::Error),
    /// The registrar did not let us in.
    #[error(transparent)]
    Registrar(#[from] farandole_registrar::Error),
    /// The ranks did not find each other.
    #[error("cannot link the ranks: {0}")]
    Transport(#[source] farandole_transport::Error),
    /// The communicator cannot be built.
    #[error("cannot build the communicator: {0}")]
    Collectives(#[from] farandole_collectives::Error),
    /// The engine did not start, or its first operation failed.
    #[error(transparent)]
    Engine(#[from] farandole_engine::Error),
    /// Not everybody came to the first barrier.
    #[error("timed out after {elapsed:.1?} waiting for all {size} ranks to finish init()")]
    Timeout {
        /// Ranks of the world.
        size: usize,
        /// Time spent.
        elapsed: Duration,
    },
}

impl From<farandole_transport::Error> for Error {
    fn from(error: farandole_transport::Error) -> Self {
        match error {
            farandole_transport::Error::Interrupted => Self::Interrupted,
            other => Self::Transport(other),
        }
    }
}

impl Error {
    /// What the trainer may do now.
    pub fn fault(&self) -> Fault {
        use farandole_transport::Error as Transport;
        match self {
            Self::NotInitialized | Self::Forked { .. } | Self::Config(_) => Fault::Usage,
            Self::Interrupted => Fault::Environment,
            Self::Registrar(error) => error.fault(),
            Self::Transport(Transport::PeerLost { .. } | Transport::Timeout { .. }) => Fault::Peer,
            Self::Transport(Transport::Frame { .. }) | Self::Collectives(_) => Fault::Bug,
            Self::Transport(_) => Fault::Environment,
            Self::Engine(error) => error.fault(),
            Self::Timeout { .. } => Fault::Peer,
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors while a world forms.

use std::time::Duration;

use farandole_world::{Fault, ProcessSetId, Rank};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Ways in which ranks that others have started meet.
const WAYS: &str = "ranks on one host meet in a file of the user's, those of several in \
    ~/.farandole, if they share it, in the directory that FARANDOLE_RENDEZVOUS names, or at \
    FARANDOLE_RENDEZVOUS=host:port of rank 0 with the same FARANDOLE_JOB_SECRET everywhere; the \
    starter must forward these variables (mpirun -x, srun --export)";

/// A session that could not begin, or is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `init` was not called, or `shutdown` was called after it.
    #[error("farandole has not been initialized; call init() first")]
    NotInitialized,
    /// The caller asked to give up.
    #[error("interrupted while the world was forming")]
    Interrupted,
    /// This process was forked from one that runs a session.
    #[error(
        "process {pid} was forked from process {parent}, which had called init(); start workers \
         with the spawn or forkserver method"
    )]
    Forked {
        /// The process that called.
        pid: u32,
        /// The process whose session it is.
        parent: u32,
    },
    /// Ranks that a set or a world cannot be made of.
    #[error("{what} must be at least one rank of 0 to {last}, each once: {ranks:?}", last = .size.saturating_sub(1))]
    Ranks {
        /// The purpose of the ranks.
        what: String,
        /// Ranks of the world.
        size: usize,
        /// The ranks.
        ranks: Vec<u32>,
    },
    /// `init` was asked for a world without the calling rank.
    #[error("rank {rank} is not among the ranks that init was asked for: {}", list(.ranks))]
    NotAmong {
        /// The calling rank.
        rank: Rank,
        /// The ranks of that world.
        ranks: Vec<Rank>,
    },
    /// Ranks asked `init` for different worlds.
    #[error(
        "ranks must ask init for the same world: rank {rank} asked for {theirs}, rank {own} for \
         {ours}"
    )]
    Worlds {
        /// The rank that asked for another one.
        rank: Rank,
        /// The version of the other rank.
        theirs: String,
        /// The calling rank.
        own: Rank,
        /// The request of the calling rank.
        ours: String,
    },
    /// A rank that the world needs will not come any more.
    #[error(
        "rank {rank} on {host} has ended, and no world can form without it: all of its ranks must \
         call init() before they end"
    )]
    Ended {
        /// The rank.
        rank: Rank,
        /// Its host.
        host: String,
    },
    /// Another process has this rank.
    #[error(
        "rank {rank} is already {holder}: a process that a worker starts is no worker; remove \
         FARANDOLE_JOB from its environment to have it form a world of its own"
    )]
    Taken {
        /// The rank.
        rank: Rank,
        /// The process that has it.
        holder: String,
    },
    /// The place of a launcher's variables is invalid.
    #[error("the rank of this process is unknown: {reason}")]
    Place {
        /// The reason, with the variables.
        reason: String,
    },
    /// The ranks that a starter has made cannot meet.
    #[error("{starter} started {size} processes, which cannot find each other: {reason}; {WAYS}")]
    NoWay {
        /// The launcher that started them.
        starter: &'static str,
        /// Their number.
        size: u32,
        /// The reason why they cannot meet.
        reason: String,
    },
    /// Ranks that a starter has made did not all meet in time.
    #[error(
        "timed out after {elapsed:.1?}: rank {rank} of {size}, started by {starter}, waited for \
         {what}; {WAYS}"
    )]
    Missed {
        /// The calling rank.
        rank: Rank,
        /// Ranks there are.
        size: u32,
        /// The launcher that started them.
        starter: &'static str,
        /// The awaited event, and the observations so far.
        what: String,
        /// Time spent.
        elapsed: Duration,
    },
    /// A parent of this process has its rank.
    #[error(
        "rank {rank} is already {holder}: a process that a rank starts is no rank; remove \
         {variable} from its environment to have it form a world of its own"
    )]
    Held {
        /// The rank.
        rank: Rank,
        /// The process that has it.
        holder: String,
        /// The variable that tells the rank.
        variable: &'static str,
    },
    /// Process sets may not be changed.
    #[error(
        "process sets are fixed: call init(process_sets=\"dynamic\") or set \
         FARANDOLE_DYNAMIC_PROCESS_SETS=1 on all ranks"
    )]
    Fixed,
    /// There is a set of these ranks.
    #[error("{what} has the ranks of process set {set}: {}", list(.ranks))]
    SetExists {
        /// The request.
        what: String,
        /// The set there is.
        set: ProcessSetId,
        /// The ranks of both.
        ranks: Vec<Rank>,
    },
    /// There is no such set to be removed.
    #[error("no such process set, or it is the global one: {0}")]
    NoSuchSet(ProcessSetId),
    /// A change of the process sets was interrupted here and is still requested.
    #[error("{pending} was interrupted and still waits for other ranks: finish it first")]
    Unfinished {
        /// The request.
        pending: String,
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
    /// A GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] farandole_cuda::Error),
    /// The engine did not start, or its first operation failed.
    #[error(transparent)]
    Engine(#[from] farandole_engine::Error),
    /// Some ranks did not come to the first barrier.
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
    /// The reactions that are open to the trainer.
    pub fn fault(&self) -> Fault {
        use farandole_transport::Error as Transport;
        match self {
            Self::NotInitialized
            | Self::Forked { .. }
            | Self::Config(_)
            | Self::Ranks { .. }
            | Self::NotAmong { .. }
            | Self::Worlds { .. }
            | Self::Taken { .. }
            | Self::Held { .. }
            | Self::Place { .. }
            | Self::Fixed
            | Self::SetExists { .. }
            | Self::NoSuchSet(_)
            | Self::Unfinished { .. } => Fault::Usage,
            Self::Interrupted | Self::NoWay { .. } | Self::Missed { .. } => Fault::Environment,
            Self::Registrar(error) => error.fault(),
            Self::Transport(Transport::PeerLost { .. } | Transport::Timeout { .. }) => Fault::Peer,
            Self::Transport(Transport::Frame { .. }) | Self::Collectives(_) => Fault::Bug,
            Self::Transport(_) => Fault::Environment,
            Self::Engine(error) => error.fault(),
            Self::Cuda(error) => error.fault(),
            Self::Timeout { .. } | Self::Ended { .. } => Fault::Peer,
        }
    }
}

/// `0, 2, 5`.
fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors while a world forms.

use std::time::Duration;

use farandole_world::{FaultOrigin, ProcessSetId, Rank, format_counted_noun};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Advice on how ranks that another launcher started find each other.
const RENDEZVOUS_HELP: &str = "ranks on one host meet in a file of the user's, those of several in \
    ~/.farandole, if they share it, in the directory that FARANDOLE_RENDEZVOUS names, or at \
    FARANDOLE_RENDEZVOUS=host:port of rank 0 with the same FARANDOLE_JOB_SECRET everywhere; the \
    starter must forward these variables (mpirun -x, srun --export)";

/// The reason why a session could not start, or is missing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `init` was not called, or `shutdown` was called after it.
    #[error("farandole has not been initialized; call init() first")]
    NotInitialized,
    /// The caller interrupted the call.
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
        /// The process that owns the session.
        parent: u32,
    },
    /// The ranks cannot make up a process set or a world.
    #[error("{what} must be at least one rank of 0 to {last}, each once: {ranks:?}", last = .size.saturating_sub(1))]
    InvalidRanks {
        /// The purpose of the ranks.
        what: String,
        /// Ranks of the world.
        size: usize,
        /// The ranks.
        ranks: Vec<u32>,
    },
    /// `init` was asked for a world without the calling rank.
    #[error("rank {rank} is not among the ranks that init was asked for: {}", join_ranks(.ranks))]
    NotInWorld {
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
    DifferentWorlds {
        /// The rank that asked for another one.
        rank: Rank,
        /// The request of the other rank.
        theirs: String,
        /// The calling rank.
        own: Rank,
        /// The request of the calling rank.
        ours: String,
    },
    /// A rank that the world needs has ended.
    #[error(
        "rank {rank} on {host} has ended, and no world can form without it: all of its ranks must \
         call init() before they end"
    )]
    RankEnded {
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
    RankTaken {
        /// The rank.
        rank: Rank,
        /// The process that has it.
        holder: String,
    },
    /// The variables of a launcher are inconsistent.
    #[error("the rank of this process is unknown: {reason}")]
    InvalidPlacement {
        /// The reason, with the variables.
        reason: String,
    },
    /// The ranks that another launcher started cannot find each other.
    #[error(
        "{starter} started {}, which cannot find each other: {reason}; {RENDEZVOUS_HELP}",
        format_counted_noun((*.size).into(), "process")
    )]
    NoRendezvous {
        /// The launcher that started them.
        starter: &'static str,
        /// Their number.
        size: u32,
        /// The reason why they cannot find each other.
        reason: String,
    },
    /// Not all ranks that another launcher started were found in time.
    #[error(
        "timed out after {elapsed:.1?}: rank {rank} of {size}, started by {starter}, waited for \
         {what}; {RENDEZVOUS_HELP}"
    )]
    RendezvousTimeout {
        /// The calling rank.
        rank: Rank,
        /// Number of ranks.
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
    RankHeldByParent {
        /// The rank.
        rank: Rank,
        /// The process that has it.
        holder: String,
        /// The variable that names the rank.
        variable: &'static str,
    },
    /// Process sets may not be changed.
    #[error(
        "process sets are fixed: call init(process_sets=\"dynamic\") or set \
         FARANDOLE_DYNAMIC_PROCESS_SETS=1 on all ranks"
    )]
    FixedProcessSets,
    /// A process set of these ranks exists.
    #[error("{what} has the ranks of process set {set}: {}", join_ranks(.ranks))]
    SetExists {
        /// The request.
        what: String,
        /// The existing set.
        set: ProcessSetId,
        /// The ranks of both.
        ranks: Vec<Rank>,
    },
    /// The set to remove does not exist.
    #[error("no such process set, or it is the global one: {0}")]
    NoSuchSet(ProcessSetId),
    /// A change of the process sets was interrupted here and is still requested.
    #[error("{pending} was interrupted and still waits for other ranks: finish it first")]
    PendingChange {
        /// The request.
        pending: String,
    },
    /// The value of a knob is invalid.
    #[error(transparent)]
    Config(#[from] farandole_config::KnobError),
    /// The registrar refused the rank, or could not be reached.
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
    /// Some ranks did not reach the first barrier.
    #[error("timed out after {elapsed:.1?} waiting for all {} to finish init()", format_counted_noun(*.size as u64, "rank"))]
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
    /// Returns the party at fault.
    pub fn fault(&self) -> FaultOrigin {
        use farandole_transport::Error as Transport;
        match self {
            Self::NotInitialized
            | Self::Forked { .. }
            | Self::Config(_)
            | Self::InvalidRanks { .. }
            | Self::NotInWorld { .. }
            | Self::DifferentWorlds { .. }
            | Self::RankTaken { .. }
            | Self::RankHeldByParent { .. }
            | Self::InvalidPlacement { .. }
            | Self::FixedProcessSets
            | Self::SetExists { .. }
            | Self::NoSuchSet(_)
            | Self::PendingChange { .. } => FaultOrigin::Usage,
            Self::Interrupted | Self::NoRendezvous { .. } | Self::RendezvousTimeout { .. } => {
                FaultOrigin::Environment
            }
            Self::Registrar(error) => error.fault(),
            // A `Peer` fault lets an elastic job form another world instead of ending.
            Self::Transport(Transport::PeerLost { .. } | Transport::Timeout { .. }) => {
                FaultOrigin::Peer
            }
            Self::Transport(Transport::Frame { .. }) | Self::Collectives(_) => FaultOrigin::Bug,
            Self::Transport(_) => FaultOrigin::Environment,
            Self::Engine(error) => error.fault(),
            Self::Cuda(error) => error.fault(),
            Self::Timeout { .. } | Self::RankEnded { .. } => FaultOrigin::Peer,
        }
    }
}

/// Joins the ranks as in `0, 2, 5`.
fn join_ranks(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors, and the possible reactions of the training loop.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farandole_kernels::{DataType, ReduceOp};
use farandole_world::{FaultOrigin, ProcessSetId, Rank};

use crate::RequestHandle;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Result of a step of a process set; an error stops the engine.
pub(crate) type StepResult<T = ()> = Result<T, StopCause>;

/// Error of a refused or failed call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another operation of this rank in progress has the same name.
    #[error("a tensor of this name is still in flight in process set {set}: {tensor}")]
    DuplicateName {
        /// The process set.
        set: ProcessSetId,
        /// The tensor.
        tensor: Arc<str>,
    },
    /// There is no such process set.
    #[error("no such process set: {set}")]
    UnknownSet {
        /// The process set.
        set: ProcessSetId,
    },
    /// This rank is not in the process set.
    #[error("rank {rank} is not a member of process set {set}")]
    NotAMember {
        /// This rank.
        rank: Rank,
        /// The process set.
        set: ProcessSetId,
    },
    /// The root of a broadcast is not in the process set.
    #[error("root rank {root} is not a member of process set {set}")]
    RootNotInSet {
        /// The root, a global rank.
        root: Rank,
        /// The process set.
        set: ProcessSetId,
    },
    /// This rank has joined, and other ranks have not joined yet.
    #[error("this rank has joined in process set {set}: {tensor} must wait until all ranks have")]
    Joined {
        /// The process set.
        set: ProcessSetId,
        /// The tensor.
        tensor: Arc<str>,
    },
    /// The size of a buffer differs from the size of its shape.
    #[error("{which} of {tensor} must have {expected} bytes: {actual}")]
    BufferSize {
        /// Input or output.
        which: &'static str,
        /// The tensor.
        tensor: Arc<str>,
        /// Bytes by shape and dtype.
        expected: u64,
        /// Bytes of the buffer.
        actual: u64,
    },
    /// Operations on rows need a first dimension.
    #[error("{operation} needs at least one dimension: {tensor}")]
    Scalar {
        /// The operation.
        operation: &'static str,
        /// The tensor.
        tensor: Arc<str>,
    },
    /// The operation does not support this reduction.
    #[error("{operation} of {tensor} takes Average or Sum: {op:?}")]
    Reduction {
        /// The operation.
        operation: &'static str,
        /// The reduction.
        op: ReduceOp,
        /// The tensor.
        tensor: Arc<str>,
    },
    /// The element type does not support scale factors.
    #[error("{operation} of {tensor} takes no scale factors: {dtype}")]
    Factors {
        /// The operation.
        operation: &'static str,
        /// The element type.
        dtype: DataType,
        /// The tensor.
        tensor: Arc<str>,
    },
    /// An all-to-all's splits do not fit the tensor or the process set.
    #[error("splits of {tensor}: {reason}")]
    Splits {
        /// The tensor.
        tensor: Arc<str>,
        /// The expected and the actual value.
        reason: String,
    },
    /// The group is empty, or its members are in different process sets.
    #[error(
        "a group needs at least one member and a single process set: {members} members in {sets} \
         sets"
    )]
    Group {
        /// Members given.
        members: usize,
        /// Process sets they name.
        sets: usize,
    },
    /// A buffer is on a device that the engine does not know.
    #[error("no such device for {tensor}: {ordinal}")]
    UnknownDevice {
        /// The tensor.
        tensor: Arc<str>,
        /// The ordinal.
        ordinal: u32,
    },
    /// The handle was never issued, or its result was already taken.
    #[error("unknown handle, or its result was already taken: {handle}")]
    UnknownHandle {
        /// The handle.
        handle: RequestHandle,
    },
    /// The ranks submitted different requests under one name. `wait` returns it on every submitting
    /// rank; the engine continues.
    #[error("{text}")]
    Mismatch {
        /// The tensor.
        tensor: Arc<str>,
        /// The difference, then the submission of every rank.
        text: Arc<str>,
    },
    /// The operation is not defined for this element type. `wait` returns it on every rank; the
    /// engine continues.
    #[error("{operation} of {tensor} failed: {cause}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The tensor.
        tensor: Arc<str>,
        /// The reason.
        cause: Arc<farandole_collectives::Error>,
    },
    /// The engine stopped while this operation was in flight.
    #[error("{operation} of {tensor} failed: {cause}")]
    Failed {
        /// The operation.
        operation: &'static str,
        /// The tensor.
        tensor: Arc<str>,
        /// The reason why the engine stopped.
        cause: Arc<StopCause>,
    },
    /// The engine had stopped before this call.
    #[error("the engine has stopped: {cause}")]
    Stopped {
        /// The reason.
        cause: Arc<StopCause>,
    },
    /// This process is a fork of the process that started the engine.
    #[error(
        "process {pid} was forked from process {parent}, which started the engine: start workers \
         with the spawn or forkserver method"
    )]
    Forked {
        /// The calling process.
        pid: u32,
        /// The process that owns the engine.
        parent: u32,
    },
    /// The file of a timeline could not be written.
    #[error("cannot write the timeline: {path}: {reason}")]
    Timeline {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The world, the process sets and the links given to the start do not fit together.
    #[error("cannot start the engine: {reason}")]
    Start {
        /// The reason.
        reason: String,
    },
}

/// The reason why an engine stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopCause {
    /// `shutdown` was called on this rank.
    #[error("the engine was shut down on this rank")]
    ShutDown,
    /// A peer shut its engine down in order.
    #[error("rank {rank} on {host} shut down")]
    Departed {
        /// The peer.
        rank: Rank,
        /// Its host.
        host: String,
    },
    /// The process set was removed.
    #[error("process set {set} was removed")]
    Removed {
        /// Its number.
        set: ProcessSetId,
    },
    /// A link or a device failed.
    #[error(transparent)]
    Collective(#[from] farandole_collectives::Error),
    /// A link failed.
    #[error(transparent)]
    Transport(#[from] farandole_transport::Error),
    /// Another rank stopped and sent the reason.
    #[error("rank {rank} on {host} stopped: {text}")]
    Reported {
        /// The rank that stopped.
        rank: Rank,
        /// Its host.
        host: String,
        /// Its reason.
        text: String,
    },
    /// The ranks put a tensor into different groups. Every rank gets the same error.
    #[error("{text}")]
    Disagreement {
        /// The difference, then the submission of every rank.
        text: String,
    },
    /// An operation took longer than the collective timeout.
    #[error("{operation} of {tensor} timed out after {elapsed:.1?}, the limit being {limit:?}: \
             {}", MissingRanksText(.missing))]
    Deadline {
        /// The operation.
        operation: &'static str,
        /// The tensor.
        tensor: Arc<str>,
        /// Time since its submission.
        elapsed: Duration,
        /// The collective timeout.
        limit: Duration,
        /// Ranks that this rank knows have not submitted the operation; `None` if all have
        /// submitted it and the transfer was slow.
        missing: Option<Vec<Rank>>,
    },
    /// The driving thread panicked, which is a bug; its message is on stderr.
    #[error("the engine panicked (see stderr for the location): this is a bug")]
    Panicked,
    /// A peer sent an invalid control message.
    #[error("bad control message from rank {rank}: {reason}")]
    Protocol {
        /// The peer.
        rank: Rank,
        /// The reason.
        reason: String,
    },
}

struct MissingRanksText<'a>(&'a Option<Vec<Rank>>);

impl fmt::Display for MissingRanksText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("all ranks had come"),
            Some(missing) if missing.is_empty() => {
                f.write_str("ranks that did not come are not known")
            }
            Some(missing) => {
                f.write_str("ranks that did not come:")?;
                missing.iter().try_for_each(|rank| write!(f, " {rank}"))
            }
        }
    }
}

impl Error {
    /// Returns the origin of the fault, which decides how a trainer may react.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::DuplicateName { .. }
            | Self::UnknownSet { .. }
            | Self::NotAMember { .. }
            | Self::RootNotInSet { .. }
            | Self::BufferSize { .. }
            | Self::Joined { .. }
            | Self::Scalar { .. }
            | Self::Reduction { .. }
            | Self::Factors { .. }
            | Self::Splits { .. }
            | Self::Group { .. }
            | Self::UnknownDevice { .. }
            | Self::UnknownHandle { .. }
            | Self::Mismatch { .. }
            | Self::Unsupported { .. }
            | Self::Timeline { .. }
            | Self::Forked { .. } => FaultOrigin::Usage,
            Self::Failed { cause, .. } => cause.fault(),
            // A call after the own shutdown is a mistake of the program and no failure of a peer.
            Self::Stopped { cause } if matches!(**cause, StopCause::ShutDown) => FaultOrigin::Usage,
            Self::Stopped { cause } => cause.fault(),
            Self::Start { .. } => FaultOrigin::Environment,
        }
    }
}

impl StopCause {
    /// Returns whether this is no failure: a rank has departed or a set was removed.
    pub(crate) fn is_orderly_stop(&self) -> bool {
        matches!(self, Self::ShutDown | Self::Departed { .. } | Self::Removed { .. })
    }

    /// Returns the origin of the fault, which decides how a trainer may react.
    pub fn fault(&self) -> FaultOrigin {
        match self {
            Self::ShutDown | Self::Departed { .. } => FaultOrigin::Membership,
            Self::Removed { .. } | Self::Disagreement { .. } => FaultOrigin::Usage,
            Self::Collective(error) => match error {
                farandole_collectives::Error::Transport(_)
                | farandole_collectives::Error::Lost { .. } => FaultOrigin::Peer,
                farandole_collectives::Error::Device { .. } => FaultOrigin::Environment,
                _ => FaultOrigin::Bug,
            },
            Self::Transport(_) | Self::Reported { .. } | Self::Deadline { .. } => FaultOrigin::Peer,
            Self::Protocol { .. } | Self::Panicked => FaultOrigin::Bug,
        }
    }
}

const _: () = assert!(size_of::<Error>() < 128, "errors travel in every result of the hot path");

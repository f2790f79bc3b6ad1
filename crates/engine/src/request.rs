// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests of callers, and their results.

use std::fmt;
use std::sync::Arc;

use farandole_collectives::{Buffer, DataType, Event, Memory, ReduceOp, Room};
use farandole_world::{ProcessSetId, Rank};

use crate::signature::Topic;

/// Names a submitted request until its result is taken. Numbers grow and are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A collective.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// `output = postscale * reduce(prescale * input)`.
    Allreduce {
        /// The operation that combines elements; `Average` divides by the size of the process set.
        op: ReduceOp,
        /// Multiplies inputs.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
    },
    /// The root's input becomes the output of all ranks.
    Broadcast {
        /// The sender, a rank of the world also inside a process set.
        root: Rank,
    },
    /// Inputs concatenated along the first dimension in rank order; first dimensions may differ.
    Allgather,
    /// Rows of the input dealt out to the members in set order; the output holds what they dealt to
    /// this one.
    Alltoall {
        /// Rows for each member, all rows of the input; `None`: as many for each.
        splits: Option<Vec<u64>>,
    },
    /// Like `Allreduce` by `Average` or `Sum`, but every member gets its own rows only: rows are
    /// dealt out evenly in set order, and what is left over goes to the first members, one row
    /// each.
    Reducescatter {
        /// The operation that combines elements; `Average` divides by the size of the process set.
        op: ReduceOp,
        /// Multiplies inputs.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
    },
    /// Nothing but the meeting.
    Barrier,
    /// This rank has nothing more to do until all ranks have joined: meanwhile it takes part in
    /// their reductions without changing the results, though averages count it. It may submit
    /// nothing else.
    Join {
        /// Also in gathers, with no rows, and in broadcasts from ranks that have not joined.
        allow_gather: bool,
    },
    /// A meeting about a change of the process sets: it fails on all ranks when they do not ask for
    /// the same.
    Change(Change),
}

/// The request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A set of these ranks, ascending.
    Add(Vec<Rank>),
    /// No set of this number any more.
    Remove(ProcessSetId),
    /// Sets from the start: how many, and whether there may be others later.
    Begin {
        /// Their number.
        sets: usize,
        /// Whether there may be others later.
        dynamic: bool,
    },
    /// Outcome on this rank of a change that was agreed on before: nothing, or the reason why it
    /// failed.
    Outcome(Option<String>),
}

impl Change {
    pub(crate) fn spell(&self) -> (Topic, Vec<u64>) {
        match self {
            Self::Add(ranks) => (Topic::Add, ranks.iter().map(|rank| rank.0.into()).collect()),
            Self::Remove(set) => (Topic::Remove, vec![set.0.into()]),
            Self::Begin { sets, dynamic } => {
                (Topic::Begin, vec![*sets as u64, u64::from(*dynamic)])
            }
            Self::Outcome(reason) => {
                let text = reason.as_deref().unwrap_or_default();
                (Topic::Outcome, text.bytes().map(u64::from).collect())
            }
        }
    }
}

impl Kind {
    /// Lower-case name, as in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Allreduce { .. } => "allreduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Allgather => "allgather",
            Self::Alltoall { .. } => "alltoall",
            Self::Reducescatter { .. } => "reducescatter",
            Self::Barrier => "barrier",
            Self::Join { .. } => "join",
            Self::Change(_) => "process set change",
        }
    }
}

/// One rank's part in one collective.
pub struct Request {
    /// Equal on all ranks; unique among the operations this rank has in flight in the set.
    pub name: String,
    /// The collective.
    pub kind: Kind,
    /// Element type.
    pub dtype: DataType,
    /// Dimensions of `input`, row-major.
    pub shape: Vec<u64>,
    /// Read only; may be the output too.
    pub input: Buffer,
    /// Memory of the result. `None`: the engine allocates host memory and hands it over in the
    /// [`Completion`].
    pub output: Option<Buffer>,
    /// The process set.
    pub process_set: ProcessSetId,
    /// Work on the device that must be done before `input` is read and `output` written.
    pub ready: Option<Arc<dyn Event>>,
}

impl Request {
    /// A barrier among the members of `process_set`.
    pub fn barrier(name: impl Into<String>, process_set: ProcessSetId) -> Self {
        Self::meeting(name.into(), Kind::Barrier, process_set)
    }

    /// An agreement of all ranks on a change of the process sets.
    pub fn change(name: impl Into<String>, change: Change) -> Self {
        Self::meeting(name.into(), Kind::Change(change), ProcessSetId::GLOBAL)
    }

    /// See [`Kind::Join`].
    pub fn join(name: impl Into<String>, allow_gather: bool) -> Self {
        Self::meeting(name.into(), Kind::Join { allow_gather }, ProcessSetId::GLOBAL)
    }

    fn meeting(name: String, kind: Kind, process_set: ProcessSetId) -> Self {
        let nothing = Memory::new(0).buffer();
        Self {
            name,
            kind,
            dtype: DataType::U8,
            shape: vec![0],
            input: nothing.clone(),
            output: Some(nothing),
            process_set,
            ready: None,
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("process_set", &self.process_set)
            .finish_non_exhaustive()
    }
}

/// The result of a request.
#[derive(Clone, Default)]
pub struct Completion {
    /// The output, when the request brought none; host memory.
    pub output: Option<Memory>,
    /// The output instead, where a communicator among devices has made it.
    pub room: Option<Arc<dyn Room>>,
    /// Allgather: first dimension of each member's input, in set order. Alltoall: rows received
    /// from each member. Empty otherwise.
    pub rows: Vec<u64>,
    /// Join: the rank that came last, the same on all ranks.
    pub last: Option<Rank>,
    /// The result is there once this is reached; `None` when it is there already. Its users let
    /// their stream wait.
    pub reached: Option<Arc<dyn Event>>,
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("output", &self.output)
            .field("room", &self.room.as_ref().map(|room| room.buffer()))
            .field("rows", &self.rows)
            .field("last", &self.last)
            .field("reached", &self.reached.as_ref().map(|event| event.ordinal()))
            .finish()
    }
}

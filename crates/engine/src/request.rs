// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests of callers, and their results.

use std::fmt;
use std::sync::Arc;

use farandole_collectives::{DeviceEvent, ResultMemory};
use farandole_kernels::{Buffer, DataType, HostMemory, ReduceOp};
use farandole_negotiation::ChangeTopic;
use farandole_world::{ProcessSetId, Rank};

/// Identifier of a submitted request until its result is taken. Numbers grow and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestHandle(pub u64);

impl fmt::Display for RequestHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Kind of a collective.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestKind {
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
        /// The sender, a rank of the world even in a process set.
        root: Rank,
    },
    /// The inputs are concatenated along the first dimension in rank order; first dimensions may
    /// differ.
    Allgather,
    /// The rows of the input are split among the members in set order. The output holds the rows
    /// that the members sent to this rank.
    Alltoall {
        /// Number of rows for each member; their sum is the number of rows of the input. `None`:
        /// the same number for each.
        splits: Option<Vec<u64>>,
    },
    /// Like `Allreduce` with `Average` or `Sum`, but every member gets only its own rows. Rows are
    /// split evenly in set order; each of the first members gets one of the rows left over.
    Reducescatter {
        /// The operation that combines elements; `Average` divides by the size of the process set.
        op: ReduceOp,
        /// Multiplies inputs.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
    },
    /// Every rank waits until all ranks have submitted; no data moves.
    Barrier,
    /// This rank has no more work until all ranks have joined. Meanwhile it takes part in the
    /// reductions of other ranks without changing their results, but averages count it. It may
    /// submit nothing else.
    Join {
        /// Whether it also takes part in gathers, with no rows, and in broadcasts from ranks that
        /// have not joined.
        allow_gather: bool,
    },
    /// Agreement on a change of the process sets; it fails on all ranks if their changes differ.
    Change(ProcessSetChange),
}

/// A change of the process sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessSetChange {
    /// Adds a set of these ranks, ascending.
    Add(Vec<Rank>),
    /// Removes the set of this number.
    Remove(ProcessSetId),
    /// Number of sets at the start, and whether sets may be added later.
    Begin {
        /// Number of sets.
        sets: usize,
        /// Whether sets may be added later.
        dynamic: bool,
    },
    /// Outcome on this rank of an agreed change: `None`, or the reason why it failed.
    Outcome(Option<String>),
}

impl ProcessSetChange {
    pub(crate) fn encode_topic_and_numbers(&self) -> (ChangeTopic, Vec<u64>) {
        match self {
            Self::Add(ranks) => {
                (ChangeTopic::Add, ranks.iter().map(|rank| rank.0.into()).collect())
            }
            Self::Remove(set) => (ChangeTopic::Remove, vec![set.0.into()]),
            Self::Begin { sets, dynamic } => {
                (ChangeTopic::Begin, vec![*sets as u64, u64::from(*dynamic)])
            }
            Self::Outcome(reason) => {
                let text = reason.as_deref().unwrap_or_default();
                // The negotiation compares numbers, so different reasons must have different
                // numbers.
                (ChangeTopic::Outcome, text.bytes().map(u64::from).collect())
            }
        }
    }
}

impl RequestKind {
    /// Returns the lower-case name, as in messages.
    pub const fn operation_name(&self) -> &'static str {
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
pub struct CollectiveRequest {
    /// Name of the operation: equal on all ranks, and unique among this rank's operations in
    /// progress in the set.
    pub name: String,
    /// The collective.
    pub kind: RequestKind,
    /// Element type.
    pub dtype: DataType,
    /// Dimensions of `input`, row-major.
    pub shape: Vec<u64>,
    /// Memory of the input, which is only read. It may be the output too.
    pub input: Buffer,
    /// Memory of the result. `None`: the engine allocates memory and returns it in the
    /// [`RequestCompletion`].
    pub output: Option<Buffer>,
    /// The process set.
    pub process_set: ProcessSetId,
    /// Work on the device that must be done before `input` is read and `output` written.
    pub ready: Option<Arc<dyn DeviceEvent>>,
    /// Operations of a higher priority are executed first, as soon as all ranks have submitted
    /// them. The values of the coordinator, the first rank of the set, count.
    pub priority: i32,
}

impl CollectiveRequest {
    /// Returns a barrier among the members of `process_set`.
    pub fn barrier(name: impl Into<String>, process_set: ProcessSetId) -> Self {
        Self::new_dataless_request(name.into(), RequestKind::Barrier, process_set)
    }

    /// Returns an agreement of all ranks on a change of the process sets.
    pub fn process_set_change(name: impl Into<String>, change: ProcessSetChange) -> Self {
        Self::new_dataless_request(name.into(), RequestKind::Change(change), ProcessSetId::GLOBAL)
    }

    /// Returns a join; see [`RequestKind::Join`].
    pub fn join(name: impl Into<String>, allow_gather: bool) -> Self {
        Self::new_dataless_request(
            name.into(),
            RequestKind::Join { allow_gather },
            ProcessSetId::GLOBAL,
        )
    }

    fn new_dataless_request(name: String, kind: RequestKind, process_set: ProcessSetId) -> Self {
        let nothing = HostMemory::new(0).as_buffer();
        Self {
            name,
            kind,
            dtype: DataType::U8,
            shape: vec![0],
            input: nothing.clone(),
            // Without an output, the engine would allocate one.
            output: Some(nothing),
            process_set,
            ready: None,
            priority: 0,
        }
    }
}

impl fmt::Debug for CollectiveRequest {
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
pub struct RequestCompletion {
    /// Host memory of the output, if the request had no output.
    pub output: Option<HostMemory>,
    /// Device memory of the output, if a communicator among devices has allocated it.
    pub room: Option<Arc<dyn ResultMemory>>,
    /// Allgather: first dimension of each member's input, in set order. Alltoall: rows received
    /// from each member. Empty otherwise.
    pub rows: Vec<u64>,
    /// Join: the rank that came last, the same on all ranks.
    pub last: Option<Rank>,
    /// Event after which the result is valid; `None` if it is valid already. Users of the result
    /// make their stream wait for it.
    pub reached: Option<Arc<dyn DeviceEvent>>,
}

impl fmt::Debug for RequestCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("output", &self.output)
            .field("room", &self.room.as_ref().map(|room| room.as_buffer()))
            .field("rows", &self.rows)
            .field("last", &self.last)
            .field("reached", &self.reached.as_ref().map(|event| event.device_ordinal()))
            .finish()
    }
}

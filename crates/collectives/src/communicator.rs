// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The traits that hide the differences between hosts and accelerators from the engine.

use std::sync::Arc;
use std::time::Duration;

use farandole_world::Rank;

use crate::{Buffer, DataType, Error, Memory, ReduceOp, Result, Stream};

/// Names an operation between its submission and its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// One tensor of an operation: read from `input`, written to `output`. They may be the same buffer.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Read only.
    pub input: Buffer,
    /// Written once the operation completes.
    pub output: Buffer,
}

/// An operation of a communicator. Every member submits equal operations in the same order; sizes
/// that may differ between members are spelled out for all of them. Member numbers are positions in
/// the communicator.
#[derive(Clone, Debug)]
pub enum Operation {
    /// `output = post * reduce(pre * input)` per element; fused over all segments (a gather list,
    /// no packing).
    Allreduce {
        /// Element type of every segment.
        dtype: DataType,
        /// The operation that combines elements; `Average` divides by the number of members.
        op: ReduceOp,
        /// Multiplies inputs before the reduction.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
        /// The tensors.
        segments: Vec<Segment>,
    },
    /// Copies the root's `input` to every `output`; the root's output is written too unless it is
    /// its input.
    Broadcast {
        /// Member that sends.
        root: usize,
        /// The tensors.
        segments: Vec<Segment>,
    },
    /// Concatenates every member's `input` in member order into every `output`, for each segment by
    /// itself.
    Allgather {
        /// The tensors; `output` holds the sum of the counts.
        segments: Vec<Segment>,
        /// Bytes per member, for each segment.
        bytes: Vec<Vec<usize>>,
    },
    /// Sends a block of `input` to every member and receives one of each, end to end in member
    /// order.
    Alltoall {
        /// `input` holds the sum of `sends`, `output` the sum of `receives`; they must not overlap.
        segment: Segment,
        /// Bytes to each member.
        sends: Vec<usize>,
        /// Bytes from each member.
        receives: Vec<usize>,
    },
    /// Like `Allreduce`, but every member gets its own part of each segment only. An output may be
    /// the own part of its input; otherwise they must not overlap.
    Reducescatter {
        /// Element type of every segment.
        dtype: DataType,
        /// The operation that combines elements: anything but `Adasum`.
        op: ReduceOp,
        /// Multiplies inputs before the reduction.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
        /// The tensors; `input` holds all parts in member order, `output` this member's part.
        segments: Vec<Segment>,
        /// Bytes of each member's part, for each segment.
        bytes: Vec<Vec<usize>>,
    },
    /// Completes when every member has submitted it.
    Barrier,
}

/// Runs operations among a fixed set of members, in submission order. Nothing here blocks.
pub trait Communicator: Send {
    /// Returns the number of members.
    fn size(&self) -> usize;

    /// This process's position among them.
    fn member(&self) -> usize;

    /// Queues an operation.
    ///
    /// # Errors
    /// `Unsupported` for a combination the implementation lacks, `Shape` for buffers that do not
    /// fit it.
    fn submit(&mut self, token: Token, operation: Operation) -> Result<()>;

    /// Moves everything that can move; appends tokens of operations that completed. True when
    /// anything moved.
    ///
    /// # Errors
    /// The first failure of a link; the communicator is unusable afterwards.
    fn progress(&mut self, completed: &mut Vec<Token>) -> Result<bool>;

    /// Like [`Communicator::submit`], for an operation whose work on the device comes after
    /// `events`: the device waits for them, not the host.
    ///
    /// # Errors
    /// Like `submit`; `Device` where there is no device that could wait.
    fn submit_after(
        &mut self,
        token: Token,
        operation: Operation,
        events: Vec<Arc<dyn Event>>,
    ) -> Result<()> {
        match events.is_empty() {
            true => self.submit(token, operation),
            false => Err(Error::Shape {
                reason: "an operation on the host waits for no device".to_owned(),
            }),
        }
    }

    /// Returns whether members still find out whether they can have it; it counts as pending. Until
    /// then no caller asks what it carries or submits an operation.
    fn is_forming(&self) -> bool {
        false
    }

    /// Returns a remark for the user that is no failure; given once.
    fn remark(&mut self) -> Option<String> {
        None
    }

    /// Returns whether an operation is done as it is defined: the same answer on every member.
    fn carries(&self, _operation: &Operation) -> bool {
        true
    }

    /// Appends operations whose work was put on a device since, each with the event at which its
    /// results are there. They complete later; until then nothing but their device touches their
    /// buffers.
    fn launched(&mut self, _launched: &mut Vec<(Token, Arc<dyn Event>)>) {}

    /// Returns whether peers wait for progress of the own device that only a call of `progress`
    /// publishes. Operations may be complete here by then.
    fn is_awaited(&self) -> bool {
        false
    }

    /// Waits until launched work is done, for at most so long: before an orderly end.
    fn drain(&mut self, _limit: Duration) {}

    /// For an owner that makes no more progress: the memory of submitted operations is not touched
    /// any more. All later calls fail.
    fn abandon(&mut self) {}

    /// Returns memory of the communicator's device for a result of so many bytes, at least one:
    /// only operations submitted from now on may write it.
    ///
    /// # Errors
    /// `Device` when the device has none left; `Shape` where there is no device.
    fn room(&mut self, _bytes: usize) -> Result<Arc<dyn Room>> {
        Err(Error::Shape {
            reason: "an operation on the host has no memory of a device".to_owned(),
        })
    }

    /// Operations not completed.
    fn pending(&self) -> usize;
}

/// Memory of a device that an operation fills; the device gets it back when the bytes were fetched,
/// or this was dropped.
pub trait Room: Send + Sync {
    /// Returns the memory, for the operation alone: to be used no longer than this lives.
    fn buffer(&self) -> Buffer;

    /// Lets a framework's stream move the bytes to memory of the same device, after `reached`, and
    /// free this memory behind that; the host waits for nothing. Once only.
    ///
    /// # Errors
    /// `Shape` when `to` is no memory for all the bytes there, or they were fetched before;
    /// `Device`.
    fn fetch(&self, to: &Buffer, reached: Option<&Arc<dyn Event>>, stream: Stream) -> Result<()>;
}

/// A place that has memory of its own. Host memory needs none; testkit has one over host memory.
pub trait Device: Send + Sync {
    /// Ordinal as the framework counts.
    fn ordinal(&self) -> u32;

    /// Host memory that transfers fast to and from this device: at least so many bytes, with
    /// anything in them.
    ///
    /// # Errors
    /// `Device` when it is out of memory.
    fn staging(&self, bytes: usize) -> Result<Memory>;

    /// Starts copying `from` to `to`, one of them on this device, after all copies in that
    /// direction queued before.
    ///
    /// # Errors
    /// `Device` when the copy cannot be queued, `Shape` when the sizes differ.
    fn copy(&self, from: &Buffer, to: &Buffer) -> Result<Arc<dyn Event>>;

    /// Like [`Device::copy`], several at once, all in one direction: the event comes after all of
    /// them. At least one.
    ///
    /// # Errors
    /// Like `copy`, `Shape` also where there is nothing to copy.
    fn copy_all(&self, pairs: &[(Buffer, Buffer)]) -> Result<Arc<dyn Event>> {
        let mut last = None;
        for (from, to) in pairs {
            last = Some(self.copy(from, to)?);
        }
        last.ok_or_else(|| Error::Shape { reason: "nothing is to be copied".to_owned() })
    }
}

/// A point in a device's work.
pub trait Event: Send + Sync {
    /// Returns whether everything before it is done.
    ///
    /// # Errors
    /// `Device` when the work failed.
    fn is_ready(&self) -> Result<bool>;

    /// Returns the device.
    fn ordinal(&self) -> u32;

    /// Makes later work on a stream of the device wait for this. The host does not wait.
    ///
    /// # Errors
    /// `Device` when the device cannot.
    fn hold(&self, stream: Stream) -> Result<()>;
}

/// Makes communicators among devices, one of each member. What members know of each other they tell
/// by cards.
pub trait Fabric: Send + Sync {
    /// This member's card for the device, at most [`CARD`] bytes; empty if it cannot take part.
    fn card(&self, device: u32) -> Vec<u8>;

    /// Returns the reason, if any, why members with these cards can have no communicator. The
    /// answer follows from the cards alone. This member is the one at `place`.
    fn obstacle(&self, cards: &[&[u8]], members: &[Rank], place: usize) -> Option<String>;

    /// Returns a remark for the user about the communicator of members with these cards, if they
    /// can have one.
    fn remark(&self, _cards: &[&[u8]], _members: &[Rank], _place: usize) -> Option<String> {
        None
    }

    /// Returns a name for a new communicator of members with these cards, less than [`CARD`] bytes.
    /// Asked of the first member alone, and only when nothing is in the way: with it a port may be
    /// opened, which forming the communicator closes.
    ///
    /// # Errors
    /// Why there is none.
    fn name(&self, cards: &[&[u8]]) -> Result<Vec<u8>, String>;

    /// Begins to form the communicator of this name, in which this is the member `place` of `size`;
    /// `patience` is how long that, and each operation, may take.
    ///
    /// # Errors
    /// `Device`, `Lost`.
    fn form(
        &self,
        device: u32,
        name: &[u8],
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Box<dyn Communicator>>;
}

/// Bytes of a card.
pub const CARD: usize = 192;

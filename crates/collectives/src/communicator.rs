// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The traits that hide the differences between hosts and accelerators from the engine.

use std::sync::Arc;
use std::time::Duration;

use farandole_kernels::{Buffer, DataType, DeviceStream, HostMemory, ReduceOp};
use farandole_world::Rank;

use crate::{Error, Result};

/// Identifier of an operation between its submission and its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationToken(pub u64);

/// One tensor of an operation, which reads `input` and writes `output`. Both may be the same
/// buffer.
#[derive(Clone, Debug)]
pub struct TensorSegment {
    /// Buffer that the operation reads.
    pub input: Buffer,
    /// Buffer that holds the result when the operation completes.
    pub output: Buffer,
}

/// Operation of a communicator. Every member submits equal operations in the same order. If a size
/// may differ between members, the operation holds this size for every member. Member numbers are
/// positions in the communicator.
#[derive(Clone, Debug)]
pub enum CollectiveOperation {
    /// `output = post * reduce(pre * input)` per element, fused over all segments (a gather list,
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
        segments: Vec<TensorSegment>,
    },
    /// Copies the root's `input` to every `output`. The root's output is also written, unless it is
    /// the root's input.
    Broadcast {
        /// Sending member.
        root: usize,
        /// The tensors.
        segments: Vec<TensorSegment>,
    },
    /// Concatenates every member's `input` in member order into every `output`, separately for each
    /// segment.
    Allgather {
        /// The tensors; `output` holds the sum of the counts.
        segments: Vec<TensorSegment>,
        /// Bytes per member, for each segment.
        bytes: Vec<Vec<usize>>,
    },
    /// Sends one block of `input` to every member and receives one block from each, end to end in
    /// member order.
    Alltoall {
        /// The tensor: `input` has as many bytes as the sum of `sends`, `output` as the sum of
        /// `receives`. They must not overlap.
        segment: TensorSegment,
        /// Bytes to each member.
        sends: Vec<usize>,
        /// Bytes from each member.
        receives: Vec<usize>,
    },
    /// Like `Allreduce`, but every member gets only its own part of each segment. An output may be
    /// this member's part of its input; otherwise input and output must not overlap.
    Reducescatter {
        /// Element type of every segment.
        dtype: DataType,
        /// The operation that combines elements: any except `Adasum`.
        op: ReduceOp,
        /// Multiplies inputs before the reduction.
        prescale: f64,
        /// Multiplies the result.
        postscale: f64,
        /// The tensors; `input` holds all parts in member order, `output` this member's part.
        segments: Vec<TensorSegment>,
        /// Bytes of each member's part, for each segment.
        bytes: Vec<Vec<usize>>,
    },
    /// Completes when every member has submitted the barrier.
    Barrier,
}

/// Runs operations among a fixed set of members, in submission order. No method blocks, except
/// `wait_for_launched_operations`.
pub trait Communicator: Send {
    /// Returns the number of members.
    fn member_count(&self) -> usize;

    /// Returns this process's position among the members.
    fn member_index(&self) -> usize;

    /// Queues an operation.
    ///
    /// # Errors
    /// `Unsupported` for a combination that the implementation lacks, `Shape` for buffers that do
    /// not fit the operation.
    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> Result<()>;

    /// Makes all progress that is possible and appends the tokens of the operations that completed.
    /// Returns true when there was any progress.
    ///
    /// # Errors
    /// The first failure of a link; the communicator is unusable afterwards.
    fn make_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool>;

    /// Like [`Communicator::submit_operation`], for an operation whose work on the device must
    /// follow `events`. The device waits for the events, not the host.
    ///
    /// # Errors
    /// Like `submit_operation`; `Shape` if this communicator has no device that could wait.
    fn submit_after_events(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
        events: Vec<Arc<dyn DeviceEvent>>,
    ) -> Result<()> {
        match events.is_empty() {
            true => self.submit_operation(token, operation),
            false => Err(Error::Shape {
                reason: "an operation on the host waits for no device".to_owned(),
            }),
        }
    }

    /// Returns whether members are still finding out whether they can form the communicator. The
    /// communicator then counts as pending: no caller asks `can_execute` or submits an operation.
    fn is_forming(&self) -> bool {
        false
    }

    /// Returns a notice for the user that is not a failure. Each notice is returned once.
    fn take_user_notice(&mut self) -> Option<String> {
        None
    }

    /// Returns whether the communicator can execute an operation as it is defined. The answer is
    /// the same on every member.
    fn can_execute(&self, _operation: &CollectiveOperation) -> bool {
        true
    }

    /// Appends the operations that were launched on a device since the last call, each with the
    /// event after which its results are available. These operations complete later; until then
    /// only their device touches their buffers.
    fn take_launched_operations(
        &mut self,
        _launched: &mut Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    ) {
    }

    /// Returns whether peers wait for progress of this device that only a call of `make_progress`
    /// publishes. The operations may already be complete on this member.
    fn has_waiting_peers(&self) -> bool {
        false
    }

    /// Waits until launched work is done, for at most `limit`. Called before an orderly shutdown.
    fn wait_for_launched_operations(&mut self, _limit: Duration) {}

    /// Abandons all submitted operations: their memory is not touched any more. For an owner that
    /// makes no more progress. All later calls fail.
    fn abandon_operations(&mut self) {}

    /// Returns `bytes` (at least 1) bytes of memory on the communicator's device for a result. Only
    /// operations submitted after this call may write this memory.
    ///
    /// # Errors
    /// `Device` when the device has no memory left; `Shape` if there is no device.
    fn allocate_result(&mut self, _bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        Err(Error::Shape {
            reason: "an operation on the host has no memory of a device".to_owned(),
        })
    }

    /// Returns the number of operations that are not completed.
    fn pending_count(&self) -> usize;
}

/// Device memory that an operation fills. The device gets the memory back when the bytes were
/// fetched or this handle was dropped.
pub trait ResultMemory: Send + Sync {
    /// Returns the memory as a buffer for the operation. The buffer must not be used after this
    /// handle was dropped.
    fn as_buffer(&self) -> Buffer;

    /// Queues on a framework's stream, after `reached`, a copy of the bytes to memory of the same
    /// device, and then the release of this memory. The host does not wait. Can be called only
    /// once.
    ///
    /// # Errors
    /// `Shape` when `to` does not have memory on this device for all bytes, or when the bytes were
    /// fetched before; `Device` when the device fails.
    fn copy_out_then_release(
        &self,
        to: &Buffer,
        reached: Option<&Arc<dyn DeviceEvent>>,
        stream: DeviceStream,
    ) -> Result<()>;
}

/// Device with separate memory. Operations on host memory need none; testkit has an implementation
/// over host memory.
pub trait Device: Send + Sync {
    /// Returns the ordinal of the device in the framework.
    fn device_ordinal(&self) -> u32;

    /// Returns host memory with fast transfers to and from this device: at least `bytes` bytes,
    /// with undefined content.
    ///
    /// # Errors
    /// `Device` when it is out of memory.
    fn allocate_staging(&self, bytes: usize) -> Result<HostMemory>;

    /// Starts to copy `from` to `to`. One of the two is on this device. The copy follows all copies
    /// in the same direction that were queued before.
    ///
    /// # Errors
    /// `Device` when the copy cannot be queued, `Shape` when the sizes differ.
    fn copy_async(&self, from: &Buffer, to: &Buffer) -> Result<Arc<dyn DeviceEvent>>;

    /// Like [`Device::copy_async`], for one or more copies in the same direction. The event follows
    /// all of them.
    ///
    /// # Errors
    /// Like `copy_async`, and `Shape` when `pairs` is empty.
    fn copy_all_async(&self, pairs: &[(Buffer, Buffer)]) -> Result<Arc<dyn DeviceEvent>> {
        let mut last = None;
        for (from, to) in pairs {
            // Copies in one direction run in order, so the last event covers all of them.
            last = Some(self.copy_async(from, to)?);
        }
        last.ok_or_else(|| Error::Shape { reason: "nothing is to be copied".to_owned() })
    }
}

/// Point in the work of a device.
pub trait DeviceEvent: Send + Sync {
    /// Returns whether all work before the event is done.
    ///
    /// # Errors
    /// `Device` when the work failed.
    fn is_ready(&self) -> Result<bool>;

    /// Returns the device.
    fn device_ordinal(&self) -> u32;

    /// Makes later work on a stream of the device wait for this event. The host does not wait.
    ///
    /// # Errors
    /// `Device` when the device fails.
    fn make_stream_wait(&self, stream: DeviceStream) -> Result<()>;
}

/// Forms communicators among devices, one device of each member. Members exchange their
/// capabilities as encoded bytes.
pub trait DeviceCommunicatorFactory: Send + Sync {
    /// Returns this member's encoded capabilities for the device, at most
    /// [`MAX_CAPABILITIES_BYTES`] bytes. Empty if the device cannot take part.
    fn device_capabilities(&self, device: u32) -> Vec<u8>;

    /// Returns the reason why members with these capabilities cannot form a communicator, if there
    /// is one. The answer depends only on `capabilities`, so it is the same on every member. This
    /// member is at position `own_member`.
    fn formation_obstacle(
        &self,
        capabilities: &[&[u8]],
        members: &[Rank],
        own_member: usize,
    ) -> Option<String>;

    /// Returns a notice for the user about the communicator of members with these capabilities, if
    /// they can form one.
    fn formation_notice(
        &self,
        _capabilities: &[&[u8]],
        _members: &[Rank],
        _own_member: usize,
    ) -> Option<String> {
        None
    }

    /// Returns a name of less than [`MAX_CAPABILITIES_BYTES`] bytes for a new communicator of
    /// members with these capabilities. Called only on the first member, and only if there is no
    /// obstacle, because the call may open a port that is closed when the communicator is formed.
    ///
    /// # Errors
    /// Text with the reason why no name could be created.
    fn create_communicator_id(&self, capabilities: &[&[u8]]) -> Result<Vec<u8>, String>;

    /// Begins to form the communicator with this name. `position` holds the index of this member
    /// and the number of members. `timeout` is the deadline of the formation and of each
    /// operation.
    ///
    /// # Errors
    /// `Device` when the device fails, `Lost` when members are lost.
    fn form_communicator(
        &self,
        device: u32,
        name: &[u8],
        position: (usize, usize),
        timeout: Duration,
    ) -> Result<Box<dyn Communicator>>;
}

/// Longest encoded capabilities of a member, in bytes.
pub const MAX_CAPABILITIES_BYTES: usize = 192;

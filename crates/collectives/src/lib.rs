// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Devices, communicators, and the algorithms of every operation.
//!
//! This crate combines tensors among ranks that are already connected. The engine is responsible
//! for names, matching, fusion and deadlines, the crate `transport` for connections, and the crate
//! `kernels` for buffers and arithmetic. No function here blocks, sleeps or starts a thread: the
//! engine polls a [`Communicator`], and each poll makes all progress that is possible.
//!
//! ```text
//!             Operation over Segments (a gather list: fused tensors are never packed)
//!                                      |  submit, progress
//!                             HostCommunicator                 one link to every other member
//!   Allreduce   direct: every member sends all to every member      1 step,  (P - 1) * N bytes sent by each
//!               doubling: first members of hosts swap partials      2 + log H steps of N
//!               pipeline: send | reduce | return, by chunks         2 steps, 2 * (P - 1) / P * N
//!               in place: each member reduces one part              2 rounds of a unit; one host, shared memory
//!               hierarchy: in the host | across | back, by chunks   4 steps, 2 * (H - 1) / H * N / L to other hosts
//!               halving: like hierarchy, but hosts swap halves      2 + 2 log H steps, the same bytes, log H other hosts
//!               adasum: halves of vectors, doubling distances       log P * (log P + 5) / 2 swaps
//!   Reducescatter   every member sends each part to its owner       1 step,  N - n
//!                   each host joins its members' inputs first       2 steps, (H - 1) * n to other hosts
//!   Broadcast   flat, binomial tree or chain, of hosts and in them  1, log P or P - 1 steps
//!   Allgather   every member sends its part to every member         1 or 2 steps; n to each other host
//!   Alltoall    every member sends a block to every member          1 step,  the blocks
//!   Barrier     every member to every member, or dissemination      1 or log P steps
//!                                      |
//!                kernels::BlockReducer: blocks of all members, in a fixed order, straight from the links' windows
//!
//! P members, H hosts, L members on each host; N bytes of the operation, n bytes of one member's part
//! ```
//!
//! The algorithm of an allreduce depends on its bytes and on the members' hosts
//! ([`CrossoverTable`]). With many hosts, it also depends on the latency between them, which all
//! members measure before the first such operation.
//!
//! Invariants:
//! - `CO-1`: every element is combined in one order: first the members of a host in member order,
//!   then pairs of neighbouring hosts until one value is left. If the number of hosts is no power
//!   of two, the first hosts are paired beforehand. Hosts exchange accumulators, which are neither
//!   rounded nor scaled, and the result is rounded once; only rounded sums of 16-bit floats
//!   (`ReduceOp::RoundedSum`) are also rounded on every host. So the bits are the same on every
//!   member. They depend only on the inputs and on the number of members on each host. They do not
//!   depend on the position in a fused list, the algorithm, the chunk size, the processor's
//!   instructions or the kind of links. Adasum combines members in pairs in the same order, each
//!   tensor separately.
//! - `CO-2`: operations complete on a member in the order of their submission. All data of one
//!   operation has left a link before the next operation begins on this link.
//! - `CO-3`: members that submit equal operations in the same order never deadlock, for all sizes
//!   of rings and tensors (the proofs are in the modules of `host`).
//! - `CO-4`: after the first failure of a link, every later call returns this failure; no operation
//!   completes with wrong bytes.
//! - `CO-5`: a buffer that does not fit its operation is refused at submission, before a byte
//!   moves.
//! - `CO-6`: an input that is not its own output is never written.

#![forbid(unsafe_code)]

mod communicator;
mod crossover;
mod error;
mod host;

pub use communicator::{
    CollectiveOperation, Communicator, Device, DeviceCommunicatorFactory, DeviceEvent,
    MAX_CAPABILITIES_BYTES, OperationToken, ResultMemory, TensorSegment,
};
pub use crossover::{AllreduceAlgorithm, CrossoverTable};
pub use error::{Error, Result};
pub use host::{HostCommunicator, simulation};

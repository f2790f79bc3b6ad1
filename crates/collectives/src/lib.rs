// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Buffers, dtypes, devices, communicators; the algorithms and kernels of every operation.
//!
//! It owns how tensors are combined among ranks that are already connected. It refuses to know who asks, by what name,
//! or when: naming, matching, fusing and deadlines are the engine's; connecting is transport's; frameworks give it
//! addresses. Nothing here blocks, sleeps or spawns: a [`Communicator`] is polled, and a poll moves what can move.
//!
//! ```text
//!             Operation over Segments (a gather list: fused tensors are never packed)
//!                                      |  submit, progress
//!                             HostCommunicator                 one link to every other member
//!   Allreduce   direct: everybody sends all to everybody            1 step,  (P - 1) * N bytes sent by each
//!               doubling: first members of hosts swap partials      2 + log H steps of N
//!               pipeline: post | reduce | fetch by chunks           2 steps, 2 * (P - 1) / P * N
//!               in place: everybody reduces a part of all      2 rounds of a unit, memory the members share, one host
//!               hierarchy: in the host | across | back, by chunks   4 steps, 2 * (H - 1) / H * N / L to other hosts
//!               adasum: halves of vectors, doubling distances       log P * (log P + 5) / 2 swaps
//!   Reducescatter   everybody sends everybody's part to it          1 step,  N - n
//!                   hosts with several members join it before       2 steps, (H - 1) * n to other hosts
//!   Broadcast   flat, binomial tree or chain, of hosts and in them  1, log P or P - 1 steps
//!   Allgather   everybody sends its own to everybody                1 or 2 steps; n to each other host
//!   Alltoall    everybody sends a block to everybody                1 step,  the blocks
//!   Barrier     everybody to everybody, or dissemination            1 or log P steps
//!                                      |
//!                kernel::Reducer: blocks of all members, in a fixed order, straight from the links' windows
//! ```
//!
//! Which algorithm an allreduce takes is a function of its bytes and of where members live ([`Crossover`]), never of
//! a measurement.
//!
//! Invariants:
//! - `CO-1`: every element is joined in one order: the members of a host one after the other in member order, then
//!   hosts in pairs of neighbours until one is left, those that exceed a power of two before the others. What passes
//!   between hosts are accumulators, neither rounded nor scaled; a result is rounded once. Rounded sums of 16-bit floats
//!   (`ReduceOp::RoundedSum`) are rounded in every host, too. So its bits are the same on
//!   every member, and depend on the inputs and on how many members live on which host alone: not on where in a fused
//!   list it lies, on the algorithm, on the size of chunks, on the instructions used or on the kind of links. Adasum
//!   joins members in pairs in the same way, for each tensor by itself.
//! - `CO-2`: operations complete on a member in the order of their submission, and every link is drained of one before
//!   the next begins.
//! - `CO-3`: no set of members that submitted equal operations in the same order can wait for each other forever,
//!   whatever the size of rings and tensors (the proofs are in the modules of `host`).
//! - `CO-4`: the first failure of a link is repeated by every later call; no operation completes with wrong bytes.
//! - `CO-5`: what a buffer does not fit is refused at submission, before a byte moves.
//! - `CO-6`: an input that is not its own output is never written.

#![deny(unsafe_code)]

mod buffer;
mod communicator;
pub mod compress;
mod crossover;
mod dtype;
mod error;
mod host;
pub mod kernel;

pub use buffer::{Buffer, Memory, Place, Stream, copy_past_caches};
pub use communicator::{CARD, Communicator, Device, Event, Fabric, Operation, Room, Segment, Token};
pub use crossover::{Algorithm, Crossover};
pub use dtype::{DataType, ReduceOp};
pub use error::{Error, Result};
pub use host::HostCommunicator;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Buffers, dtypes, devices, communicators; the algorithms and kernels of every operation.
//!
//! Owns the combination of tensors among ranks that are already connected. The engine is
//! responsible for names, matching, fusion and deadlines, the crate `transport` for connections.
//! Frameworks pass addresses. Nothing here blocks, sleeps or spawns: a [`Communicator`] is polled,
//! and each poll makes all progress that is possible.
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
//!               halving: as hierarchy, hosts swap halves             2 + 2 log H steps, the same bytes, log H other hosts
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
//! The algorithm of an allreduce depends on its bytes and on the hosts of the members
//! ([`Crossover`]), never on a measurement.
//!
//! Invariants:
//! - `CO-1`: every element is combined in one order: first the members of a host in member order,
//!   then pairs of neighbouring hosts until one is left; hosts beyond a power of two come first.
//!   Hosts exchange accumulators, which are neither rounded nor scaled, and the result is rounded
//!   once. Rounded sums of 16-bit floats (`ReduceOp::RoundedSum`) are rounded on every host, too.
//!   So the bits are the same on every member. They depend only on the inputs and on the number of
//!   members on each host, not on the place in a fused list, the algorithm, the size of chunks, the
//!   processor's instructions or the kind of links. Adasum combines members in pairs in the same
//!   way, for each tensor by itself.
//! - `CO-2`: operations complete on a member in the order of their submission, and all data of one
//!   operation has left a link before the next operation begins on it.
//! - `CO-3`: members that submit equal operations in the same order never deadlock, whatever the
//!   size of rings and tensors (the proofs are in the modules of `host`).
//! - `CO-4`: after the first failure of a link, every later call returns it; no operation completes
//!   with wrong bytes.
//! - `CO-5`: a buffer that does not fit its operation is refused at submission, before a byte
//!   moves.
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

pub use buffer::{Buffer, LARGE, Memory, Place, Stream, copy_past_caches, prefer_large_pages};
pub use communicator::{
    CARD, Communicator, Device, Event, Fabric, Operation, Room, Segment, Token,
};
pub use crossover::{Algorithm, Crossover};
pub use dtype::{DataType, ReduceOp};
pub use error::{Error, Result};
pub use host::{HostCommunicator, program};

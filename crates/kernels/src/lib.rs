// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors in the memory of one process: element types, buffers, and all arithmetic on them.
//!
//! This crate owns the bits of every result on a host: reductions, Adasum and compression. It knows
//! no ranks, links, threads or GPUs: `collectives` moves the blocks, and `cuda` has its own
//! kernels, which follow the same rules. Frameworks pass addresses, so none of them is linked.
//!
//! ```text
//!  address, length ── Buffer ── GatherList: fused tensors as one range of bytes
//!                                   │ blocks of all members
//!                                   v
//!  DataType, ReduceOp ── ReductionSpec ── BlockReducer ──> block of the result, or accumulators
//!                                            └── InstructionSet: baseline, AVX2 or AVX-512; the same bits
//!  vector of f32 ── compress::Compressor ──> payload ── accumulate ──> sum of payloads
//! ```
//!
//! Invariants:
//! - `KE-1`: the bits of a result depend only on the inputs and their [`ReductionOrder`]. They do
//!   not depend on the cut into blocks, the instruction set or the position in a gather list.
//! - `KE-2`: a reduction that is not defined for a type, or blocks that do not fit, are an error
//!   before a byte is written.
//! - `KE-3`: members that accumulate the same payloads in the same order get the same bits.

#![deny(unsafe_code)]

mod buffer;
pub mod compress;
mod dtype;
mod error;
mod reduction;

pub use buffer::{
    Buffer, DeviceStream, GatherList, HostMemory, LARGE_MEMORY_BYTES, MemoryKind, copy_nontemporal,
    find_shareable_memory, prefer_large_pages,
};
pub use dtype::{DataType, ReduceOp};
pub use error::{Error, Result};
pub use reduction::{
    AdasumPrecision, AdasumProducts, BlockReducer, HierarchicalOrder, InstructionSet,
    ReductionOrder, ReductionSpec, neutral_element,
};

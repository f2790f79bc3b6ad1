// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table, and the arguments and results of its functions.

use std::ffi::{CStr, c_char, c_void};

/// Grows when a field changes its meaning; appended fields only make [`EngineTable::bytes`] larger.
pub const TABLE_VERSION: u32 = 2;

/// Name of the capsule that holds the address of a [`EngineTable`].
// The name is the check of the type: Python hands out a capsule only under its name.
pub const CAPSULE_NAME: &CStr = c"farandole.door";

/// The common values of all requests of one submission.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SubmissionHeader {
    /// An [`OperationCode`](crate::Operation).
    pub operation: u32,
    /// Number of the reduction, Horovod's: Average 0, Sum 1, Adasum 2, Min 3, Max 4, Product 5.
    pub reduction: u32,
    /// Multiplies inputs of reductions.
    pub prescale: f64,
    /// Multiplies results of reductions.
    pub postscale: f64,
    /// The sender of a broadcast, a rank of the world.
    pub root: u32,
    /// Number of the process set.
    pub process_set: u32,
    /// Not 0: the names are prefixes. The engine appends a number to each, which counts the
    /// submissions of this session; ranks must then submit in the same order.
    pub numbered: u32,
    /// The driver: 0 the engine's own threads; 1 the calling thread, which runs `done` before
    /// `submit` returns; 2 the calling thread for a fraction of a millisecond, which runs `done` if
    /// that was enough, else the engine's own.
    pub attended: u32,
}

/// One tensor's part in a submission.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TensorRequest {
    /// UTF-8, not terminated.
    pub name: *const c_char,
    /// Bytes of the name.
    pub name_length: usize,
    /// Number of the element type, the wire's.
    pub dtype: u32,
    /// Dimensions of the input.
    pub rank: u32,
    /// `rank` extents, row-major.
    pub shape: *const u64,
    /// Host memory, contiguous.
    pub input: *const c_void,
    /// Host memory of the result; null when the engine is to allocate it.
    pub output: *mut c_void,
    /// Its length.
    pub output_bytes: usize,
    /// All-to-all: rows for each member; null for equal parts.
    pub splits: *const u64,
    /// Their number.
    pub split_count: usize,
}

/// One tensor's result, valid while `done` runs; `owner` beyond that.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TensorOutput {
    /// The engine's memory; null when the request brought its own output.
    pub address: *mut c_void,
    /// Its length.
    pub bytes: usize,
    /// The argument for [`EngineTable::free`]; null if there is nothing to free.
    pub owner: *mut c_void,
    /// First dimension of each member's part: all-gather and all-to-all.
    pub rows: *const u64,
    /// Their number.
    pub row_count: usize,
    /// Join: the last rank to join.
    pub number: i64,
}

/// The outcome of a submission, valid while `done` runs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SubmissionOutcome {
    /// A [`EngineStatusCode`](crate::Code).
    pub code: u32,
    /// The reason, UTF-8, terminated; empty after a success.
    pub message: *const c_char,
    /// One for each request, in order; none after a failure.
    pub outputs: *const TensorOutput,
    /// Their number.
    pub output_count: usize,
}

/// The rank of this process in a process set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessSetPlacement {
    /// Number of ranks in the set.
    pub set_size: u32,
    /// This rank's position in it, or -1.
    pub set_rank: i32,
    /// Rank in the world.
    pub rank: u32,
    /// Ranks on this host.
    pub local_size: u32,
    /// Position among them.
    pub local_rank: u32,
}

/// Receives the outcome, on the engine's completion thread or, when it drives, on the calling one.
pub type OutcomeCallback =
    unsafe extern "C" fn(context: *mut c_void, outcome: *const SubmissionOutcome);

/// The table.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EngineTable {
    /// [`TABLE_VERSION`] of the library that filled it.
    pub version: u32,
    /// Size of the table that was filled.
    pub bytes: u32,
    /// Submits requests, several as one unit. Returns an
    /// [`EngineStatusCode`](crate::EngineStatusCode); if it is not `Success`, `done` will not run
    /// and up to `capacity` bytes of a terminated message are at `message`.
    pub submit: unsafe extern "C" fn(
        call: *const SubmissionHeader,
        requests: *const TensorRequest,
        count: usize,
        done: OutcomeCallback,
        context: *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> u32,
    /// Asks where this process sits; messages as for `submit`.
    pub place: unsafe extern "C" fn(
        process_set: u32,
        place: *mut ProcessSetPlacement,
        message: *mut c_char,
        capacity: usize,
    ) -> u32,
    /// Frees an output's owner.
    pub free: unsafe extern "C" fn(owner: *mut c_void),
}

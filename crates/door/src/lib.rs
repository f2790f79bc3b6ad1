// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The engine table: the C function table through which another library of this process reaches its
//! one engine.
//!
//! The extension owns the engine and fills one [`EngineTable`] (`ffi`). It publishes the address of
//! the table in a capsule named [`CAPSULE_NAME`]. A library that uses it, such as `tensorflow`,
//! links no engine, because two engines in one process would be two worlds.
//!
//! ```text
//! framework thread ── submit(call, requests, done) ─> engine ─┐
//! completion thread <─────────── done(context, outcome) ──────┘
//! ```
//!
//! Owns the layout and the numbers. It contains no code.
//!
//! Invariants:
//! - `DO-1`: the table is valid until the process ends; fields are only ever appended, and `bytes`
//!   says how many there are.
//! - `DO-2`: `done` runs exactly once for every call that was taken, and never for one that was
//!   refused.
//! - `DO-3`: no function of the table needs or takes Python's interpreter lock.
//! - `DO-4`: memory of requests belongs to the caller and stays valid until `done` has run; an
//!   output's `owner` belongs to the receiver of `done`, until it is passed to `free`.

#![forbid(unsafe_code)]

mod table;
mod table_codes;

pub use table::{
    CAPSULE_NAME, EngineTable, OutcomeCallback, ProcessSetPlacement, SubmissionHeader,
    SubmissionOutcome, TABLE_VERSION, TensorOutput, TensorRequest,
};
pub use table_codes::{EngineStatusCode, OperationCode};

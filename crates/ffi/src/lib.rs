// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Fills the engine table from the facade: C types in, one call of the engine, C types out.
//!
//! Owns the translation and the numbering of unnamed operations. The framework decides names,
//! order, and the reaction to errors.
//!
//! ```text
//! C caller ── request ──> table ── request, names ──> Engine::submit_group_with_callbacks
//! C caller <── outcome, message ── completion <────── callback of the engine
//! ```

#![deny(unsafe_code)]

mod completion;
mod operation_numbers;
mod request;
mod submission_failure;
mod table;

pub use farandole_door::CAPSULE_NAME;
pub use operation_numbers::{completed_join_count, restart_numbers_after_join};
pub use table::engine_table;

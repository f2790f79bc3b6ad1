// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Queue, negotiation, fusion and completion: one engine per process.
//!
//! The engine owns the order of collectives. It does not know frameworks, registrars, links or
//! arithmetic. The types and pure functions of the agreement among ranks are in `negotiation`. Its
//! caller provides a world, control links, communicators, devices and a
//! [`DriverParkingAndLiveness`] to sleep with.
//!
//! ```text
//!  callers            holder of the progress lock                                         peers
//!  submit -> SubmissionTable
//!               |---> ProcessSet: announce --> (control tree) --> coordinator: decide, fuse
//!  wait <- results <-- execute <-- communicator <-- response list <----------------------/
//! ```
//!
//! An operation has four steps. Every rank announces the tensor. When a whole subtree has announced
//! a tensor, the announcement goes up the tree (as a cache number, if all ranks agreed on the same
//! request before). The coordinator puts tensors that all ranks have announced into a response list
//! and fuses them. Every rank executes the lists in order. Tensors that become ready while a list
//! is executed form the next list.
//!
//! All methods of [`Engine`] may be called from any thread. A waiting thread drives the engine. If
//! no thread waits, the background thread drives it. The engine never takes Python's lock.
//! Callbacks run on their own thread, outside of all locks.
//!
//! For bindings: [`Error::Mismatch`] and [`Error::Failed`] come from `wait`, never from `submit`;
//! Horovod raises both as its internal error. All other errors of
//! [`Fault::Usage`](farandole_world::Fault) come from the submitting call.
//!
//! Invariants:
//! - `EN-1`: a handle completes exactly once; after its failure nothing accesses its buffers.
//! - `EN-2`: all ranks of a set execute the same operations in the same order, whatever the order
//!   of submissions.
//! - `EN-3`: all members of a group are in one response list, or all fail; if ranks group a tensor
//!   differently, all ranks stop with an error.
//! - `EN-4`: after the same list the caches of all ranks are equal.
//! - `EN-5`: no wake-up is lost: submitted and received data is processed without waiting for a
//!   timer.
//! - `EN-6`: the first failure stops the engine; every later call returns the cause of this
//!   failure, with rank and host.
//! - `EN-7`: if nothing is pending, no thread runs, except for a heartbeat four times a second.

#![forbid(unsafe_code)]

mod background;
mod callbacks;
mod devices;
mod engine;
mod error;
mod options;
mod process_set_registry;
mod progress;
mod request;
mod request_checks;
mod set;
mod stall_report;
mod statistics;
mod submission_table;
mod sync;
mod timeline;
mod tune;

/// Planning rules of the control plane, for simulators: no running world is needed.
pub mod control_plane_model {
    pub use farandole_negotiation::{
        PRIORITIZED_LIST_BYTES, PrioritizedTensor, control_parents, plan_fused_allreduces,
        plan_prioritized_list,
    };

    pub use crate::set::max_lists_in_execution;
}

pub use callbacks::CompletionCallback;
pub use engine::Engine;
pub use error::{Error, Result, StopCause};
pub use farandole_negotiation::control_peers;
pub use options::{DriverParkingAndLiveness, EngineOptions, EngineSettings, ProcessSetOptions};
pub use request::{
    CollectiveRequest, ProcessSetChange, RequestCompletion, RequestHandle, RequestKind,
};
pub use stall_report::{
    EngineObserver, MissingRank, RankWait, SilentObserver, StackAnswer, StallReport, StalledTensor,
    ThreadStacks,
};
pub use statistics::EngineStatistics;
pub use timeline::RANK_PLACEHOLDER;
pub use tune::AutotuneOptions;

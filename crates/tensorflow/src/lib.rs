// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! TensorFlow ops over TensorFlow's stable C kernel API.
//!
//! A cdylib that does not link TensorFlow: its ELF constructor finds the API in the
//! `libtensorflow_framework` of the process, and registers ops and kernels there.
//! `tf.load_op_library` creates Python functions for them.
//! [`farandole_tensorflow_connect`](exports) then passes the engine table.
//!
//! ```text
//! compute ── inputs, outputs, moved callback ──> CollectiveRun ── table.submit ─> engine
//!    returns at once                              CollectiveRun <── outcome ───── completion thread
//!                                     outputs or a status, then the callback
//! ```
//!
//! In functions that XLA compiles, [`xla`] replaces the ops.
//!
//! Kernels do not block, because TensorFlow has few threads and runs nodes in any order. A kernel
//! drives its operation for a fraction of a millisecond, which is often enough, and returns. Only
//! an operation that Python marks as attended is driven to its end, on the calling Python thread.
//! Names, gradients and fallbacks are in Python.
//!
//! Invariants:
//! - `TF-1`: `done` of a kernel runs exactly once, and the context is not touched after it.
//! - `TF-2`: inputs are held until the engine is done with them; nothing else keeps tensors.
//! - `TF-3`: no symbol of TensorFlow is bound at link time; a missing one leaves the ops
//!   unregistered and says which.

#![deny(unsafe_code)]

mod api;
mod attributes;
mod callback;
mod collective_node;
mod collective_run;
mod connection;
mod context;
mod definition;
mod exports;
mod kernel;
mod kernel_state;
mod output;
mod probe;
mod shapes;
mod world;
mod xla;

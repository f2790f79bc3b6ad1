// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! NVIDIA GPUs behind the traits `Device`, `Event` and `Communicator`.
//!
//! Owns the search for CUDA's libraries and their loading at run time, our kernels, and copies
//! between the memory of a GPU, the host and other GPUs. The engine decides when to do what. No
//! CUDA library is linked, so everything builds without CUDA, and most of it is tested without
//! CUDA.
//!
//! ```text
//!   Gpus                                                      GPUs of the process, and whether they form a communicator
//!   Places ── Library ──┬── Driver ── Context ── Gpu          copies beside the framework's work, by events
//!                       │                └────── Kernels      pack, unpack, reduce, Adasum: CUDA C++
//!                       ├── Nvrtc ── Cache ─────────┘         compiled once for each architecture
//!                       └── Nccl ── NcclCommunicator          collectives by a thread, aborted at a deadline
//!   Mailbox, windows ───────────── IpcCommunicator            allreduce among processes that share one GPU
//! ```
//!
//! Invariants:
//! - `CU-1`: no context is created and no GPU is used before the process uses memory of that GPU.
//! - `CU-2`: a missing or unsuitable library is an error that lists the searched places and the
//!   reasons, never a panic.
//! - `CU-3`: after an operation was aborted, nothing on the GPU accesses its tensors.
//! - `CU-4`: every wait for a peer has a deadline.
//! - `CU-5`: no call of the driver ends the capture of a graph on another thread.

#![deny(unsafe_code)]

mod cache;
mod device;
mod driver;
mod ending;
mod error;
mod find;
mod gpus;
mod inventory;
mod ipc;
mod kernels;
mod library;
mod nccl;
mod nvrtc;
mod staging;

pub use cache::Cache;
pub use device::{Gpu, GpuLane};
pub use driver::{
    Context, Driver, Facts, Function, Mark, MemoryPool, Offer, PoolSettings, Stream,
    Table as DriverTable,
};
pub use error::{Error, Result};
pub use find::{Kind, Places};
pub use gpus::Gpus;
pub use inventory::{Finding, built, inventory};
pub use kernels::{
    Batch, Inputs, Kernels, MEMBERS, SOURCE, TENSORS, TILE, blocks_for, move_name, plan,
    reduce_name,
};
pub use library::Library;
pub use nccl::{Lane, Nccl, NcclCommunicator, NcclMemory, Table as NcclTable, UniqueId, carries};
pub use nvrtc::{Nvrtc, Table as NvrtcTable};
pub use staging::{Locks, Pool};

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! NVIDIA GPUs behind the traits `Device`, `Event` and `Communicator`.
//!
//! It owns finding and loading CUDA's libraries at run time, our kernels, and how memory of a GPU meets the host's and
//! other GPUs'. It refuses to know who asks and when: that is the engine's. Nothing here is linked, so everything
//! builds, and most is tested, where there is no CUDA.
//!
//! ```text
//!   Gpus                                                      those a process uses, and which can form a communicator
//!   Places ── Library ──┬── Driver ── Context ── Gpu          copies beside the framework's work, by events
//!                       │                └────── Kernels      pack, unpack, reduce, Adasum: CUDA C++
//!                       ├── Nvrtc ── Cache ─────────┘         compiled once for each architecture
//!                       └── Nccl ── NcclCommunicator          collectives by a thread, aborted at a deadline
//!   Mailbox, windows ───────────── IpcCommunicator            allreduce among processes that share one GPU
//! ```
//!
//! Invariants:
//! - `CU-1`: no context is made, and no GPU touched, before somebody uses memory of it.
//! - `CU-2`: a missing or unfit library is an error that says where was looked and why it was refused, never a panic.
//! - `CU-3`: when an operation was given up, nothing on the GPU touches its tensors any more.
//! - `CU-4`: nothing waits for a peer without a deadline.
//! - `CU-5`: nothing asked of the driver ends a graph's capture on another thread.

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
    Context, Driver, Facts, Function, Mark, MemoryPool, Offer, PoolSettings, Stream, Table as DriverTable,
};
pub use error::{Error, Result};
pub use find::{Kind, Places};
pub use gpus::Gpus;
pub use inventory::{Finding, built, inventory};
pub use kernels::{
    Batch, Inputs, Kernels, MEMBERS, SOURCE, TENSORS, TILE, blocks_for, move_name, plan, reduce_name,
};
pub use library::Library;
pub use nccl::{Lane, Nccl, NcclCommunicator, NcclMemory, Table as NcclTable, UniqueId, carries};
pub use nvrtc::{Nvrtc, Table as NvrtcTable};
pub use staging::{Locks, Pool};

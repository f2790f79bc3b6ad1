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
//!   ProcessGpus                                  GPUs of the process, their communicators
//!   LibrarySearchPath ── SharedLibrary
//!      ├── CudaDriver ── PrimaryContext
//!      │      ├── GpuDevice                      copies beside the framework's work, by events
//!      │      └── KernelModule                   pack, unpack, reduce, Adasum: CUDA C++
//!      ├── NvrtcCompiler ── KernelCache          compiled once for each architecture
//!      └── NcclLibrary ── NcclCommunicator       collectives by a thread, aborted at a deadline
//!   IpcMailbox, windows ── IpcCommunicator       allreduce among processes that share one GPU
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

mod compiled_kernel_cache;
mod device;
mod driver;
mod error;
mod gpus;
mod inventory;
mod ipc;
mod kernels;
mod library;
mod library_search;
mod nccl;
mod nvrtc;
mod shutdown;
mod staging;

pub use compiled_kernel_cache::KernelCache;
pub use device::{GpuDevice, GpuStream};
pub use driver::{
    CudaDriver, DeviceProperties, DriverTable, IpcMemoryHandle, MemoryPool, MemoryPoolProperties,
    PrimaryContext, RawEvent, RawFunction, RawStream,
};
pub use error::{Error, Result};
pub use gpus::ProcessGpus;
pub use inventory::{CudaInventoryEntry, collect_inventory, detect_driver_and_nccl_version};
pub use kernels::{
    ELEMENTS_PER_TILE, KERNEL_SOURCE, KernelModule, MAX_MEMBERS_PER_LAUNCH, MAX_TENSORS_PER_LAUNCH,
    PackLaunchArguments, ReductionInputs, block_count_for, pack_kernel_name, plan_pack_launches,
    reduction_kernel_name,
};
pub use library::SharedLibrary;
pub use library_search::{CudaLibrary, LibrarySearchPath};
pub use nccl::{
    CommunicatorStream, NcclCommunicator, NcclLibrary, NcclMemory, NcclTable, UniqueId,
    is_nccl_operation,
};
pub use nvrtc::{NvrtcCompiler, NvrtcTable};
pub use staging::{PageLocking, StagingPool};

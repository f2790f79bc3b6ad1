// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parts of tests: a world of threads in one process, an oracle that computes every operation in
//! the simplest way, seeded data, a device in host memory, links that break. For development only:
//! it is in no wheel.
//!
//! ```text
//! Harness::new(4).run(|rank, communicator| ..)     every rank a thread with a communicator; loopback links, or any other
//! complete(&mut communicator, operation)           submit and drive to the end, with a deadline
//! oracle::allreduce(..) == the bytes all ranks must hold
//! ```
//!
//! It defines no rule of the product: the oracle computes what `farandole_kernels`
//! documents, element by element and in a different way.

#![deny(unsafe_code)]

mod asked;
mod counting;
mod data;
mod device;
mod faulty;
mod float8;
mod harness;
mod member_blocks;
mod memory;
pub mod oracle;
mod own_process;
mod rounding;
mod tensor;

pub use asked::Register;
pub use counting::counted;
pub use data::{Seed, elements, special_elements};
pub use device::HostDevice;
pub use faulty::cut_after;
pub use harness::{ALGORITHMS, Harness, Links, complete, complete_all, run_world};
pub use member_blocks::reduce_member_blocks;
pub use memory::{contents, fill, filled};
pub use own_process::run_in_own_process;
pub use tensor::{Tensor, allreduce, reducescatter};

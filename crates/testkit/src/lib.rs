// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What tests are made of: a world of threads in one process, an oracle that computes every operation plainly,
//! seeded data, a device over host memory, links that break. For development only: nothing here is in a wheel.
//!
//! ```text
//! Harness::new(4).run(|rank, communicator| ..)     every rank a thread with a communicator; loopback links, or any other
//! complete(&mut communicator, operation)           submit and drive to the end, with a deadline
//! oracle::allreduce(..) == the bytes all ranks must hold
//! ```
//!
//! It owns no rule of the product: the oracle repeats what `farandole_collectives::kernel` documents, element by
//! element and by other means.

#![deny(unsafe_code)]

mod counting;
mod data;
mod device;
mod faulty;
mod float8;
mod harness;
mod memory;
pub mod oracle;
mod tensor;

pub use counting::counted;
pub use data::{Seed, elements, special_elements};
pub use device::HostDevice;
pub use faulty::cut_after;
pub use harness::{Harness, Links, complete, complete_all, run_world};
pub use memory::{contents, fill, filled};
pub use tensor::{Tensor, allreduce};

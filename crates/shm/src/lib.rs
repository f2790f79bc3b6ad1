// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! memfd segments, mirrored rings, regions, doorbells, and passing of descriptors between
//! processes.
//!
//! Owns all access to memory that ranks of one host share, behind types that are safe to use. It
//! knows no ranks, keys or protocols: `transport` decides which process may have a segment.
//!
//! ```text
//! segment (memfd)     | control 0 | control 1 | data 0 ......... | data 1 ......... |
//! one ring, mapped    | control | data ......... | data again ... |   every window is contiguous
//! region (memfd)      | nonce, retired? | data ......... |        memory of one process that others use
//! doorbell (memfd)    | parked?, heartbeat, closed |  + eventfd     one per process, sent to local peers
//! ```
//!
//! A receiver is woken through an eventfd and not through futex words in the segment, because one
//! `epoll_wait` covers shared memory, TCP sockets and the death of peers, while a futex wait covers
//! only one word.
//!
//! Rust cannot guarantee anything about memory that another process can write. This crate
//! guarantees that no access leaves the mapping, even if a peer writes invalid values into a
//! control page (`SHM-3`). It trusts the peer, which has the job's key, not to change the bytes of
//! a window that it has committed.
//!
//! Invariants:
//! - `SHM-1`: a segment cannot be shrunk after its creation, so no access of a mapping faults.
//! - `SHM-2`: a ring has at most one producer and one consumer, among all processes.
//! - `SHM-3`: a window never exceeds the capacity, even if the control page has invalid values.
//! - `SHM-4`: after `ProcessDoorbell::mark_parked`, a commit is either seen by the next poll of the
//!   ring or rings the doorbell.
//! - `SHM-6`: a process maps a region only if the region has the expected nonce; after a detach,
//!   the memory belongs to its owner alone.
//! - `SHM-5`: in a forked child every operation fails and no drop changes shared memory.

#![deny(unsafe_code)]

mod control_words;
pub mod descriptor_passing;
mod doorbell;
mod error;
mod fork_detection;
mod loom_atomics;
mod memory;
mod region;
mod ring;
mod segment;

pub use doorbell::ProcessDoorbell;
pub use error::{Error, Result};
pub use fork_detection::ForkGuard;
pub use memory::{HugePageMemory, prefer_large_pages};
pub use region::{RegionHandle, SharedRegion};
pub use ring::{RingConsumer, RingProducer, rewind_ring};
pub use segment::{RingSegment, create_private_ring};

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
//! region (memfd)      | nonce, retired? | data ......... |          one process's memory, which others work in
//! bell (memfd + eventfd)  parked? heartbeat, closed                 one per process, handed to each local peer
//! ```
//!
//! A receiver is woken through an eventfd and not through futex words in the segment. So one
//! `epoll_wait` covers shared memory, TCP sockets and the death of peers, while a futex wait would
//! cover one word.
//!
//! Rust cannot guarantee anything about memory that another process can write. This crate
//! guarantees that no access leaves the mapping, whatever a peer writes into a control page
//! (`SHM-3`). It trusts the peer, which has the job's key, not to change the bytes of a window that
//! it has committed.
//!
//! Invariants:
//! - `SHM-1`: a segment cannot be shrunk after its creation, so no access of a mapping faults.
//! - `SHM-2`: a ring has at most one producer and one consumer, over all processes.
//! - `SHM-3`: a window never exceeds the capacity, whatever the control page says.
//! - `SHM-4`: after `Bell::park` a commit either is seen by the next poll of the ring or rings the
//!   bell.
//! - `SHM-6`: a process maps a region only if it finds the expected nonce in it; a detached range
//!   belongs to its owner alone.
//! - `SHM-5`: in a forked child every operation fails and no drop changes shared memory.

#![deny(unsafe_code)]

mod bell;
mod error;
mod fork;
pub mod handover;
mod memory;
mod region;
mod ring;
mod segment;
mod signals;
mod sync;

pub use bell::Bell;
pub use error::{Error, Result};
pub use fork::Guard;
pub use memory::{Pages, prefer_large_pages};
pub use region::{Region, RegionCard};
pub use ring::{Consumer, Producer, private, rewind};
pub use segment::Segment;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! memfd segments, mirrored rings, regions, doorbells and the hand-over of descriptors between processes.
//!
//! Owns everything that touches raw memory shared between ranks of one host, behind types that are safe to use.
//! Refuses to know ranks, keys or protocols: who may have a segment is decided by `transport`.
//!
//! ```text
//! segment (memfd)     | control 0 | control 1 | data 0 ......... | data 1 ......... |
//! one ring, mapped    | control | data ......... | data again ... |   every window is contiguous
//! region (memfd)      | nonce, retired? | data ......... |          one process's memory, which others work in
//! bell (memfd + eventfd)  parked? heartbeat, closed                 one per process, handed to each local peer
//! ```
//!
//! Waking goes through an eventfd and not through futex words in the segment: one `epoll_wait` of the receiver then
//! covers shared memory, TCP sockets and the death of peers, where a futex wait would cover one word.
//!
//! Memory that another process can write lies outside of what Rust can promise. What is promised here: whatever a
//! peer writes into a control page, no access leaves the mapping (`SHM-3`). What is left to the peer, which holds the
//! job's key: not to change bytes of a window it has handed over.
//!
//! Invariants:
//! - `SHM-1`: a segment cannot be shrunk after its creation, so no access of a mapping faults.
//! - `SHM-2`: a ring has at most one producer and one consumer, over all processes.
//! - `SHM-3`: a window never exceeds the capacity, whatever the control page says.
//! - `SHM-4`: after `Bell::park` a commit either is seen by the next poll of the ring or rings the bell.
//! - `SHM-6`: a region is mapped only by who finds its nonce in it; what is detached from it is its owner's alone.
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
pub use region::{Region, RegionCard};
pub use ring::{Consumer, Producer, private, rewind};
pub use segment::Segment;

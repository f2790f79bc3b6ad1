// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of shared memory.

use rustix::io::Errno;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed system call, or invalid shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of the operating system failed.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// The error of the call.
        source: Errno,
    },
    /// A descriptor from a peer is not a sealed segment of the agreed size.
    #[error("not a segment of {expected} bytes sealed against shrinking: {actual} bytes")]
    NotASegment {
        /// Agreed size in bytes.
        expected: u64,
        /// Actual size in bytes.
        actual: u64,
    },
    /// The descriptor of the other process is not the announced region, or the process is in
    /// another namespace.
    #[error("descriptor {descriptor} of process {pid} is not the region that was announced")]
    AnotherRegion {
        /// The process.
        pid: u32,
        /// The descriptor.
        descriptor: u32,
    },
    /// This half of the ring is already taken.
    #[error("the {half} of ring {ring} is already taken")]
    HalfTaken {
        /// `producer` or `consumer`.
        half: &'static str,
        /// Number of the ring in its segment.
        ring: usize,
    },
    /// The other side wrote impossible positions.
    #[error("the peer corrupted a ring of {capacity} bytes: {used} bytes in use")]
    Corrupt {
        /// Capacity of the ring in bytes.
        capacity: usize,
        /// Used bytes according to the positions.
        used: usize,
    },
    /// More bytes were committed or released than the last window had.
    #[error("only {granted} bytes of the window are left, asked for: {asked}")]
    Overrun {
        /// Bytes left of the window.
        granted: usize,
        /// Bytes to commit or release.
        asked: usize,
    },
    /// The process forked after the object was created; the child may not use it.
    #[error(
        "shared memory of the parent process was used in a forked child: use spawn or forkserver, \
         or create it after the fork"
    )]
    Forked,
    /// A message with descriptors was not sent completely.
    #[error("hand-over of descriptors was cut short after {bytes} bytes")]
    CutShort {
        /// Bytes sent.
        bytes: usize,
    },
}

impl Error {
    /// Creates a function for `map_err` that adds the name of the failed call.
    pub(crate) fn failed_call_mapper(call: &'static str) -> impl Fn(Errno) -> Self {
        move |source| Self::System { call, source }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of shared memory.

use rustix::io::Errno;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refused system call, or shared memory that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a call.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        source: Errno,
    },
    /// A descriptor from a peer is no sealed segment of the agreed size.
    #[error("not a segment of {expected} bytes sealed against shrinking: {actual} bytes")]
    NotASegment {
        /// Bytes agreed upon.
        expected: u64,
        /// Bytes found.
        actual: u64,
    },
    /// The other process has another object than the announced one, or it is in another namespace.
    #[error("descriptor {descriptor} of process {pid} is not the region that was announced")]
    AnotherRegion {
        /// The process.
        pid: u32,
        /// The descriptor.
        descriptor: u32,
    },
    /// Somebody already holds this half of the ring.
    #[error("the {half} of ring {ring} is already taken")]
    Taken {
        /// `producer` or `consumer`.
        half: &'static str,
        /// Number of the ring in its segment.
        ring: usize,
    },
    /// The other side wrote positions that cannot be.
    #[error("the peer corrupted a ring of {capacity} bytes: {used} bytes in use")]
    Corrupt {
        /// Bytes the ring holds.
        capacity: usize,
        /// Bytes in use by its positions.
        used: usize,
    },
    /// More was committed or released than the last window held.
    #[error("only {granted} bytes of the window are left, asked for: {asked}")]
    Overrun {
        /// Bytes left of the window.
        granted: usize,
        /// Bytes asked for.
        asked: usize,
    },
    /// The process forked after this was created; the child may not use it.
    #[error(
        "shared memory of the parent process was used in a forked child: use spawn or forkserver, \
         or create it after the fork"
    )]
    Forked,
    /// A message with descriptors did not arrive whole.
    #[error("hand-over of descriptors was cut short after {bytes} bytes")]
    CutShort {
        /// Bytes sent.
        bytes: usize,
    },
}

impl Error {
    /// Names the call that failed: for `map_err`.
    pub(crate) fn of(call: &'static str) -> impl Fn(Errno) -> Self {
        move |source| Self::System { call, source }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A link is one ordered byte stream in each direction between two ranks. Both ends access it
//! through windows, so no byte is copied twice.
//!
//! A sender fills the window and commits; a receiver reads the window and releases. On shared
//! memory the two windows are the same memory. On TCP they are private rings; polling either half
//! moves bytes between the rings and the sockets. No function here blocks.
//!
//! To poll a link, call `window` of its receiver and, while `flush` of its sender returns false,
//! `flush`. A thread that parks polls all links after `Parker::prepare_park`, because bytes move
//! over TCP only during a poll.

use std::fmt;

use farandole_world::Rank;

use crate::Result;

/// The carrier of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// A segment that both processes map.
    SharedMemory,
    /// A TCP connection.
    Tcp,
    /// Memory of this process, for tests and simulations.
    Loopback,
}

/// Alignment of message starts in a data stream. Writers pad to it, so elements are aligned in
/// windows.
// The size of a cache line and of an AVX-512 register: kernels then load aligned elements.
pub const MESSAGE_ALIGNMENT: usize = 64;

/// The outgoing half.
pub trait LinkSender: Send {
    /// Returns the contiguous free space, which may be empty. Sends pending bytes first, and never
    /// waits.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn window(&mut self) -> Result<&mut [u8]>;

    /// Hands the first `bytes` of the window to the peer, and wakes the peer if it sleeps.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn commit(&mut self, bytes: usize) -> Result<()>;

    /// Sends committed bytes that are still in this process (TCP only). Returns true when none are
    /// left.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone and unsent bytes are left.
    fn flush(&mut self) -> Result<bool>;

    /// Sends the bytes that fit without waiting, even to a peer that is counted as lost: if only
    /// another connection to the peer broke, the peer can still read them. Does nothing for shared
    /// memory, whose links end only when the peer's process ends.
    fn send_final_bytes(&mut self, bytes: &[u8]) {
        let _ = bytes;
    }

    /// Returns true for a link that is opened at its first use, see
    /// [`Mesh::open_links_on_demand`](crate::Mesh::open_links_on_demand). The value stays true
    /// after the link has opened.
    fn is_on_demand(&self) -> bool {
        false
    }

    /// Returns true for a link of a simulation: the bytes of its windows have no meaning, so nobody
    /// needs to fill them.
    fn carries_no_payload(&self) -> bool {
        false
    }

    /// Starts to open a link that is opened at its first use, if this has not started yet. Does
    /// nothing for other links, because they are already open.
    fn request_open(&mut self) {}
}

/// The incoming half.
pub trait LinkReceiver: Send {
    /// Returns the contiguous bytes that arrived and are not released, which may be empty. Never
    /// waits.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone and all bytes that it sent were read.
    fn window(&mut self) -> Result<&[u8]>;

    /// Checks that bytes may follow the `seen_bytes` of the caller's last window. For a caller that
    /// needs more than those; bytes that arrived since then are in the next window.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone and sent no more than `seen_bytes`.
    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()>;

    /// Releases the first `bytes` of the window.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn release(&mut self, bytes: usize) -> Result<()>;

    /// Returns true for a link of a simulation, like [`LinkSender::carries_no_payload`].
    fn carries_no_payload(&self) -> bool {
        false
    }
}

/// Both halves of a link to one peer.
pub struct Link {
    /// The rank at the other end.
    pub peer: Rank,
    /// Carrier of the link.
    pub kind: LinkKind,
    /// Capacity of each ring in bytes; a window is never larger.
    pub capacity: usize,
    /// The half that sends to the peer.
    pub sender: Box<dyn LinkSender>,
    /// The half that receives from the peer.
    pub receiver: Box<dyn LinkReceiver>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("peer", &self.peer)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

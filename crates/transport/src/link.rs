// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A link: one ordered byte stream each way between two ranks, seen through windows so that no byte
//! is copied twice.
//!
//! A sender fills the window and commits; a receiver reads the window and releases. On shared
//! memory the two windows are the same memory; on TCP they are private rings that a poll of either
//! half pumps. Nothing here blocks.
//!
//! To poll a link is to call `window` of its receiver and, while `flush` of its sender says false,
//! `flush`. A thread that parks polls all links after `Parker::prepare`: on TCP, bytes move only in
//! a poll.

use std::fmt;

use farandole_world::Rank;

use crate::Result;

/// The carrier of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// A segment both processes map.
    SharedMemory,
    /// A TCP connection.
    Tcp,
    /// Memory of this process: tests, simulations.
    Loopback,
}

/// Alignment of message starts in a data stream: writers pad to it so that elements stay aligned in
/// windows.
pub const ALIGNMENT: usize = 64;

/// The outgoing half.
pub trait LinkSender: Send {
    /// Free space, contiguous, possibly empty. Never waits; pumps what is pending first.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn window(&mut self) -> Result<&mut [u8]>;

    /// Hands the first `bytes` of the window to the peer and wakes it if it sleeps.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn commit(&mut self, bytes: usize) -> Result<()>;

    /// Moves what is committed but still local (TCP); true when nothing is left here.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone and something is left that it cannot get.
    fn flush(&mut self) -> Result<bool>;

    /// Sends what fits at once, whatever is known of the peer: one that is lost on another
    /// connection may hear it. If a link ends only with the process behind it, there is no
    /// listener.
    fn last_words(&mut self, bytes: &[u8]) {
        let _ = bytes;
    }

    /// Returns true for a link that is opened at its first use, see
    /// [`Mesh::open_on_demand`](crate::Mesh::open_on_demand). The value stays true after the link
    /// has opened.
    fn is_on_demand(&self) -> bool {
        false
    }

    /// Starts to open a link that is opened at its first use, unless its opening has started. Does
    /// nothing for other links, because they are open.
    fn ask(&mut self) {}
}

/// The incoming half.
pub trait LinkReceiver: Send {
    /// Bytes that arrived and were not released, contiguous, possibly empty. Never waits.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone and everything it had sent was read.
    fn window(&mut self) -> Result<&[u8]>;

    /// For a waiter that needs more than the window holds: whether more may come.
    ///
    /// # Errors
    /// `PeerLost` when nothing will follow the window.
    fn awaits(&mut self) -> Result<()>;

    /// Gives back the first `bytes` of the window.
    ///
    /// # Errors
    /// `PeerLost` when the peer is gone.
    fn release(&mut self, bytes: usize) -> Result<()>;
}

/// Both halves of a link to one peer.
pub struct Link {
    /// The rank at the other end.
    pub peer: Rank,
    /// Carrier of the link.
    pub kind: LinkKind,
    /// Bytes either ring holds; a window is never larger.
    pub capacity: usize,
    /// Towards the peer.
    pub sender: Box<dyn LinkSender>,
    /// From the peer.
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

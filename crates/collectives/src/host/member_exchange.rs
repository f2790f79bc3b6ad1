// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Exchange of a few bytes among all members.

use super::message::MessageProgress;
use super::peer_links::PeerLinks;
use crate::Result;

/// Exchange of a message of each member with all others. A member waits for others only after it
/// has sent its own bytes, and takes arriving bytes at once.
pub(super) struct MemberExchange {
    own: Vec<u8>,
    out: Vec<MessageProgress>,
    incoming: Vec<(MessageProgress, Vec<u8>)>,
}

impl MemberExchange {
    pub(super) fn new(peers: &PeerLinks, own: Vec<u8>) -> Self {
        let (links, bytes) = (peers.links.len(), own.len());
        Self {
            own,
            out: vec![MessageProgress::new(bytes); links],
            incoming: vec![(MessageProgress::new(bytes), vec![0; bytes]); links],
        }
    }

    /// Moves all bytes that can move. Returns true if any bytes moved.
    pub(super) fn poll(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let mut any = false;
        let Self { own, out, incoming } = self;
        for ((link, out), (message, theirs)) in peers.links.iter_mut().zip(out).zip(incoming) {
            any |= out.send_window(&mut *link.sender, |at, to| {
                to.copy_from_slice(&own[at..at + to.len()])
            })?;
            any |= message.receive_window(&mut *link.receiver, |at, from| {
                theirs[at..at + from.len()].copy_from_slice(from);
            })?;
        }
        Ok(any)
    }

    pub(super) fn is_sent_to_all_members(&self) -> bool {
        self.out.iter().all(MessageProgress::is_finished)
    }

    pub(super) fn is_received_from_all_members(&self) -> bool {
        self.incoming.iter().all(|(message, _)| message.is_finished())
    }

    /// Returns the messages of all members, including this one, in member order.
    pub(super) fn member_messages(&self, member: usize) -> impl Iterator<Item = &[u8]> {
        let theirs =
            |links: std::ops::Range<usize>| self.incoming[links].iter().map(|(_, said)| &**said);
        theirs(0..member).chain([&*self.own]).chain(theirs(member..self.incoming.len()))
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The exchange of a few bytes between all members.

use super::message::Message;
use super::peers::Peers;
use crate::Result;

/// A member waits for others only after it has sent its own bytes, and takes arriving bytes at
/// once.
pub(super) struct Exchange {
    own: Vec<u8>,
    out: Vec<Message>,
    incoming: Vec<(Message, Vec<u8>)>,
}

impl Exchange {
    pub(super) fn new(peers: &Peers, own: Vec<u8>) -> Self {
        let (links, bytes) = (peers.links.len(), own.len());
        Self {
            own,
            out: vec![Message::new(bytes); links],
            incoming: vec![(Message::new(bytes), vec![0; bytes]); links],
        }
    }

    /// Moves all bytes that can move. True when anything has.
    pub(super) fn poll(&mut self, peers: &mut Peers) -> Result<bool> {
        let mut any = false;
        let Self { own, out, incoming } = self;
        for ((link, out), (message, theirs)) in peers.links.iter_mut().zip(out).zip(incoming) {
            any |=
                out.put(&mut *link.sender, |at, to| to.copy_from_slice(&own[at..at + to.len()]))?;
            any |= message.take(&mut *link.receiver, |at, from| {
                theirs[at..at + from.len()].copy_from_slice(from);
            })?;
        }
        Ok(any)
    }

    pub(super) fn sent(&self) -> bool {
        self.out.iter().all(Message::is_finished)
    }

    pub(super) fn received(&self) -> bool {
        self.incoming.iter().all(|(message, _)| message.is_finished())
    }

    /// Returns the messages of all members, with the own one, in member order.
    pub(super) fn said(&self, member: usize) -> impl Iterator<Item = &[u8]> {
        let theirs =
            |links: std::ops::Range<usize>| self.incoming[links].iter().map(|(_, said)| &**said);
        theirs(0..member).chain([&*self.own]).chain(theirs(member..self.incoming.len()))
    }
}

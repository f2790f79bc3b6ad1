// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Alltoall: one message to and from every member, directly between the tensors.
//!
//! 1 step; a member sends its blocks in pieces, to all links in turn. It begins with its successor,
//! so that members do not all start with the same ring.
//!
//! The algorithm is the same across hosts. Every block is for a single member, so joining blocks on
//! a host would not reduce the bytes. It would only reduce the number of messages, and would copy
//! all bytes twice.
//!
//! **No deadlock.** Every link carries one message in each direction, and arriving bytes can be
//! stored at once. So no ring stays full while its reader is polled.

use farandole_kernels::{Buffer, GatherList};
use farandole_transport::PACKET_PAYLOAD_BYTES;

use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::{Result, TensorSegment};

/// Bytes that are sent to one member before the next member gets some.
const ALLTOALL_PIECE_BYTES: usize = PACKET_PAYLOAD_BYTES;

pub(super) struct AlltoallJob {
    streams: Vec<AlltoallLinkProgress>,
}

/// Data on one link.
struct AlltoallLinkProgress {
    out: MessageProgress,
    incoming: MessageProgress,
    ours: GatherList,
    theirs: GatherList,
}

/// Returns the block of a member in a buffer with blocks end to end.
fn member_block(buffer: &Buffer, bytes: &[usize], member: usize) -> GatherList {
    GatherList::new([buffer.slice(bytes[..member].iter().sum(), bytes[member])])
}

impl AlltoallJob {
    pub(super) fn new(
        peers: &PeerLinks,
        segment: &TensorSegment,
        sends: &[usize],
        receives: &[usize],
    ) -> Self {
        let kept = member_block(&segment.input, sends, peers.member);
        kept.copy_into(&member_block(&segment.output, receives, peers.member));
        let stream = |link: usize| {
            let peer = peers.member_of_link(link);
            let (ours, theirs) = (
                member_block(&segment.input, sends, peer),
                member_block(&segment.output, receives, peer),
            );
            AlltoallLinkProgress {
                out: MessageProgress::new(ours.len()),
                incoming: MessageProgress::new(theirs.len()),
                ours,
                theirs,
            }
        };
        Self { streams: (0..peers.links.len()).map(stream).collect() }
    }
}

impl CollectiveJob for AlltoallJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let (mut any, mut done) = (false, true);
        let PeerLinks { member, links, copies, .. } = peers;
        for k in 0..links.len() {
            // Link number `member` leads to the next member, because a member has no link to
            // itself.
            let index = (*member + k) % links.len();
            let (link, stream) = (&mut links[index], &mut self.streams[index]);
            let (copies, AlltoallLinkProgress { out, incoming, ours, theirs }) =
                (&mut copies[index], stream);
            any |= out.send_at_most_bytes(ALLTOALL_PIECE_BYTES, &mut *link.sender, |at, to| {
                copies.copy_from_list(ours, at, to)
            })?;
            any |= incoming
                .receive_window(&mut *link.receiver, |at, from| theirs.write_at(at, from))?;
            done &= out.is_finished() && incoming.is_finished();
        }
        Ok(PollProgress { any, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        // Links are opened on demand, and a pair of members without bytes needs none.
        let is_used = |stream: &AlltoallLinkProgress| {
            !stream.out.is_finished() || !stream.incoming.is_finished()
        };
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

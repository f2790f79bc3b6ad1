// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reduce-scatter: every member gets its part of all tensors from all members, end to end as one
//! message, and reduces it directly from the windows.
//!
//! 1 step; a member sends `N - n` bytes where its own part has `n`. The result is bitwise equal to
//! the result of an allreduce: each element is reduced once, by its owner, from all members'
//! inputs.
//!
//! **No deadlock.** Every link carries one message in each direction. A member writes to each of
//! its links whenever the ring has room, independently of the other links. So the next unit of all
//! members for an owner arrives in the windows of the owner. The owner can then reduce and release
//! it, because it writes only to its own memory. Members without a part receive nothing and wait
//! for no other member.
//!
//! Hosts with several members first join their inputs for each member of another host: see
//! [`across_hosts`].

pub(super) mod across_hosts;

use farandole_kernels::{BlockReducer, GatherList};
use farandole_transport::{Link, PACKET_PAYLOAD_BYTES};

use super::copy_path::RingCopier;
use super::message::MessageProgress;
use super::peer_links::{
    CollectiveJob, PeerLinks, PollProgress, reduce_in_member_order, whole_unit_bytes,
    with_incoming_windows,
};
use crate::{Result, TensorSegment};

/// Bytes that are sent to one member before the next member gets some. The receiver reduces the
/// first bytes meanwhile.
const REDUCESCATTER_PIECE_BYTES: usize = PACKET_PAYLOAD_BYTES;
/// Bytes that are reduced before they are copied to the output, which may be the input: they are
/// still in the cache.
const REDUCESCATTER_BLOCK_BYTES: usize = 16 << 10;

pub(super) struct ReducescatterJob {
    reducer: BlockReducer,
    own: GatherList,
    output: GatherList,
    streams: Vec<OutgoingPeerPart>,
    /// Progress of reading, in step on all links.
    incoming: MessageProgress,
}

/// Part of a peer that is being sent.
struct OutgoingPeerPart {
    part: GatherList,
    out: MessageProgress,
}

/// Returns a member's part of all tensors.
fn member_part(segments: &[TensorSegment], bytes: &[Vec<usize>], member: usize) -> GatherList {
    let part = |(segment, counts): (&TensorSegment, &Vec<usize>)| {
        segment.input.slice(counts[..member].iter().sum(), counts[member])
    };
    GatherList::new(segments.iter().zip(bytes).map(part))
}

impl ReducescatterJob {
    pub(super) fn new(
        peers: &PeerLinks,
        reducer: BlockReducer,
        segments: &[TensorSegment],
        bytes: &[Vec<usize>],
    ) -> Self {
        let part = |member: usize| member_part(segments, bytes, member);
        let stream = |link: usize| {
            let part = part(peers.member_of_link(link));
            OutgoingPeerPart { out: MessageProgress::new(part.len()), part }
        };
        let own = part(peers.member);
        let incoming = MessageProgress::new(own.len());
        let output = GatherList::new(segments.iter().map(|segment| segment.output.clone()));
        Self {
            reducer,
            own,
            output,
            streams: (0..peers.links.len()).map(stream).collect(),
            incoming,
        }
    }

    fn send_part(
        &mut self,
        index: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let OutgoingPeerPart { part, out } = &mut self.streams[index];
        out.send_at_most_bytes(REDUCESCATTER_PIECE_BYTES, &mut *link.sender, |at, to| {
            copies.copy_from_list(part, at, to)
        })
    }

    /// Reduces the values that have arrived from all members.
    fn reduce_own_part(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let mut wire = self.incoming.remaining_bytes();
        for link in &mut peers.links {
            if wire == 0 {
                break;
            }
            // Only whole units, so that no element is cut.
            wire = wire.min(whole_unit_bytes(link)?);
        }
        if wire == 0 {
            return Ok(false);
        }
        let (start, payload) = (self.incoming.moved_bytes(), self.incoming.unpadded_bytes_of(wire));
        let PeerLinks { links, scratch, member, .. } = peers;
        scratch.result.resize(scratch.result.len().max(REDUCESCATTER_BLOCK_BYTES), 0);
        let Self { reducer, own, output, .. } = &*self;
        with_incoming_windows(links, |windows| {
            for from in (0..payload).step_by(REDUCESCATTER_BLOCK_BYTES) {
                let result = &mut scratch.result[..REDUCESCATTER_BLOCK_BYTES.min(payload - from)];
                own.visit_range(start + from, result.len(), |offset, mine| {
                    let here = from + offset..from + offset + mine.len();
                    let out = &mut result[offset..offset + mine.len()];
                    reduce_in_member_order(reducer, *member, windows, here, mine, out);
                });
                output.write_at(start + from, result);
            }
        })?;
        for link in links {
            link.receiver.release(wire)?;
        }
        self.incoming.advance_by(wire);
        Ok(true)
    }
}

impl CollectiveJob for ReducescatterJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        for k in 0..peers.links.len() {
            let index = (peers.member + k) % peers.links.len();
            any |= self.send_part(index, &mut peers.links[index], &mut peers.copies[index])?;
        }
        any |= self.reduce_own_part(peers)?;
        let sent = self.streams.iter().all(|stream| stream.out.is_finished());
        Ok(PollProgress { any, done: sent && self.incoming.is_finished() })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        let is_used =
            |stream: &OutgoingPeerPart| !stream.out.is_finished() || !self.incoming.is_finished();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allgather: every member sends its parts of all tensors, end to end as one message, to all
//! members on its host and to one member of each other host, which distributes them on its host.
//!
//! On one host, 1 step; a member with `n` bytes sends `(P - 1) * n` bytes. On `H` hosts, 2 steps;
//! the `n` bytes are sent once to each other host, for any number of members on it. The members of
//! a host take turns in distributing.
//!
//! **No deadlock.** A link carries the sender's own parts first. Within a host, the parts that the
//! sender distributes follow, ordered by their member. All arriving bytes can be stored at once, so
//! no ring stays full. Bytes that are distributed within the host come from another host, on a link
//! with no other traffic.

use std::collections::VecDeque;

use farandole_kernels::GatherList;
use farandole_transport::PACKET_PAYLOAD_BYTES;

use super::chunk_sizes::UNIT_BYTES;
use super::members_by_host::MembersByHost;
use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::{Result, TensorSegment};

/// Bytes that are sent to one member before the next member gets some: they are still in the cache.
const ALLGATHER_PIECE_BYTES: usize = PACKET_PAYLOAD_BYTES;

pub(super) struct AllgatherJob {
    /// Range of each member in all outputs.
    places: Vec<GatherList>,
    own: GatherList,
    streams: Vec<AllgatherLinkParts>,
    /// Number of bytes of each member's parts that are in the outputs, from the start of the parts.
    stored: Vec<usize>,
}

/// Data on one link: parts of members, one after the other.
struct AllgatherLinkParts {
    out: VecDeque<AllgatherPart>,
    incoming: VecDeque<AllgatherPart>,
}

#[derive(Debug, PartialEq)]
struct AllgatherPart {
    of: usize,
    message: MessageProgress,
}

impl AllgatherJob {
    pub(super) fn new(peers: &PeerLinks, segments: &[TensorSegment], bytes: &[Vec<usize>]) -> Self {
        let place = |member: usize| {
            GatherList::new(segments.iter().zip(bytes).map(|(segment, counts)| {
                segment.output.slice(counts[..member].iter().sum(), counts[member])
            }))
        };
        let places: Vec<GatherList> = (0..peers.member_count()).map(place).collect();
        let own = GatherList::new(segments.iter().map(|segment| segment.input.clone()));
        own.copy_into(&places[peers.member]);
        let parts = |from: usize, to: usize| {
            let part =
                |of: usize| AllgatherPart { of, message: MessageProgress::new(places[of].len()) };
            part_owners_sent_between(&peers.hosts, from, to)
                // Both ends leave out empty parts, so they agree on the sequence of messages.
                .map(part)
                .filter(|part| !part.message.is_finished())
                .collect()
        };
        let stream = |link: usize| {
            let peer = peers.member_of_link(link);
            AllgatherLinkParts {
                out: parts(peers.member, peer),
                incoming: parts(peer, peers.member),
            }
        };
        let streams = (0..peers.links.len()).map(stream).collect();
        let mut stored = vec![0; places.len()];
        stored[peers.member] = own.len();
        Self { places, own, streams, stored }
    }
}

/// Returns the members whose parts `from` sends to `to`.
fn part_owners_sent_between(
    hosts: &MembersByHost,
    from: usize,
    to: usize,
) -> impl Iterator<Item = usize> {
    let (ours, theirs) = (hosts.host_of(from), hosts.host_of(to));
    let own = ours == theirs || hosts.carrier_for_turn(theirs, from) == to;
    let foreign = move |of: &usize| {
        ours == theirs && hosts.host_of(*of) != ours && hosts.carrier_for_turn(ours, *of) == from
    };
    let members = 0..hosts.host_members(hosts.host_count() - 1).end;
    own.then_some(from).into_iter().chain(members.filter(foreign))
}

impl CollectiveJob for AllgatherJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let (mut any, mut done) = (false, true);
        let Self { places, own, streams, stored } = self;
        let PeerLinks { member, links, copies, .. } = peers;
        let links = links.iter_mut().zip(copies);
        for ((link, copies), AllgatherLinkParts { out, incoming }) in links.zip(streams) {
            // Receives before it sends, so that bytes for the other members of the host are
            // forwarded in the same poll.
            if let Some(AllgatherPart { of, message }) = incoming.front_mut() {
                any |= message.receive_window(&mut *link.receiver, |at, from| {
                    places[*of].write_at(at, from);
                    stored[*of] = at + from.len();
                })?;
                if message.is_finished() {
                    incoming.pop_front();
                }
            }
            if let Some(AllgatherPart { of, message }) = out.front_mut() {
                let whole = stored[*of] == places[*of].len();
                let ready = if whole {
                    ALLGATHER_PIECE_BYTES
                } else {
                    // Links carry whole units: the rest of an incomplete unit has not arrived yet.
                    (stored[*of] / UNIT_BYTES * UNIT_BYTES).saturating_sub(message.moved_bytes())
                };
                let from = if of == member { &*own } else { &places[*of] };
                any |= message.send_at_most_bytes(
                    ready.min(ALLGATHER_PIECE_BYTES),
                    &mut *link.sender,
                    |at, to| copies.copy_from_list(from, at, to),
                )?;
                if message.is_finished() {
                    out.pop_front();
                }
            }
            done &= out.is_empty() && incoming.is_empty();
        }
        Ok(PollProgress { any, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        let is_used =
            |stream: &AllgatherLinkParts| !stream.out.is_empty() || !stream.incoming.is_empty();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_members_get_all_parts_once_and_each_host_gets_them_once_over_the_network() {
        for numbers in [&[0, 0, 0][..], &[0, 0, 1], &[0, 1, 2], &[0, 0, 0, 1, 1, 2, 2, 2, 2]] {
            let hosts = MembersByHost::new(numbers, 0);
            let everybody = 0..numbers.len();
            for to in everybody.clone() {
                let senders = everybody.clone().filter(|from| *from != to);
                let mut brought: Vec<usize> =
                    senders.flat_map(|from| part_owners_sent_between(&hosts, from, to)).collect();
                brought.sort_unstable();
                assert!(
                    brought.iter().copied().eq(everybody.clone().filter(|of| *of != to)),
                    "{numbers:?}"
                );
            }
            for from in everybody.clone() {
                let others =
                    everybody.clone().filter(|to| hosts.host_of(*to) != hosts.host_of(from));
                let crossed = others
                    .map(|to| part_owners_sent_between(&hosts, from, to).count())
                    .sum::<usize>();
                assert_eq!(crossed, hosts.host_count() - 1);
            }
        }
    }
}

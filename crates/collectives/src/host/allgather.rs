// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allgather: every member sends its parts of all tensors, end to end as one message, to all
//! members on its host and to one member of each other host, which distributes them there.
//!
//! On one host 1 step, `(P - 1) * n` bytes sent by a member with `n` bytes. On `H` hosts 2 steps;
//! `n` bytes cross to each other host once, whatever the number of its members, and its members
//! take turns at handing out.
//!
//! **No deadlock.** On a link first come the sender's own parts, then, within a host, what it hands
//! out, by sender. All arriving bytes can be stored at once, so no ring stays full. Bytes that are
//! distributed within the host have arrived from another host, on a link with no other traffic.

use std::collections::VecDeque;

use farandole_transport::PACKET;

use super::UNIT;
use super::hosts::Hosts;
use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::buffer::Flat;
use crate::{Result, Segment};

/// Bytes sent to one member before turning to the next: they are still in the cache.
const PIECE: usize = PACKET;

pub(super) struct Allgather {
    /// Every member's places in all outputs.
    places: Vec<Flat>,
    own: Flat,
    streams: Vec<Stream>,
    /// Bytes of each member's parts that are in the outputs, from their beginning on.
    stored: Vec<usize>,
}

/// The data on one link: members' parts, one after the other.
struct Stream {
    out: VecDeque<Part>,
    incoming: VecDeque<Part>,
}

#[derive(Debug, PartialEq)]
struct Part {
    of: usize,
    message: Message,
}

impl Allgather {
    pub(super) fn new(peers: &Peers, segments: &[Segment], bytes: &[Vec<usize>]) -> Self {
        let place = |member: usize| {
            Flat::new(segments.iter().zip(bytes).map(|(segment, counts)| {
                segment.output.slice(counts[..member].iter().sum(), counts[member])
            }))
        };
        let places: Vec<Flat> = (0..peers.size()).map(place).collect();
        let own = Flat::new(segments.iter().map(|segment| segment.input.clone()));
        own.copy_to(&places[peers.member]);
        let parts = |from: usize, to: usize| {
            let part = |of: usize| Part { of, message: Message::new(places[of].len()) };
            carried(&peers.hosts, from, to)
                .map(part)
                .filter(|part| !part.message.is_finished())
                .collect()
        };
        let stream = |link: usize| {
            let peer = peers.member_of(link);
            Stream { out: parts(peers.member, peer), incoming: parts(peer, peers.member) }
        };
        let streams = (0..peers.links.len()).map(stream).collect();
        let mut stored = vec![0; places.len()];
        stored[peers.member] = own.len();
        Self { places, own, streams, stored }
    }
}

/// Returns the members whose parts go from one member to another.
fn carried(hosts: &Hosts, from: usize, to: usize) -> impl Iterator<Item = usize> {
    let (ours, theirs) = (hosts.of(from), hosts.of(to));
    let own = ours == theirs || hosts.carrier(theirs, from) == to;
    let foreign = move |of: &usize| {
        ours == theirs && hosts.of(*of) != ours && hosts.carrier(ours, *of) == from
    };
    let members = 0..hosts.members(hosts.count() - 1).end;
    own.then_some(from).into_iter().chain(members.filter(foreign))
}

impl Job for Allgather {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let (mut any, mut done) = (false, true);
        let Self { places, own, streams, stored } = self;
        for (link, Stream { out, incoming }) in peers.links.iter_mut().zip(streams) {
            if let Some(Part { of, message }) = incoming.front_mut() {
                any |= message.take(&mut *link.receiver, |at, from| {
                    places[*of].write(at, from);
                    stored[*of] = at + from.len();
                })?;
                if message.is_finished() {
                    incoming.pop_front();
                }
            }
            if let Some(Part { of, message }) = out.front_mut() {
                let whole = stored[*of] == places[*of].len();
                let ready = if whole {
                    PIECE
                } else {
                    (stored[*of] / UNIT * UNIT).saturating_sub(message.done())
                };
                let from = if *of == peers.member { &*own } else { &places[*of] };
                any |= message
                    .put_some(ready.min(PIECE), &mut *link.sender, |at, to| from.read(at, to))?;
                if message.is_finished() {
                    out.pop_front();
                }
            }
            done &= out.is_empty() && incoming.is_empty();
        }
        Ok(Moved { any, done })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        let is_used = |stream: &Stream| !stream.out.is_empty() || !stream.incoming.is_empty();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_members_get_all_parts_once_and_each_host_gets_them_once_over_the_network() {
        for numbers in [&[0, 0, 0][..], &[0, 0, 1], &[0, 1, 2], &[0, 0, 0, 1, 1, 2, 2, 2, 2]] {
            let hosts = Hosts::new(numbers, 0);
            let everybody = 0..numbers.len();
            for to in everybody.clone() {
                let senders = everybody.clone().filter(|from| *from != to);
                let mut brought: Vec<usize> =
                    senders.flat_map(|from| carried(&hosts, from, to)).collect();
                brought.sort_unstable();
                assert!(
                    brought.iter().copied().eq(everybody.clone().filter(|of| *of != to)),
                    "{numbers:?}"
                );
            }
            for from in everybody.clone() {
                let others = everybody.clone().filter(|to| hosts.of(*to) != hosts.of(from));
                let crossed = others.map(|to| carried(&hosts, from, to).count()).sum::<usize>();
                assert_eq!(crossed, hosts.count() - 1);
            }
        }
    }
}

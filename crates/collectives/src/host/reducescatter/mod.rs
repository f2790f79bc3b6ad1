// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reduce-scatter: every member gets its part of all tensors from all members, end to end as one
//! message, and reduces it straight from the windows.
//!
//! 1 step; a member sends `N - n` bytes where its own part has `n`. The bits are those of an
//! allreduce: each element is reduced once, by its owner, from all members' inputs.
//!
//! **No deadlock.** On every link lies one message each way. A member writes to each of its links
//! whenever that ring has room, whatever the others do; so all members' next unit for an owner ends
//! up in the owner's windows, and then the owner can reduce and release it: it writes to its own
//! memory only. Members without a part receive nothing and wait for no other member.
//!
//! Hosts with several members join what they have for others first: see [`across`].

pub(super) mod across;

use farandole_transport::{Link, PACKET};

use super::message::Message;
use super::peers::{Job, Moved, Peers, reduce_in_order, whole_units, with_incoming};
use crate::buffer::Flat;
use crate::kernel::Reducer;
use crate::{Result, Segment};

/// Bytes sent to one member before turning to the next: the first of them are reduced meanwhile.
const PIECE: usize = PACKET;
/// Bytes reduced before they are copied to the output, which may be the input: they are still in
/// the cache.
const BLOCK: usize = 16 << 10;

pub(super) struct Reducescatter {
    reducer: Reducer,
    own: Flat,
    output: Flat,
    streams: Vec<Stream>,
    /// All links at once.
    incoming: Message,
}

/// The peer's part, on its way.
struct Stream {
    part: Flat,
    out: Message,
}

/// Returns a member's part of all tensors.
fn parts(segments: &[Segment], bytes: &[Vec<usize>], member: usize) -> Flat {
    let part = |(segment, counts): (&Segment, &Vec<usize>)| {
        segment.input.slice(counts[..member].iter().sum(), counts[member])
    };
    Flat::new(segments.iter().zip(bytes).map(part))
}

impl Reducescatter {
    pub(super) fn new(
        peers: &Peers,
        reducer: Reducer,
        segments: &[Segment],
        bytes: &[Vec<usize>],
    ) -> Self {
        let part = |member: usize| parts(segments, bytes, member);
        let stream = |link: usize| {
            let part = part(peers.member_of(link));
            Stream { out: Message::new(part.len()), part }
        };
        let own = part(peers.member);
        let incoming = Message::new(own.len());
        let output = Flat::new(segments.iter().map(|segment| segment.output.clone()));
        Self {
            reducer,
            own,
            output,
            streams: (0..peers.links.len()).map(stream).collect(),
            incoming,
        }
    }

    fn send(&mut self, index: usize, link: &mut Link) -> Result<bool> {
        let Stream { part, out } = &mut self.streams[index];
        out.put_some(PIECE, &mut *link.sender, |at, to| part.read(at, to))
    }

    /// Reduces the values that have arrived from all members.
    fn reduce(&mut self, peers: &mut Peers) -> Result<bool> {
        let mut wire = self.incoming.left();
        for link in &mut peers.links {
            if wire == 0 {
                break;
            }
            // No element is cut.
            wire = wire.min(whole_units(link)?);
        }
        if wire == 0 {
            return Ok(false);
        }
        let (start, payload) = (self.incoming.done(), self.incoming.payload(wire));
        let Peers { links, scratch, member, .. } = peers;
        scratch.result.resize(scratch.result.len().max(BLOCK), 0);
        let Self { reducer, own, output, .. } = &*self;
        with_incoming(links, |windows| {
            for from in (0..payload).step_by(BLOCK) {
                let result = &mut scratch.result[..BLOCK.min(payload - from)];
                own.visit(start + from, result.len(), |offset, mine| {
                    let here = from + offset..from + offset + mine.len();
                    let out = &mut result[offset..offset + mine.len()];
                    reduce_in_order(reducer, *member, windows, here, mine, out);
                });
                output.write(start + from, result);
            }
        })?;
        for link in links {
            link.receiver.release(wire)?;
        }
        self.incoming.advance(wire);
        Ok(true)
    }
}

impl Job for Reducescatter {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        for k in 0..peers.links.len() {
            let index = (peers.member + k) % peers.links.len();
            any |= self.send(index, &mut peers.links[index])?;
        }
        any |= self.reduce(peers)?;
        let sent = self.streams.iter().all(|stream| stream.out.is_finished());
        Ok(Moved { any, done: sent && self.incoming.is_finished() })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        let is_used = |stream: &Stream| !stream.out.is_finished() || !self.incoming.is_finished();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

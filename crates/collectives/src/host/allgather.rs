// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allgather: everybody sends its parts of all tensors, end to end as one message, to everybody.
//!
//! 1 step, `(P - 1) * n` bytes sent by a member with `n` bytes. Whatever arrives can be stored at once, so no ring stays
//! full: no deadlock.

use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::buffer::Flat;
use crate::{Result, Segment};

/// Bytes sent to one member before turning to the next: they are still in the cache.
const PIECE: usize = 64 << 10;

pub(super) struct Allgather {
    own: Flat,
    streams: Vec<Stream>,
}

/// What goes over one link.
struct Stream {
    out: Message,
    incoming: Message,
    /// The peer's places in all outputs.
    theirs: Flat,
}

impl Allgather {
    pub(super) fn new(peers: &Peers, segments: &[Segment], bytes: &[Vec<usize>]) -> Self {
        let places =
            |member: usize| {
                Flat::new(segments.iter().zip(bytes).map(|(segment, counts)| {
                    segment.output.slice(counts[..member].iter().sum(), counts[member])
                }))
            };
        let own = Flat::new(segments.iter().map(|segment| segment.input.clone()));
        own.copy_to(&places(peers.member));
        let stream = |link: usize| {
            let theirs = places(peers.member_of(link));
            Stream { out: Message::new(own.len()), incoming: Message::new(theirs.len()), theirs }
        };
        let streams = (0..peers.links.len()).map(stream).collect();
        Self { own, streams }
    }
}

impl Job for Allgather {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let (mut any, mut done) = (false, true);
        for (link, stream) in peers.links.iter_mut().zip(&mut self.streams) {
            let Stream { out, incoming, theirs } = stream;
            let own = &self.own;
            any |= out.put_some(PIECE, &mut *link.sender, |at, to| own.read(at, to))?;
            any |= incoming.take(&mut *link.receiver, |at, from| theirs.write(at, from))?;
            done &= out.is_finished() && incoming.is_finished();
        }
        Ok(Moved { any, done })
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Alltoall: one message to and from every member, directly between the tensors.
//!
//! 1 step; a member sends its values for others in pieces, to all links in turn. It begins with its
//! successor, so that members do not all start with the same ring.
//!
//! Across hosts too: every block is for one member alone, so hosts could not send fewer bytes, only
//! fewer messages, and would copy everything twice for that.
//!
//! **No deadlock.** On every link lies one message each way, and whatever arrives can be stored at
//! once: no ring stays full while its reader is polled.

use farandole_transport::PACKET;

use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::buffer::Flat;
use crate::{Buffer, Result, Segment};

/// Bytes sent to one member before turning to the next.
const PIECE: usize = PACKET;

pub(super) struct Alltoall {
    streams: Vec<Stream>,
}

/// The data on one link.
struct Stream {
    out: Message,
    incoming: Message,
    ours: Flat,
    theirs: Flat,
}

/// Returns the block of a member where blocks lie end to end.
fn block(buffer: &Buffer, bytes: &[usize], member: usize) -> Flat {
    Flat::new([buffer.slice(bytes[..member].iter().sum(), bytes[member])])
}

impl Alltoall {
    pub(super) fn new(
        peers: &Peers,
        segment: &Segment,
        sends: &[usize],
        receives: &[usize],
    ) -> Self {
        let kept = block(&segment.input, sends, peers.member);
        kept.copy_to(&block(&segment.output, receives, peers.member));
        let stream = |link: usize| {
            let peer = peers.member_of(link);
            let (ours, theirs) =
                (block(&segment.input, sends, peer), block(&segment.output, receives, peer));
            Stream {
                out: Message::new(ours.len()),
                incoming: Message::new(theirs.len()),
                ours,
                theirs,
            }
        };
        Self { streams: (0..peers.links.len()).map(stream).collect() }
    }
}

impl Job for Alltoall {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let (mut any, mut done) = (false, true);
        let links = &mut peers.links;
        for k in 0..links.len() {
            let index = (peers.member + k) % links.len();
            let (link, stream) = (&mut links[index], &mut self.streams[index]);
            let Stream { out, incoming, ours, theirs } = stream;
            any |= out.put_some(PIECE, &mut *link.sender, |at, to| ours.read(at, to))?;
            any |= incoming.take(&mut *link.receiver, |at, from| theirs.write(at, from))?;
            done &= out.is_finished() && incoming.is_finished();
        }
        Ok(Moved { any, done })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        let is_used = |stream: &Stream| !stream.out.is_finished() || !stream.incoming.is_finished();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

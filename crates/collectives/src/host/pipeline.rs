// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in two hops: every member reduces its own part of the elements straight from the
//! others' windows and writes the result straight into theirs.
//!
//! 2 steps, `2 * (P - 1) / P * N` bytes sent by each member, every chunk of them overlapping with
//! the next. Member `p` owns part `p`; a part is cut into chunks, of equal size in all parts. On
//! the link from `r` to `q` goes a fixed sequence of messages, empty ones left out, with `D`
//! for [`LOOKAHEAD`]:
//!
//! ```text
//! post(0) .. post(D)  result(0)  post(D+1)  result(1)  post(D+2)  ...  result(last)
//! post(t):   r's input of chunk t of part q          result(t): the reduced chunk t of part r
//! ```
//!
//! **No deadlock.** Suppose no member can move, and let `j` be the smallest number of a result that
//! some member `r` has not written fully. Everybody wrote `result(i)` for all `i < j`, so it has
//! reduced, and released, `post(i)`; and whatever result arrives can be stored at once. So what
//! lies in a ring begins at the earliest with `post(j)`, and before `result(j)` it holds at most
//! `D + 1` posts and `D` results. A ring holds `2 * D + 2` chunks (see [`chunk_for`]), so every
//! member could write everything before `result(j)`, and `result(j)`, too. Then the inputs of
//! `result(j)` are in the windows of `r` and its outgoing windows have room: `r` can move. Earlier
//! and later operations change nothing: links are drained in order, a member begins an operation
//! only after it has read and written all of the one before, and the argument holds for the
//! earliest operation that is not finished on all members. Rings are whole numbers of units,
//! messages too, so a window never ends inside a unit for longer than bytes take to arrive.

pub(super) mod program;

use farandole_transport::Link;

use super::copies::Copies;
use super::peers::{Job, Moved, Peers, reduce_in_order, whole_units, with_windows};
use super::position::Position;
use super::{LARGEST_CHUNK, SMALLEST_CHUNK, UNIT, start_of};
use crate::Result;
use crate::buffer::Flat;
use crate::kernel::Reducer;

/// Posts sent ahead of the result they make room for.
const LOOKAHEAD: usize = 3;
/// Chunks that even a small part is cut into.
const OVERLAP: usize = 4;
/// Bytes reduced before they are copied on: they are still in the first-level cache.
const BLOCK: usize = 16 << 10;
/// Bytes from which on results go past the caches to memory that is not the input's: no cache holds
/// all of them until they are read, and the lines of that memory need not be read first.
const PAST_CACHES: usize = 32 << 20;

/// The cut of the elements, which is the same on every member.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    bytes: usize,
    members: usize,
    chunk: usize,
    steps: usize,
}

impl Cut {
    fn new(bytes: usize, members: usize, capacity: usize) -> Self {
        let units = bytes.div_ceil(UNIT);
        let longest = units.div_ceil(members) * UNIT;
        let chunk = chunk_for(longest, capacity);
        Self { bytes, members, chunk, steps: longest.div_ceil(chunk) }
    }

    /// Returns the start of a member's part, in bytes.
    fn start(&self, member: usize) -> usize {
        start_of(self.bytes, self.members, member)
    }

    /// Returns the start of chunk `t` of a member's part, and its length.
    fn chunk_of(&self, member: usize, t: usize) -> (usize, usize) {
        let (start, end) = (self.start(member), self.start(member + 1));
        let from = (start + t * self.chunk).min(end);
        (from, (end - from).min(self.chunk))
    }

    /// Returns the first position from `slot` on whose message is not empty: posts of chunks of
    /// `posted`'s part, results of `reduced`'s.
    fn seek(&self, slot: usize, posted: usize, reduced: usize) -> Position {
        // After an empty chunk of a part all are empty.
        let find = |member: usize, t: usize| {
            let bytes = if t < self.steps { self.chunk_of(member, t).1 } else { 0 };
            (bytes > 0).then_some((t, bytes))
        };
        Position::seek(slot, LOOKAHEAD, |t| find(posted, t), |t| find(reduced, t))
    }
}

/// Returns the bytes of a chunk: a ring holds `2 * LOOKAHEAD + 2` of them.
fn chunk_for(part: usize, capacity: usize) -> usize {
    let fits = capacity / (2 * LOOKAHEAD + 2) / UNIT * UNIT;
    let overlapping = (part / OVERLAP).next_multiple_of(UNIT);
    overlapping.clamp(SMALLEST_CHUNK, LARGEST_CHUNK).min(fits)
}

pub(super) struct Pipeline {
    reducer: Reducer,
    inputs: Flat,
    outputs: Flat,
    past_caches: bool,
    cut: Cut,
    member: usize,
    streams: Vec<Stream>,
}

/// One link.
struct Stream {
    peer: usize,
    writing: Position,
    reading: Position,
}

impl Pipeline {
    pub(super) fn new(
        peers: &Peers,
        reducer: Reducer,
        inputs: Flat,
        outputs: Flat,
    ) -> Result<Self> {
        let cut = Cut::new(inputs.len(), peers.size(), peers.capacity);
        if cut.chunk == 0 {
            return Err(peers.too_small());
        }
        let member = peers.member;
        let stream = |link: usize| {
            let peer = peers.member_of(link);
            Stream { peer, writing: cut.seek(0, peer, member), reading: cut.seek(0, member, peer) }
        };
        let streams = (0..peers.links.len()).map(stream).collect();
        let past_caches = inputs.len() >= PAST_CACHES && outputs.is_apart_from(&inputs);
        Ok(Self { reducer, inputs, outputs, past_caches, cut, member, streams })
    }

    /// Sends what the link can take of the peer's part.
    fn post(&mut self, index: usize, link: &mut Link, copies: &mut Copies) -> Result<bool> {
        let Stream { peer, writing, .. } = &mut self.streams[index];
        let Some(t) = writing.early() else { return Ok(false) };
        let (start, inputs) = (self.cut.chunk_of(*peer, t).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.read(inputs, start + at, to);
        let any = writing.message.put(&mut *link.sender, put)?;
        if writing.message.is_finished() {
            *writing = self.cut.seek(writing.after(), *peer, self.member);
        }
        Ok(any)
    }

    /// Stores what the peer has reduced.
    fn fetch(&mut self, index: usize, link: &mut Link) -> Result<bool> {
        let Stream { peer, reading, .. } = &mut self.streams[index];
        let Some(t) = reading.late(LOOKAHEAD) else { return Ok(false) };
        let (start, outputs) = (self.cut.chunk_of(*peer, t).0, &self.outputs);
        let store = if self.past_caches { Flat::write_past_caches } else { Flat::write };
        let any = reading
            .message
            .take(&mut *link.receiver, |at, from| store(outputs, start + at, from))?;
        if reading.message.is_finished() {
            *reading = self.cut.seek(reading.after(), self.member, *peer);
        }
        Ok(any)
    }

    /// Reduces the values that have arrived from all members into all members' windows.
    fn reduce(&mut self, peers: &mut Peers) -> Result<bool> {
        let Peers { links, copies, scratch, .. } = peers;
        let Some(first) = self.streams.first() else { return Ok(false) };
        let Some(t) = first.writing.late(LOOKAHEAD) else { return Ok(false) };
        let message = first.writing.message;
        let in_step = |stream: &Stream| {
            stream.writing.late(LOOKAHEAD) == Some(t) && stream.reading.early() == Some(t)
        };
        if !self.streams.iter().all(in_step) {
            return Ok(false);
        }
        let start = self.cut.chunk_of(self.member, t).0 + message.done();
        let Self { reducer, inputs, outputs, member, .. } = &*self;
        // The first link's ring then does not serve as memory for the result.
        let past = copies.iter().any(Copies::are_past_caches);
        scratch.result.resize(scratch.result.len().max(BLOCK), 0);
        let store = if self.past_caches { Flat::write_past_caches } else { Flat::write };
        let wire = with_windows(links, |incoming, outgoing| {
            let lengths = incoming.iter().map(|window| window.len());
            let shortest =
                lengths.chain(outgoing.iter().map(|window| window.len())).min().unwrap_or(0);
            let wire = shortest.min(message.left()) / UNIT * UNIT;
            let payload = message.payload(wire);
            for from in (0..payload).step_by(BLOCK) {
                let block = from..payload.min(from + BLOCK);
                let (result, others) = match &mut *outgoing {
                    [] => return 0,
                    all if past => (&mut scratch.result[..block.len()], all),
                    [first, others @ ..] => (&mut first[block.clone()], others),
                };
                inputs.visit(start + from, block.len(), |offset, own| {
                    let here = from + offset..from + offset + own.len();
                    let out = &mut result[offset..offset + own.len()];
                    reduce_in_order(reducer, *member, incoming, here, own, out);
                });
                store(outputs, start + from, result);
                let first = copies.len() - others.len();
                for (other, copies) in others.iter_mut().zip(&mut copies[first..]) {
                    copies.copy(result, &mut other[block.clone()]);
                }
            }
            for window in outgoing {
                window[payload..wire].fill(0);
            }
            wire
        })?;
        if wire == 0 {
            // A link may have ended inside a unit.
            links.iter_mut().try_for_each(|link| whole_units(link).map(drop))?;
            return Ok(false);
        }
        for (link, stream) in links.iter_mut().zip(&mut self.streams) {
            link.sender.commit(wire)?;
            link.receiver.release(wire)?;
            stream.writing.message.advance(wire);
            stream.reading.message.advance(wire);
            if stream.writing.message.is_finished() {
                stream.writing = self.cut.seek(stream.writing.after(), stream.peer, self.member);
                stream.reading = self.cut.seek(stream.reading.after(), self.member, stream.peer);
            }
        }
        Ok(true)
    }
}

impl Pipeline {
    /// Sends what links can take before anything is received. True when anything was sent.
    pub(super) fn post_all(&mut self, peers: &mut Peers) -> Result<bool> {
        let mut any = false;
        let links = &mut peers.links;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        for k in 0..links.len() {
            let index = (self.member + k) % links.len();
            any |= self.post(index, &mut links[index], &mut peers.copies[index])?;
        }
        Ok(any)
    }
}

impl Job for Pipeline {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = self.post_all(peers)?;
        any |= self.reduce(peers)?;
        let links = &mut peers.links;
        for k in 0..links.len() {
            let index = (self.member + k) % links.len();
            any |= self.fetch(index, &mut links[index])?;
        }
        let over = |stream: &Stream| stream.writing.is_over() && stream.reading.is_over();
        let done = self.streams.iter().all(over);
        Ok(Moved { any, done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_bytes_in_units_and_differ_by_one_at_most() {
        for bytes in [1, 63, 64, 65, 128, 1000, 4096, 100_003] {
            for members in 1..9 {
                let cut = Cut::new(bytes, members, 1 << 20);
                assert_eq!((cut.start(0), cut.start(members)), (0, bytes));
                let units: Vec<usize> = (0..members)
                    .map(|p| (cut.start(p + 1) - cut.start(p)).div_ceil(UNIT))
                    .collect();
                assert!(
                    units.iter().max().unwrap() - units.iter().min().unwrap() <= 1,
                    "{bytes} {units:?}"
                );
            }
        }
    }

    #[test]
    fn both_ends_of_a_link_see_the_same_sequence_of_messages() {
        for bytes in [64, 65, 5_000, 1 << 20, (3 << 20) + 5] {
            let cut = Cut::new(bytes, 3, 64 << 10);
            let (mut writing, mut reading) = (cut.seek(0, 2, 1), cut.seek(0, 2, 1));
            let (mut posted, mut reduced) = (0, 0);
            while !writing.is_over() {
                assert_eq!(writing, reading);
                match writing.early() {
                    Some(t) => posted += cut.chunk_of(2, t).1,
                    None => reduced += cut.chunk_of(1, writing.late(LOOKAHEAD).unwrap()).1,
                }
                writing = cut.seek(writing.after(), 2, 1);
                reading = cut.seek(reading.after(), 2, 1);
            }
            assert_eq!(posted, cut.start(3) - cut.start(2));
            assert_eq!(reduced, cut.start(2) - cut.start(1));
        }
    }

    #[test]
    fn a_ring_holds_all_that_may_lie_in_it() {
        for capacity in [1 << 12, 1 << 16, 1 << 20, 1 << 24] {
            for part in [64, 10_000, 1 << 20, 1 << 26] {
                assert!(chunk_for(part, capacity) * (2 * LOOKAHEAD + 2) <= capacity);
            }
        }
    }
}

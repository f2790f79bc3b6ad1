// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in two hops: every member reduces its own part of the elements straight from the
//! others' windows and writes the result straight into theirs.
//!
//! 2 steps; each member sends `2 * (P - 1) / P * N` bytes, and each chunk overlaps with the next.
//! Member `p` owns part `p`. A part is cut into chunks, of equal size in all parts. The link from
//! `r` to `q` carries a fixed sequence of messages, without the empty ones; `D` is
//! [`LOOKAHEAD_CHUNKS`]:
//!
//! ```text
//! input(0) .. input(D)  result(0)  input(D+1)  result(1)  input(D+2)  ...  result(last)
//! input(t):  r's input of chunk t of part q          result(t): the reduced chunk t of part r
//! ```
//!
//! **No deadlock.** Suppose no member can move, and let `j` be the smallest number of a result that
//! some member `r` has not written fully. Every member has written `result(i)` for all `i < j`, so
//! `r` has reduced, and released, `input(i)`; and every arriving result can be stored at once. So
//! the bytes in a ring begin at the earliest with `input(j)`, and before `result(j)` the ring holds
//! at most `D + 1` inputs and `D` results. A ring holds `2 * D + 2` chunks (see [`chunk_bytes`]),
//! so every member could write everything before `result(j)`, and `result(j)`, too. Then the inputs
//! of `result(j)` are in the windows of `r` and its outgoing windows have room: `r` can move.
//! Earlier and later operations change nothing: links are drained in order, a member begins an
//! operation only after it has read and written all of the one before, and the argument holds for
//! the earliest operation that is not finished on all members. Rings are whole numbers of units,
//! messages too, so a window ends inside a unit only until the missing bytes arrive.

use farandole_kernels::{BlockReducer, GatherList};
use farandole_transport::Link;

use super::chunk_sizes::{MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, UNIT_BYTES, part_start};
use super::copy_path::RingCopier;
use super::message_position::MessagePosition;
use super::peer_links::{
    CollectiveJob, PeerLinks, PollProgress, reduce_in_member_order, whole_unit_bytes,
    with_all_windows,
};
use crate::Result;

/// Inputs that a member sends ahead of a result, beyond the input of this result's chunk.
const LOOKAHEAD_CHUNKS: usize = 3;
/// Number of chunks into which even a small part is cut.
const MIN_CHUNKS_PER_PART: usize = 4;
/// Bytes that are reduced before they are copied: they are still in the first-level cache.
const REDUCTION_BLOCK_BYTES: usize = 16 << 10;
/// Fewest bytes for which results bypass the caches, if the memory of the outputs is separate from
/// the inputs: no cache holds all results until they are read, and the lines of the outputs need
/// not be read first.
const MIN_NONTEMPORAL_BYTES: usize = 32 << 20;

/// Schedule of a pipeline: the parts and chunks of the elements, the same on every member.
#[derive(Clone, Debug)]
pub(super) struct PipelineSchedule {
    bytes: usize,
    members: usize,
    chunk: usize,
    steps: usize,
}

impl PipelineSchedule {
    /// Returns the schedule; `None` if rings are too small.
    pub(super) fn new(bytes: usize, members: usize, capacity: usize) -> Option<Self> {
        let units = bytes.div_ceil(UNIT_BYTES);
        let longest = units.div_ceil(members) * UNIT_BYTES;
        let chunk = chunk_bytes(longest, capacity);
        (chunk > 0).then(|| Self { bytes, members, chunk, steps: longest.div_ceil(chunk) })
    }

    /// Returns the number of chunks of the longest part.
    pub(super) fn chunks_per_part(&self) -> usize {
        self.steps
    }

    /// Returns the start of a member's part, in bytes.
    fn member_part_start(&self, member: usize) -> usize {
        part_start(self.bytes, self.members, member)
    }

    /// Returns the start of chunk `t` of a member's part, and its length.
    fn chunk_extent(&self, member: usize, t: usize) -> (usize, usize) {
        let (start, end) = (self.member_part_start(member), self.member_part_start(member + 1));
        let from = (start + t * self.chunk).min(end);
        (from, (end - from).min(self.chunk))
    }

    /// Returns the first position from `slot` on whose message is not empty: inputs of chunks of
    /// `posted`'s part, results of `reduced`'s.
    fn next_nonempty_message(&self, slot: usize, posted: usize, reduced: usize) -> MessagePosition {
        // After an empty chunk of a part, all chunks are empty.
        let find = |member: usize, t: usize| {
            let bytes = if t < self.steps { self.chunk_extent(member, t).1 } else { 0 };
            (bytes > 0).then_some((t, bytes))
        };
        MessagePosition::first_nonempty(
            slot,
            LOOKAHEAD_CHUNKS,
            |t| find(posted, t),
            |t| find(reduced, t),
        )
    }
}

/// Returns the number of bytes of a chunk: a ring holds `2 * LOOKAHEAD_CHUNKS + 2` chunks.
fn chunk_bytes(part: usize, capacity: usize) -> usize {
    let fits = capacity / (2 * LOOKAHEAD_CHUNKS + 2) / UNIT_BYTES * UNIT_BYTES;
    let overlapping = (part / MIN_CHUNKS_PER_PART).next_multiple_of(UNIT_BYTES);
    overlapping.clamp(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES).min(fits)
}

pub(super) struct PipelinedAllreduceJob {
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
    past_caches: bool,
    cut: PipelineSchedule,
    member: usize,
    streams: Vec<PipelineLinkPositions>,
}

/// Positions in the message sequences of one link.
struct PipelineLinkPositions {
    peer: usize,
    writing: MessagePosition,
    reading: MessagePosition,
}

impl PipelinedAllreduceJob {
    pub(super) fn new(
        peers: &PeerLinks,
        reducer: BlockReducer,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Result<Self> {
        let cut = PipelineSchedule::new(inputs.len(), peers.member_count(), peers.capacity)
            .ok_or_else(|| peers.ring_too_small_error())?;
        let member = peers.member;
        let stream = |link: usize| {
            let peer = peers.member_of_link(link);
            PipelineLinkPositions {
                peer,
                writing: cut.next_nonempty_message(0, peer, member),
                reading: cut.next_nonempty_message(0, member, peer),
            }
        };
        let streams = (0..peers.links.len()).map(stream).collect();
        // Without separate outputs, the result overwrites lines that the inputs have brought to the
        // cache.
        let past_caches =
            inputs.len() >= MIN_NONTEMPORAL_BYTES && outputs.differs_in_every_buffer(&inputs);
        Ok(Self { reducer, inputs, outputs, past_caches, cut, member, streams })
    }

    /// Sends the inputs of the peer's part, at most as many bytes as the link takes.
    fn send_input(
        &mut self,
        index: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let PipelineLinkPositions { peer, writing, .. } = &mut self.streams[index];
        let Some(t) = writing.operand_chunk() else { return Ok(false) };
        let (start, inputs) = (self.cut.chunk_extent(*peer, t).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.copy_from_list(inputs, start + at, to);
        let any = writing.message.send_window(&mut *link.sender, put)?;
        if writing.message.is_finished() {
            *writing = self.cut.next_nonempty_message(writing.next_slot(), *peer, self.member);
        }
        Ok(any)
    }

    /// Stores the results that the peer has reduced.
    fn receive_results(&mut self, index: usize, link: &mut Link) -> Result<bool> {
        let PipelineLinkPositions { peer, reading, .. } = &mut self.streams[index];
        let Some(t) = reading.result_chunk(LOOKAHEAD_CHUNKS) else { return Ok(false) };
        let (start, outputs) = (self.cut.chunk_extent(*peer, t).0, &self.outputs);
        let store =
            if self.past_caches { GatherList::write_nontemporal } else { GatherList::write_at };
        let any = reading
            .message
            .receive_window(&mut *link.receiver, |at, from| store(outputs, start + at, from))?;
        if reading.message.is_finished() {
            *reading = self.cut.next_nonempty_message(reading.next_slot(), self.member, *peer);
        }
        Ok(any)
    }

    /// Reduces the values that have arrived from all members into all members' windows.
    fn reduce_own_part(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let PeerLinks { links, copies, scratch, reductions, .. } = peers;
        let Some(first) = self.streams.first() else { return Ok(false) };
        let Some(t) = first.writing.result_chunk(LOOKAHEAD_CHUNKS) else { return Ok(false) };
        let message = first.writing.message;
        let in_step = |stream: &PipelineLinkPositions| {
            stream.writing.result_chunk(LOOKAHEAD_CHUNKS) == Some(t)
                && stream.reading.operand_chunk() == Some(t)
        };
        if !self.streams.iter().all(in_step) {
            return Ok(false);
        }
        let start = self.cut.chunk_extent(self.member, t).0 + message.moved_bytes();
        let Self { reducer, inputs, outputs, member, .. } = &*self;
        // If copies bypass the caches, the ring of the first link is not used as memory for the
        // result.
        let past = copies.iter().any(RingCopier::is_nontemporal);
        scratch.result.resize(scratch.result.len().max(REDUCTION_BLOCK_BYTES), 0);
        let store =
            if self.past_caches { GatherList::write_nontemporal } else { GatherList::write_at };
        let wire = with_all_windows(links, |incoming, outgoing| {
            let lengths = incoming.iter().map(|window| window.len());
            let shortest =
                lengths.chain(outgoing.iter().map(|window| window.len())).min().unwrap_or(0);
            let wire = shortest.min(message.remaining_bytes()) / UNIT_BYTES * UNIT_BYTES;
            let payload = message.unpadded_bytes_of(wire);
            // Reads the inputs of all members, and writes the result to the output and to the
            // windows of the others.
            if wire > 0 && reductions.record_if_simulating(2 * (incoming.len() + 1) * payload) {
                return wire;
            }
            for from in (0..payload).step_by(REDUCTION_BLOCK_BYTES) {
                let block = from..payload.min(from + REDUCTION_BLOCK_BYTES);
                let (result, others) = match &mut *outgoing {
                    [] => return 0,
                    all if past => (&mut scratch.result[..block.len()], all),
                    [first, others @ ..] => (&mut first[block.clone()], others),
                };
                inputs.visit_range(start + from, block.len(), |offset, own| {
                    let here = from + offset..from + offset + own.len();
                    let out = &mut result[offset..offset + own.len()];
                    reduce_in_member_order(reducer, *member, incoming, here, own, out);
                });
                store(outputs, start + from, result);
                let first = copies.len() - others.len();
                for (other, copies) in others.iter_mut().zip(&mut copies[first..]) {
                    copies.copy_bytes(result, &mut other[block.clone()]);
                }
            }
            for window in outgoing {
                window[payload..wire].fill(0);
            }
            wire
        })?;
        if wire == 0 {
            // A link may have ended inside a unit.
            links.iter_mut().try_for_each(|link| whole_unit_bytes(link).map(drop))?;
            return Ok(false);
        }
        for (link, stream) in links.iter_mut().zip(&mut self.streams) {
            link.sender.commit(wire)?;
            link.receiver.release(wire)?;
            stream.writing.message.advance_by(wire);
            stream.reading.message.advance_by(wire);
            if stream.writing.message.is_finished() {
                stream.writing = self.cut.next_nonempty_message(
                    stream.writing.next_slot(),
                    stream.peer,
                    self.member,
                );
                stream.reading = self.cut.next_nonempty_message(
                    stream.reading.next_slot(),
                    self.member,
                    stream.peer,
                );
            }
        }
        Ok(true)
    }
}

impl PipelinedAllreduceJob {
    /// Sends inputs that fit into the windows, before anything is received. Returns true if any
    /// bytes were sent.
    pub(super) fn send_inputs(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let mut any = false;
        let links = &mut peers.links;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        for k in 0..links.len() {
            let index = (self.member + k) % links.len();
            any |= self.send_input(index, &mut links[index], &mut peers.copies[index])?;
        }
        Ok(any)
    }
}

impl CollectiveJob for PipelinedAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        // First, because peers can reduce nothing before they have the inputs.
        let mut any = self.send_inputs(peers)?;
        any |= self.reduce_own_part(peers)?;
        let links = &mut peers.links;
        for k in 0..links.len() {
            let index = (self.member + k) % links.len();
            any |= self.receive_results(index, &mut links[index])?;
        }
        let over = |stream: &PipelineLinkPositions| {
            stream.writing.is_at_end() && stream.reading.is_at_end()
        };
        let done = self.streams.iter().all(over);
        Ok(PollProgress { any, done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_bytes_in_units_and_differ_by_one_at_most() {
        for bytes in [1, 63, 64, 65, 128, 1000, 4096, 100_003] {
            for members in 1..9 {
                let cut = PipelineSchedule::new(bytes, members, 1 << 20).unwrap();
                assert_eq!((cut.member_part_start(0), cut.member_part_start(members)), (0, bytes));
                let units: Vec<usize> = (0..members)
                    .map(|p| {
                        (cut.member_part_start(p + 1) - cut.member_part_start(p))
                            .div_ceil(UNIT_BYTES)
                    })
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
            let cut = PipelineSchedule::new(bytes, 3, 64 << 10).unwrap();
            let (mut writing, mut reading) =
                (cut.next_nonempty_message(0, 2, 1), cut.next_nonempty_message(0, 2, 1));
            let (mut posted, mut reduced) = (0, 0);
            while !writing.is_at_end() {
                assert_eq!(writing, reading);
                match writing.operand_chunk() {
                    Some(t) => posted += cut.chunk_extent(2, t).1,
                    None => {
                        reduced +=
                            cut.chunk_extent(1, writing.result_chunk(LOOKAHEAD_CHUNKS).unwrap()).1
                    }
                }
                writing = cut.next_nonempty_message(writing.next_slot(), 2, 1);
                reading = cut.next_nonempty_message(reading.next_slot(), 2, 1);
            }
            assert_eq!(posted, cut.member_part_start(3) - cut.member_part_start(2));
            assert_eq!(reduced, cut.member_part_start(2) - cut.member_part_start(1));
        }
    }

    #[test]
    fn a_ring_holds_all_that_may_lie_in_it() {
        for capacity in [1 << 12, 1 << 16, 1 << 20, 1 << 24] {
            for part in [64, 10_000, 1 << 20, 1 << 26] {
                assert!(chunk_bytes(part, capacity) * (2 * LOOKAHEAD_CHUNKS + 2) <= capacity);
            }
        }
    }
}

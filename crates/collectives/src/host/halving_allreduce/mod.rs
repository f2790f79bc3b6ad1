// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in three phases: within the host, across hosts by recursive halving and doubling, and
//! back within the host.
//!
//! As in `hierarchy`, the elements are cut into chunks. The members of a host take turns: one of
//! them carries a chunk and joins the inputs of its host. The carriers then halve and double
//! (Rabenseifner). In step `k`, a host swaps halves of its partials with the host `2^k` away and
//! keeps the sum of one half. After `log2 H` steps it has the sum of `1 / H` of the chunk and
//! computes the result of this part. The results are swapped in the reverse order of the steps. If
//! `H` is no power of two, the first hosts form pairs: one host of a pair sends its partials to the
//! other before the swaps and receives the result after them. The two hosts take turns, so that
//! they send as much as the other hosts. This is the order of `ReductionOrder::pairwise_order`.
//!
//! `2 + 2 * log2 H` steps, in progress at the same time for different chunks. Every member has
//! `log2 H` links to other hosts, or at most `2 * log2 H + 1` if `H` is no power of two, and sends
//! at most `2 * N / L` bytes over them. The first steps, which have the most bytes, are between
//! neighbouring hosts. Partials travel as accumulators: the accumulators of 16-bit floats have
//! twice the bytes of the elements, also if the reduction rounds the partials of hosts.
//!
//! On the link from `r` to `q` goes a fixed sequence of messages, as in `hierarchy`: for `t = 0, 1,
//! ...`, first the early message for chunk `t`, then the late message for chunk `t - A`; empty
//! messages are left out. `A` falls with the distance of hosts, as results come back in the reverse
//! order of the steps, and is largest within a host.
//!
//! ```text
//! same host:   early(t): r's input, if q carries t          late(t): the result, if r carries t
//! other host:  early(t): partials of the half that q keeps  late(t): results of the half r keeps
//! ```
//!
//! **No deadlock.** For each `t` in order, let there be these steps: the inputs of `t`; the swaps
//! of partials of `t`, one after the other; for each distance, the farthest first, the swaps of
//! results of `t - A`; the results of `t - A` (within). Every link carries its messages in the
//! order of these steps, every chunk passes its steps in this order, and a member begins chunks in
//! this order. Suppose no member can move, and consider the first unfinished step. All messages of
//! earlier steps have been read, so its messages are the first on their links, and the rings have
//! room. The partials of all earlier chunks have been reduced to results, so there is memory to
//! join inputs. In a swap, both ends have all input from earlier steps: both can write the half
//! that they send and read the half that they keep, however small rings are. So some member can
//! move.

mod schedule;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use farandole_kernels::{BlockReducer, GatherList};
use farandole_transport::Link;

use super::chunk_sizes::UNIT_BYTES;
use super::copy_path::RingCopier;
use super::hierarchy_allreduce::{HostInputs, arrived_bytes};
use super::message_position::{LinkPositions, MessagePosition};
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress, ReductionRecorder};
use crate::Result;
pub(super) use schedule::HalvingSchedule;
use schedule::{HalvingLink, HalvingStage, LinkDirection};

/// Bytes that are merged at a time: they are still in the cache when they are copied back.
const MERGE_BLOCK_BYTES: usize = 16 << 10;

/// Chunk that this member carries.
struct HalvingChunk {
    chunk: usize,
    /// Bytes of elements whose inputs are joined.
    joined: usize,
    /// Finished steps between hosts: first the steps that swap partials, then the steps that swap
    /// results, in reverse.
    step: usize,
    stages: usize,
    /// Link and stage of the current step; `None` before they were looked up.
    stage: Option<(usize, HalvingStage)>,
    /// Partials of the whole chunk; empty after the results are computed.
    partials: Vec<u8>,
}

impl HalvingChunk {
    fn is_finished(&self) -> bool {
        self.step == 2 * self.stages
    }
}

/// Links that the first halving of a communicator has found.
#[derive(Default)]
struct HalvingLinkCache(Option<Arc<[HalvingLink]>>);

pub(super) struct HalvingAllreduceJob {
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
    schedule: HalvingSchedule,
    member: usize,
    host: usize,
    /// Number of members on this host; this member carries every `stride`-th chunk.
    stride: usize,
    /// Links within the host, as indices of links.
    local: Range<usize>,
    /// Links within the host, as indices of `halving_links`.
    near: Range<usize>,
    halving_links: Arc<[HalvingLink]>,
    /// Positions in the message sequences, by link.
    streams: Vec<LinkPositions>,
    /// Chunks in progress, in order.
    works: VecDeque<HalvingChunk>,
    /// The next chunk to begin.
    next: usize,
    /// Free memory for partials, one block per chunk.
    spare: Vec<Vec<u8>>,
}

impl HalvingAllreduceJob {
    pub(super) fn new(
        peers: &mut PeerLinks,
        reducer: BlockReducer,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Result<Self> {
        let schedule = HalvingSchedule::new(
            inputs.len(),
            &peers.hosts,
            reducer.accumulator_expansion(),
            peers.capacity,
        );
        let schedule = schedule.ok_or_else(|| peers.ring_too_small_error())?;
        let (member, host) = (peers.member, peers.hosts.own_host());
        // The links do not depend on the bytes, and finding them can take longer than a small
        // allreduce.
        let HalvingLinkCache(halving_links) = peers.scratch.caches.take_cache();
        let halving_links = halving_links.unwrap_or_else(|| schedule.member_links(member).into());
        peers.scratch.caches.keep_cache(HalvingLinkCache(Some(Arc::clone(&halving_links))));
        // Fresh memory would cost page faults in each operation.
        let mut spare = std::mem::take(&mut peers.scratch.store);
        spare.resize_with(schedule.chunks_in_flight(host), Vec::new);
        let longest =
            if peers.reductions.is_recording() { 0 } else { schedule.max_partial_bytes() };
        spare.iter_mut().filter(|old| old.len() < longest).for_each(|old| old.resize(longest, 0));
        let stream = |halving_link: &HalvingLink| LinkPositions {
            writing: schedule.first_message(halving_link, LinkDirection::Outgoing),
            reading: schedule.first_message(halving_link, LinkDirection::Incoming),
        };
        let members = peers.hosts.host_members(host);
        let local = peers.local_links();
        let before = |link| halving_links.partition_point(|halving_link| halving_link.link < link);
        Ok(Self {
            streams: halving_links.iter().map(stream).collect(),
            near: before(local.start)..before(local.end),
            local,
            halving_links,
            works: VecDeque::new(),
            next: member - members.start,
            stride: members.len(),
            spare,
            reducer,
            inputs,
            outputs,
            schedule,
            member,
            host,
        })
    }

    fn advance_write_position(&mut self, halving_link: usize) {
        let LinkPositions { writing, .. } = &mut self.streams[halving_link];
        if writing.message.is_finished() {
            *writing = self.schedule.next_message(
                *writing,
                &self.halving_links[halving_link],
                LinkDirection::Outgoing,
            );
        }
    }

    fn advance_read_position(&mut self, halving_link: usize) {
        let LinkPositions { reading, .. } = &mut self.streams[halving_link];
        if reading.message.is_finished() {
            *reading = self.schedule.next_message(
                *reading,
                &self.halving_links[halving_link],
                LinkDirection::Incoming,
            );
        }
    }

    /// Sends this member's input to a carrier on this host, at most as many bytes as the link
    /// takes.
    fn send_input(
        &mut self,
        halving_link: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let LinkPositions { writing, .. } = &mut self.streams[halving_link];
        let Some(chunk) = writing.operand_chunk() else { return Ok(false) };
        let (start, inputs) = (self.schedule.chunk_extent(chunk).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.copy_from_list(inputs, start + at, to);
        let any = writing.message.send_window(&mut *link.sender, put)?;
        self.advance_write_position(halving_link);
        Ok(any)
    }

    /// Begins a chunk if there is free memory for its partials, and joins the inputs of this host
    /// that have arrived.
    fn reduce_host_inputs(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let is_joined = |work: &HalvingChunk, schedule: &HalvingSchedule| {
            work.joined == schedule.chunk_extent(work.chunk).1
        };
        if self.works.back().is_none_or(|work| is_joined(work, &self.schedule)) {
            if self.next >= self.schedule.chunk_count() {
                return Ok(false);
            }
            // Without free memory the chunk waits, which limits the memory of an operation.
            let Some(partials) = self.spare.pop() else { return Ok(false) };
            let stages = self.schedule.stage_count(self.host, self.next);
            let chunk = self.next;
            self.works.push_back(HalvingChunk {
                chunk,
                joined: 0,
                step: 0,
                stages,
                stage: None,
                partials,
            });
            self.next += self.stride;
        }
        let Some(HalvingChunk { chunk, joined: at, partials, .. }) = self.works.back_mut() else {
            return Ok(false);
        };
        let (start, len) = self.schedule.chunk_extent(*chunk);
        let ready = |stream: &LinkPositions| stream.reading.operand_chunk() == Some(*chunk);
        // A window may hold the input of an earlier or a later chunk.
        if !self.streams[self.near.clone()].iter().all(ready) {
            return Ok(false);
        }
        let near = self.near.clone().zip(self.local.clone());
        let mut bytes = len - *at;
        for (halving_link, link) in near.clone() {
            bytes = bytes.min(
                arrived_bytes(
                    &mut peers.links[link],
                    &self.streams[halving_link].reading.message,
                    UNIT_BYTES,
                )?
                .0,
            );
        }
        if bytes == 0 {
            return Ok(false);
        }
        let windows = peers.links[self.local.clone()].iter_mut().map(|link| link.receiver.window());
        let windows = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Links to earlier members come first.
        let place = self.member - self.local.start;
        let (width, reducer) = (self.schedule.accumulator_width(), &self.reducer);
        let join = |inputs: &[&[u8]], out: &mut [u8]| reducer.accumulate_inputs(inputs, out);
        let inputs =
            HostInputs { windows: &windows, place, own: &self.inputs, start: start + *at, bytes };
        if !peers.reductions.record_if_simulating(bytes * (windows.len() + 1 + width)) {
            inputs.reduce_into_partials(width, join, &mut partials[*at * width..]);
        }
        *at += bytes;
        let wire = bytes.next_multiple_of(UNIT_BYTES);
        for (halving_link, link) in near {
            peers.links[link].receiver.release(wire)?;
            self.streams[halving_link].reading.message.advance_by(wire);
            self.advance_read_position(halving_link);
        }
        Ok(true)
    }

    /// Moves a chunk between hosts until it is finished or has to wait.
    fn exchange_between_hosts(
        &mut self,
        work: &mut HalvingChunk,
        peers: &mut PeerLinks,
    ) -> Result<bool> {
        let mut any = false;
        while work.joined == self.schedule.chunk_extent(work.chunk).1 && !work.is_finished() {
            let is_up = work.step < work.stages;
            let step = if is_up { work.step } else { 2 * work.stages - 1 - work.step };
            let Some((halving_link, stage)) =
                work.stage.take().or_else(|| self.find_stage(peers, work.chunk, step))
            else {
                break;
            };
            let over = if is_up {
                any |= self.send_partials(halving_link, work, &stage, peers)?;
                any |= self.merge_partials(halving_link, work, &stage, peers)?;
                let LinkPositions { writing, reading } = &self.streams[halving_link];
                writing.is_past_operand_message(work.chunk)
                    && reading.is_past_operand_message(work.chunk)
            } else {
                let far = ChunkOnHostLink { halving_link, chunk: work.chunk };
                any |= self.send_host_results(far, &stage, peers)?;
                any |= self.receive_host_results(far, &stage, peers)?;
                let LinkPositions { writing, reading } = &self.streams[halving_link];
                let is_past = |position: MessagePosition| {
                    position
                        .is_past_result_message(self.halving_links[halving_link].ahead, work.chunk)
                };
                is_past(*writing) && is_past(*reading)
            };
            if !over {
                work.stage = Some((halving_link, stage));
                break;
            }
            any = true;
            work.step += 1;
            if is_up && work.step == work.stages {
                self.compute_results(work, &stage.keep, &mut peers.reductions);
            }
        }
        Ok(any)
    }

    /// Returns a step of a chunk that this member carries, and its link.
    fn find_stage(
        &self,
        peers: &PeerLinks,
        chunk: usize,
        step: usize,
    ) -> Option<(usize, HalvingStage)> {
        let stage = self.schedule.find_stage(self.host, chunk, step)?;
        let link = peers.link_to(self.schedule.hosts().carrier_for_turn(stage.host, chunk));
        Some((self.halving_links.partition_point(|halving_link| halving_link.link < link), stage))
    }

    /// Sends the partials that the other host keeps.
    fn send_partials(
        &mut self,
        halving_link: usize,
        work: &HalvingChunk,
        stage: &HalvingStage,
        peers: &mut PeerLinks,
    ) -> Result<bool> {
        let LinkPositions { writing, .. } = &mut self.streams[halving_link];
        if writing.operand_chunk() != Some(work.chunk) {
            return Ok(false);
        }
        let start = stage.give.start * self.schedule.accumulator_width();
        let link = &mut peers.links[self.halving_links[halving_link].link];
        let put = |at: usize, to: &mut [u8]| {
            to.copy_from_slice(&work.partials[start + at..start + at + to.len()]);
        };
        let any = writing.message.send_window(&mut *link.sender, put)?;
        self.advance_write_position(halving_link);
        Ok(any)
    }

    /// Joins the partials that have arrived from the other host with the own partials.
    fn merge_partials(
        &mut self,
        halving_link: usize,
        work: &mut HalvingChunk,
        stage: &HalvingStage,
        peers: &mut PeerLinks,
    ) -> Result<bool> {
        let LinkPositions { reading, .. } = &mut self.streams[halving_link];
        if reading.operand_chunk() != Some(work.chunk) {
            return Ok(false);
        }
        let link = &mut peers.links[self.halving_links[halving_link].link];
        let (bytes, wire) = arrived_bytes(link, &reading.message, UNIT_BYTES)?;
        if wire == 0 {
            return Ok(false);
        }
        let theirs = &link.receiver.window()?[..bytes];
        let at =
            stage.keep.start * self.schedule.accumulator_width() + reading.message.moved_bytes();
        // Both partials are read, the sum is written to a block in the cache and copied back.
        if !peers.reductions.record_if_simulating(3 * bytes) {
            let own = &mut work.partials[at..at + bytes];
            // Kernels do not write to their inputs, so sums go through a block in the cache.
            let scratch = &mut peers.scratch.result;
            scratch.resize(scratch.len().max(MERGE_BLOCK_BYTES), 0);
            let blocks = own.chunks_mut(MERGE_BLOCK_BYTES).zip(theirs.chunks(MERGE_BLOCK_BYTES));
            for (own, theirs) in blocks {
                let joined = &mut scratch[..own.len()];
                let (earlier, later) =
                    if stage.is_earlier { (&*own, theirs) } else { (theirs, &*own) };
                self.reducer.merge_accumulators(earlier, later, joined);
                own.copy_from_slice(joined);
            }
        }
        link.receiver.release(wire)?;
        reading.message.advance_by(wire);
        self.advance_read_position(halving_link);
        Ok(true)
    }

    /// Computes the results of the own part and frees the memory of the partials.
    fn compute_results(
        &mut self,
        work: &mut HalvingChunk,
        own: &Range<usize>,
        reductions: &mut ReductionRecorder,
    ) {
        let (width, start) =
            (self.schedule.accumulator_width(), self.schedule.chunk_extent(work.chunk).0);
        if !reductions.record_if_simulating(own.len() * (width + 1)) {
            self.outputs.fill_range(start + own.start, own.len(), |offset, out| {
                let at = own.start + offset;
                self.reducer
                    .finish_accumulators(&work.partials[at * width..(at + out.len()) * width], out);
            });
        }
        // Later chunks wait for this memory, and only the results are needed from here on.
        self.spare.push(std::mem::take(&mut work.partials));
    }

    /// Sends the results that this host has to the other host of the stage.
    fn send_host_results(
        &mut self,
        ChunkOnHostLink { halving_link, chunk }: ChunkOnHostLink,
        stage: &HalvingStage,
        peers: &mut PeerLinks,
    ) -> Result<bool> {
        let LinkPositions { writing, .. } = &mut self.streams[halving_link];
        if writing.result_chunk(self.halving_links[halving_link].ahead) != Some(chunk) {
            return Ok(false);
        }
        let (start, outputs) =
            (self.schedule.chunk_extent(chunk).0 + stage.keep.start, &self.outputs);
        let link = &mut peers.links[self.halving_links[halving_link].link];
        let any = writing
            .message
            .send_window(&mut *link.sender, |at, to| outputs.read_at(start + at, to))?;
        self.advance_write_position(halving_link);
        Ok(any)
    }

    /// Stores the results that the other host of the stage has.
    fn receive_host_results(
        &mut self,
        ChunkOnHostLink { halving_link, chunk }: ChunkOnHostLink,
        stage: &HalvingStage,
        peers: &mut PeerLinks,
    ) -> Result<bool> {
        let LinkPositions { reading, .. } = &mut self.streams[halving_link];
        if reading.result_chunk(self.halving_links[halving_link].ahead) != Some(chunk) {
            return Ok(false);
        }
        let (start, outputs) =
            (self.schedule.chunk_extent(chunk).0 + stage.give.start, &self.outputs);
        let link = &mut peers.links[self.halving_links[halving_link].link];
        let any = reading
            .message
            .receive_window(&mut *link.receiver, |at, from| outputs.write_at(start + at, from))?;
        self.advance_read_position(halving_link);
        Ok(any)
    }

    /// Sends the result of a complete chunk to a member of this host.
    fn send_local_result(
        &mut self,
        halving_link: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let LinkPositions { writing, .. } = &mut self.streams[halving_link];
        let Some(chunk) = writing.result_chunk(self.halving_links[halving_link].ahead) else {
            return Ok(false);
        };
        // A chunk that was begun and is no longer in progress is complete.
        if chunk >= self.next || self.works.iter().any(|work| work.chunk == chunk) {
            return Ok(false);
        }
        let (start, outputs) = (self.schedule.chunk_extent(chunk).0, &self.outputs);
        let put = |at, to: &mut [u8]| copies.copy_from_list(outputs, start + at, to);
        let any = writing.message.send_window(&mut *link.sender, put)?;
        self.advance_write_position(halving_link);
        Ok(any)
    }

    /// Stores the result of a chunk that another member of this host carries.
    fn receive_local_result(&mut self, halving_link: usize, link: &mut Link) -> Result<bool> {
        let LinkPositions { reading, .. } = &mut self.streams[halving_link];
        let Some(chunk) = reading.result_chunk(self.halving_links[halving_link].ahead) else {
            return Ok(false);
        };
        let (start, outputs) = (self.schedule.chunk_extent(chunk).0, &self.outputs);
        let any = reading
            .message
            .receive_window(&mut *link.receiver, |at, from| outputs.write_at(start + at, from))?;
        self.advance_read_position(halving_link);
        Ok(any)
    }
}

/// A chunk and the link to another host on which it travels.
#[derive(Clone, Copy, Debug)]
struct ChunkOnHostLink {
    halving_link: usize,
    chunk: usize,
}

impl CollectiveJob for HalvingAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        let first =
            self.halving_links.partition_point(|halving_link| halving_link.link < self.member);
        let Range { start, end } = self.near;
        let near = || (first..end).chain(start..first);
        for halving_link in near() {
            let link = self.halving_links[halving_link].link;
            any |=
                self.send_input(halving_link, &mut peers.links[link], &mut peers.copies[link])?;
        }
        any |= self.reduce_host_inputs(peers)?;
        let mut works = std::mem::take(&mut self.works);
        // In order, because each link carries the messages of earlier chunks first.
        for work in &mut works {
            any |= self.exchange_between_hosts(work, peers)?;
        }
        works.retain(|work| !work.is_finished());
        self.works = works;
        for halving_link in near() {
            let link = self.halving_links[halving_link].link;
            any |= self.receive_local_result(halving_link, &mut peers.links[link])?;
            any |= self.send_local_result(
                halving_link,
                &mut peers.links[link],
                &mut peers.copies[link],
            )?;
        }
        let done = self.next >= self.schedule.chunk_count()
            && self.works.is_empty()
            && self.streams.iter().all(LinkPositions::is_at_end);
        if done {
            // The next operation of this communicator reuses the memory.
            peers.scratch.store = std::mem::take(&mut self.spare);
        }
        Ok(PollProgress { any, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        self.halving_links.iter().map(|halving_link| halving_link.link).collect()
    }
}

#[cfg(test)]
mod tests;

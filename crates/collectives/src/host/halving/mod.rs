// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in the host, across hosts by halves, and back.
//!
//! As in `hierarchy`, elements are cut in chunks, and one member of each host carries a chunk, in
//! turns: it joins the inputs of its host. The carriers then halve and double (Rabenseifner): in
//! step `k` a host swaps with the host `2^k` away halves of the partials that it has, keeps the sum
//! of one half, and so has `1 / H` of the chunk after `log2 H` steps. It makes the result of that.
//! In the reverse order of the steps results are swapped. Of what exceeds a power of two, the first
//! hosts are paired: one of the two gives its partials to the other before and gets the result
//! after. The two take turns, so that they send as much as the other hosts. This is the order of
//! `Order::pairs`.
//!
//! `2 + 2 * log2 H` steps, in progress at the same time for different chunks. Every member has
//! `log2 H` links to other hosts, or `2 * log2 H + 1` at most where `H` is no power of two, and
//! sends `2 * N / L` bytes over them at most. The first steps, which have the most bytes, are
//! between neighbouring hosts. Accumulators go up: those of 16-bit floats have twice the bytes of
//! elements, also if the reduction rounds the partials of hosts.
//!
//! On the link from `r` to `q` goes a fixed sequence of messages, as in `hierarchy`: for `t = 0, 1,
//! ...` first the early message for chunk `t`, then the late one for chunk `t - A`; empty ones are
//! left out. `A` falls with the distance of hosts, as results come back in the reverse order of the
//! steps, and is largest within a host.
//!
//! ```text
//! same host:    early(t): r's input, if q carries t             late(t): the result, if r carries t
//! other host:   early(t): partials of the half that q keeps     late(t): results of the half that r keeps
//! ```
//!
//! **No deadlock.** For each `t` in order, let there be these steps: the inputs of `t`; the swaps
//! of partials of `t`, one after the other; for each distance, the farthest first, the swaps of
//! results of `t - A`; the results of `t - A` (within). Every link has its messages in the order of
//! these steps, which is also that of the steps of each chunk, and a member begins chunks in this
//! order. Suppose no member can move, and consider the first step that is not over. All messages of
//! earlier steps have been read, so its messages are the first on their links, and the rings have
//! room. The partials of all earlier chunks were made to results, so there is memory to join
//! inputs. In a swap both ends have all they need from earlier steps: they can write what they give
//! and read what they keep, however small rings are. So some member can move.

pub(super) mod program;
mod schedule;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use farandole_transport::Link;

use super::UNIT;
use super::copies::Copies;
use super::hierarchy::{Inputs, arrived};
use super::peers::{Job, Moved, Peers};
use super::position::{Position, Stream};
use crate::Result;
use crate::buffer::Flat;
use crate::kernel::Reducer;
pub(super) use schedule::Lane;
use schedule::{Schedule, Stage, Way};

/// Bytes worked on at a time: they are still in the cache when they are written on.
const BLOCK: usize = 16 << 10;

/// A chunk that this member carries.
struct Work {
    chunk: usize,
    /// Bytes of elements that are joined.
    joined: usize,
    /// Steps between hosts that are over: first those of partials, then those of results, in
    /// reverse.
    step: usize,
    stages: usize,
    /// The present step; none before it was looked up.
    stage: Option<(usize, Stage)>,
    /// Partials of the whole chunk. Empty when the results are computed.
    partials: Vec<u8>,
}

impl Work {
    fn is_over(&self) -> bool {
        self.step == 2 * self.stages
    }
}

pub(super) struct Halving {
    reducer: Reducer,
    inputs: Flat,
    outputs: Flat,
    schedule: Schedule,
    member: usize,
    host: usize,
    /// Members on this host: every so many chunks are carried by this one.
    stride: usize,
    /// Links within the host.
    local: Range<usize>,
    /// The same among the lanes.
    near: Range<usize>,
    lanes: Arc<[Lane]>,
    /// By lane.
    streams: Vec<Stream>,
    /// Chunks under way, in order.
    works: VecDeque<Work>,
    /// The next chunk to begin.
    next: usize,
    /// Memory for partials.
    spare: Vec<Vec<u8>>,
}

impl Halving {
    pub(super) fn new(
        peers: &mut Peers,
        reducer: Reducer,
        inputs: Flat,
        outputs: Flat,
    ) -> Result<Self> {
        let schedule = Schedule::new(inputs.len(), &peers.hosts, reducer.width(), peers.capacity);
        let schedule = schedule.ok_or_else(|| peers.too_small())?;
        let (member, host) = (peers.member, peers.hosts.own());
        let lanes = match &peers.scratch.lanes {
            Some(lanes) => Arc::clone(lanes),
            None => Arc::clone(peers.scratch.lanes.insert(schedule.lanes(member).into())),
        };
        let mut spare = std::mem::take(&mut peers.scratch.store);
        spare.resize_with(schedule.begun(host), Vec::new);
        let longest = schedule.longest();
        spare.iter_mut().filter(|old| old.len() < longest).for_each(|old| old.resize(longest, 0));
        let stream = |lane: &Lane| Stream {
            writing: schedule.first(lane, Way::Out),
            reading: schedule.first(lane, Way::Back),
        };
        let members = peers.hosts.members(host);
        let local = peers.local_links();
        let before = |link| lanes.partition_point(|lane| lane.link < link);
        Ok(Self {
            streams: lanes.iter().map(stream).collect(),
            near: before(local.start)..before(local.end),
            local,
            lanes,
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

    fn wrote(&mut self, lane: usize) {
        let Stream { writing, .. } = &mut self.streams[lane];
        if writing.message.is_finished() {
            *writing = self.schedule.next(*writing, &self.lanes[lane], Way::Out);
        }
    }

    fn read(&mut self, lane: usize) {
        let Stream { reading, .. } = &mut self.streams[lane];
        if reading.message.is_finished() {
            *reading = self.schedule.next(*reading, &self.lanes[lane], Way::Back);
        }
    }

    /// Sends a carrier on this host what the link takes of this member's input.
    fn post(&mut self, lane: usize, link: &mut Link, copies: &mut Copies) -> Result<bool> {
        let Stream { writing, .. } = &mut self.streams[lane];
        let Some(chunk) = writing.early() else { return Ok(false) };
        let (start, inputs) = (self.schedule.chunk(chunk).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.read(inputs, start + at, to);
        let any = writing.message.put(&mut *link.sender, put)?;
        self.wrote(lane);
        Ok(any)
    }

    /// Begins a chunk if there is memory for its partials, and joins inputs of this host that have
    /// arrived.
    fn join(&mut self, peers: &mut Peers) -> Result<bool> {
        let is_joined =
            |work: &Work, schedule: &Schedule| work.joined == schedule.chunk(work.chunk).1;
        if self.works.back().is_none_or(|work| is_joined(work, &self.schedule)) {
            if self.next >= self.schedule.chunks() {
                return Ok(false);
            }
            let Some(partials) = self.spare.pop() else { return Ok(false) };
            let stages = self.schedule.stages(self.host, self.next);
            let chunk = self.next;
            self.works.push_back(Work { chunk, joined: 0, step: 0, stages, stage: None, partials });
            self.next += self.stride;
        }
        let Some(Work { chunk, joined: at, partials, .. }) = self.works.back_mut() else {
            return Ok(false);
        };
        let (start, len) = self.schedule.chunk(*chunk);
        let ready = |stream: &Stream| stream.reading.early() == Some(*chunk);
        if !self.streams[self.near.clone()].iter().all(ready) {
            return Ok(false);
        }
        let near = self.near.clone().zip(self.local.clone());
        let mut bytes = len - *at;
        for (lane, link) in near.clone() {
            bytes = bytes
                .min(arrived(&mut peers.links[link], &self.streams[lane].reading.message, UNIT)?.0);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let windows = peers.links[self.local.clone()].iter_mut().map(|link| link.receiver.window());
        let windows = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Links to earlier members come first.
        let place = self.member - self.local.start;
        let (width, reducer) = (self.schedule.width(), &self.reducer);
        let join = |inputs: &[&[u8]], out: &mut [u8]| reducer.accumulate(inputs, out);
        let inputs =
            Inputs { windows: &windows, place, own: &self.inputs, start: start + *at, bytes };
        inputs.join(width, join, &mut partials[*at * width..]);
        *at += bytes;
        let wire = bytes.next_multiple_of(UNIT);
        for (lane, link) in near {
            peers.links[link].receiver.release(wire)?;
            self.streams[lane].reading.message.advance(wire);
            self.read(lane);
        }
        Ok(true)
    }

    /// Moves a chunk between hosts as far as it goes.
    fn cross(&mut self, work: &mut Work, peers: &mut Peers) -> Result<bool> {
        let mut any = false;
        while work.joined == self.schedule.chunk(work.chunk).1 && !work.is_over() {
            let is_up = work.step < work.stages;
            let step = if is_up { work.step } else { 2 * work.stages - 1 - work.step };
            let Some((lane, stage)) =
                work.stage.take().or_else(|| self.stage(peers, work.chunk, step))
            else {
                break;
            };
            let over = if is_up {
                any |= self.give(lane, work, &stage, peers)?;
                any |= self.merge(lane, work, &stage, peers)?;
                let Stream { writing, reading } = &self.streams[lane];
                writing.is_past_early(work.chunk) && reading.is_past_early(work.chunk)
            } else {
                let far = Far { lane, chunk: work.chunk };
                any |= self.answer(far, &stage, peers)?;
                any |= self.store(far, &stage, peers)?;
                let Stream { writing, reading } = &self.streams[lane];
                let is_past =
                    |position: Position| position.is_past_late(self.lanes[lane].ahead, work.chunk);
                is_past(*writing) && is_past(*reading)
            };
            if !over {
                work.stage = Some((lane, stage));
                break;
            }
            any = true;
            work.step += 1;
            if is_up && work.step == work.stages {
                self.conclude(work, &stage.keep);
            }
        }
        Ok(any)
    }

    /// Returns a step of a chunk that this member carries, and its lane.
    fn stage(&self, peers: &Peers, chunk: usize, step: usize) -> Option<(usize, Stage)> {
        let stage = self.schedule.stage(self.host, chunk, step)?;
        let link = peers.link_to(self.schedule.hosts().carrier(stage.host, chunk));
        Some((self.lanes.partition_point(|lane| lane.link < link), stage))
    }

    /// Sends the partials that the other host keeps.
    fn give(&mut self, lane: usize, work: &Work, stage: &Stage, peers: &mut Peers) -> Result<bool> {
        let Stream { writing, .. } = &mut self.streams[lane];
        if writing.early() != Some(work.chunk) {
            return Ok(false);
        }
        let from = &work.partials[stage.give.start * self.schedule.width()..];
        let link = &mut peers.links[self.lanes[lane].link];
        let put = |at: usize, to: &mut [u8]| to.copy_from_slice(&from[at..at + to.len()]);
        let any = writing.message.put(&mut *link.sender, put)?;
        self.wrote(lane);
        Ok(any)
    }

    /// Joins the partials of the other host that have arrived with the own ones.
    fn merge(
        &mut self,
        lane: usize,
        work: &mut Work,
        stage: &Stage,
        peers: &mut Peers,
    ) -> Result<bool> {
        let Stream { reading, .. } = &mut self.streams[lane];
        if reading.early() != Some(work.chunk) {
            return Ok(false);
        }
        let link = &mut peers.links[self.lanes[lane].link];
        let (bytes, wire) = arrived(link, &reading.message, UNIT)?;
        if wire == 0 {
            return Ok(false);
        }
        let theirs = &link.receiver.window()?[..bytes];
        let at = stage.keep.start * self.schedule.width() + reading.message.done();
        let own = &mut work.partials[at..at + bytes];
        let scratch = &mut peers.scratch.result;
        scratch.resize(scratch.len().max(BLOCK), 0);
        for (own, theirs) in own.chunks_mut(BLOCK).zip(theirs.chunks(BLOCK)) {
            let joined = &mut scratch[..own.len()];
            let (earlier, later) = if stage.is_earlier { (&*own, theirs) } else { (theirs, &*own) };
            self.reducer.merge(earlier, later, joined);
            own.copy_from_slice(joined);
        }
        link.receiver.release(wire)?;
        reading.message.advance(wire);
        self.read(lane);
        Ok(true)
    }

    /// Makes the results of the own part, and gives the memory back.
    fn conclude(&mut self, work: &mut Work, own: &Range<usize>) {
        let (width, start) = (self.schedule.width(), self.schedule.chunk(work.chunk).0);
        self.outputs.fill(start + own.start, own.len(), |offset, out| {
            let at = own.start + offset;
            self.reducer.conclude(&work.partials[at * width..(at + out.len()) * width], out);
        });
        self.spare.push(std::mem::take(&mut work.partials));
    }

    /// Sends results of the part that this host has to the host that lacks them.
    fn answer(
        &mut self,
        Far { lane, chunk }: Far,
        stage: &Stage,
        peers: &mut Peers,
    ) -> Result<bool> {
        let Stream { writing, .. } = &mut self.streams[lane];
        if writing.late(self.lanes[lane].ahead) != Some(chunk) {
            return Ok(false);
        }
        let (start, outputs) = (self.schedule.chunk(chunk).0 + stage.keep.start, &self.outputs);
        let link = &mut peers.links[self.lanes[lane].link];
        let any = writing.message.put(&mut *link.sender, |at, to| outputs.read(start + at, to))?;
        self.wrote(lane);
        Ok(any)
    }

    /// Stores results of the part that the other host has.
    fn store(
        &mut self,
        Far { lane, chunk }: Far,
        stage: &Stage,
        peers: &mut Peers,
    ) -> Result<bool> {
        let Stream { reading, .. } = &mut self.streams[lane];
        if reading.late(self.lanes[lane].ahead) != Some(chunk) {
            return Ok(false);
        }
        let (start, outputs) = (self.schedule.chunk(chunk).0 + stage.give.start, &self.outputs);
        let link = &mut peers.links[self.lanes[lane].link];
        let any = reading
            .message
            .take(&mut *link.receiver, |at, from| outputs.write(start + at, from))?;
        self.read(lane);
        Ok(any)
    }

    /// Sends a member of this host the result of a chunk that is complete.
    fn hand_out(&mut self, lane: usize, link: &mut Link, copies: &mut Copies) -> Result<bool> {
        let Stream { writing, .. } = &mut self.streams[lane];
        let Some(chunk) = writing.late(self.lanes[lane].ahead) else { return Ok(false) };
        if chunk >= self.next || self.works.iter().any(|work| work.chunk == chunk) {
            return Ok(false);
        }
        let (start, outputs) = (self.schedule.chunk(chunk).0, &self.outputs);
        let put = |at, to: &mut [u8]| copies.read(outputs, start + at, to);
        let any = writing.message.put(&mut *link.sender, put)?;
        self.wrote(lane);
        Ok(any)
    }

    /// Stores the result of a chunk that another member of this host carries.
    fn fetch(&mut self, lane: usize, link: &mut Link) -> Result<bool> {
        let Stream { reading, .. } = &mut self.streams[lane];
        let Some(chunk) = reading.late(self.lanes[lane].ahead) else { return Ok(false) };
        let (start, outputs) = (self.schedule.chunk(chunk).0, &self.outputs);
        let any = reading
            .message
            .take(&mut *link.receiver, |at, from| outputs.write(start + at, from))?;
        self.read(lane);
        Ok(any)
    }
}

/// A chunk on a lane to another host.
#[derive(Clone, Copy, Debug)]
struct Far {
    lane: usize,
    chunk: usize,
}

impl Job for Halving {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        let first = self.lanes.partition_point(|lane| lane.link < self.member);
        let Range { start, end } = self.near;
        let near = || (first..end).chain(start..first);
        for lane in near() {
            let link = self.lanes[lane].link;
            any |= self.post(lane, &mut peers.links[link], &mut peers.copies[link])?;
        }
        any |= self.join(peers)?;
        let mut works = std::mem::take(&mut self.works);
        for work in &mut works {
            any |= self.cross(work, peers)?;
        }
        works.retain(|work| !work.is_over());
        self.works = works;
        for lane in near() {
            let link = self.lanes[lane].link;
            any |= self.fetch(lane, &mut peers.links[link])?;
            any |= self.hand_out(lane, &mut peers.links[link], &mut peers.copies[link])?;
        }
        let done = self.next >= self.schedule.chunks()
            && self.works.is_empty()
            && self.streams.iter().all(Stream::is_over);
        if done {
            peers.scratch.store = std::mem::take(&mut self.spare);
        }
        Ok(Moved { any, done })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        self.lanes.iter().map(|lane| lane.link).collect()
    }
}

#[cfg(test)]
mod tests;

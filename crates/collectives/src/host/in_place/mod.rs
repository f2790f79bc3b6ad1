// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce where the tensors lie: each member reduces its own part straight from all members'
//! memory, in member order, and writes the result into all members' memory.
//!
//! Nothing of the tensors goes over links. 2 rounds of a few bytes from every member to all others,
//! and one more for memory that is new to them:
//!
//! ```text
//! where    where each tensor lies, or that it is the member's own; all have entered when all of these are here
//! verdict  whether the member could map what it had not seen before
//! part     the member is done with everybody's memory
//! ```
//!
//! If a tensor of a member is its own, or if memory could not be mapped, all members know it after
//! the same round and take the pipeline. A member with tensors of its own knows it before, and
//! begins without waiting for the others' words.
//!
//! Parts do not overlap, and a member reads and writes only its own part of all members' memory, so
//! no read meets another member's write. A member is done once all others have sent `part`: then no
//! other member touches its memory any more. If it gives up before, it takes its memory away from
//! the others (`Region::detach`), which may not know yet. Their mappings keep the bytes, so members
//! that still complete do so with the right ones.
//!
//! **No deadlock.** Each round is sent without waiting for anybody, and whatever arrives is taken
//! at once; between rounds a member waits for nothing. All members take the same rounds: which they
//! are depends on what all have heard alone.

mod place;

use std::ops::Range;

use super::UNIT;
use super::exchange::Exchange;
use super::peers::{Job, Moved, Peers};
use super::pipeline::Pipeline;
use crate::buffer::Flat;
use crate::kernel::Reducer;
use crate::{Error, Memory, Result};
use place::Place;
pub(super) use place::Regions;

/// Below, the rounds cost more than is gained.
const LEAST: usize = 256 << 10;
/// Tensors of one operation, at most: each takes a unit of the first round.
const MOST: usize = 64;
/// Bytes reduced before they are copied on, where that takes two passes: they are still in the
/// first-level cache.
const BLOCK: usize = 16 << 10;
/// Bytes reduced in one poll.
const SLICE: usize = 256 << 10;

/// Returns whether members tell each other where their tensors lie: depends only on values that are
/// equal on all of them.
pub(super) fn is_considered(peers: &Peers, outputs: &Flat) -> bool {
    let tensors = outputs.buffers().iter().filter(|buffer| !buffer.is_empty()).count();
    peers.shape.hosts == 1 && outputs.len() >= LEAST && tensors <= MOST
}

pub(super) struct InPlace {
    stage: Stage,
    heads: Exchange,
    /// Bytes of each tensor.
    tensors: Vec<usize>,
    /// Taken by the worker.
    task: Option<Task>,
    /// Memory of this member that others may be working in.
    exposed: Vec<Memory>,
}

struct Task {
    reducer: Reducer,
    inputs: Flat,
    outputs: Flat,
}

enum Stage {
    Meeting,
    Judging { verdicts: Exchange, places: Vec<Vec<Place>> },
    Working(Work),
    Parting(Exchange),
    Elsewhere(Box<Pipeline>),
}

impl InPlace {
    pub(super) fn new(peers: &mut Peers, reducer: Reducer, inputs: Flat, outputs: Flat) -> Self {
        peers.regions.sweep();
        let tensors: Vec<usize> =
            outputs.buffers().iter().map(crate::Buffer::len).filter(|bytes| *bytes > 0).collect();
        let mut head = Vec::with_capacity(tensors.len() * UNIT);
        let mut exposed = Vec::new();
        if let Some((places, memories)) = place::own(&inputs, &outputs) {
            places.iter().for_each(|place| place.write(&mut head));
            exposed = memories;
        }
        head.resize(tensors.len() * UNIT, 0);
        let heads = Exchange::new(peers, head);
        Self {
            stage: Stage::Meeting,
            heads,
            tensors,
            task: Some(Task { reducer, inputs, outputs }),
            exposed,
        }
    }

    fn task(&mut self) -> Result<Task> {
        let taken = || Error::Shape { reason: "an allreduce was begun twice".to_owned() };
        self.task.take().ok_or_else(taken)
    }

    fn elsewhere(&mut self, peers: &Peers) -> Result<Stage> {
        // Everybody goes there.
        self.exposed.clear();
        let Task { reducer, inputs, outputs } = self.task()?;
        Ok(Stage::Elsewhere(Box::new(Pipeline::new(peers, reducer, inputs, outputs)?)))
    }

    /// Returns all members' places, if all have told them.
    fn places(&self, member: usize) -> Option<Vec<Vec<Place>>> {
        self.heads.said(member).map(|head| head.chunks(UNIT).map(Place::read).collect()).collect()
    }

    /// Continues when all members have sent the places of their tensors.
    fn meet(&mut self, peers: &mut Peers) -> Result<Stage> {
        let Some(places) = self.places(peers.member) else { return self.elsewhere(peers) };
        let mut new = false;
        for place in places.iter().flatten() {
            match peers.regions.judged(place) {
                Some(true) => {}
                Some(false) => return self.elsewhere(peers),
                None => new = true,
            }
        }
        if !new {
            return self.work(peers, &places);
        }
        let mut mapped = true;
        for (_, places) in places.iter().enumerate().filter(|(member, _)| *member != peers.member) {
            mapped &= places.iter().all(|place| peers.regions.map(place));
        }
        let verdicts = Exchange::new(peers, vec![u8::from(mapped); UNIT]);
        Ok(Stage::Judging { verdicts, places })
    }

    /// Continues when all members have reported whether they could map the new memory.
    fn judge(&mut self, peers: &mut Peers, all: bool, places: &[Vec<Place>]) -> Result<Stage> {
        for place in places.iter().flatten() {
            if peers.regions.judged(place).is_none() {
                peers.regions.judge(place, all);
            }
        }
        if all { self.work(peers, places) } else { self.elsewhere(peers) }
    }

    fn work(&mut self, peers: &Peers, places: &[Vec<Place>]) -> Result<Stage> {
        let Task { reducer, outputs, .. } = self.task()?;
        let mut own = Some(outputs);
        let mut lists = Vec::with_capacity(places.len());
        for (member, places) in places.iter().enumerate() {
            if member == peers.member {
                lists.extend(own.take().map(|own| {
                    Flat::new(own.buffers().iter().filter(|buffer| !buffer.is_empty()).cloned())
                }));
                continue;
            }
            let tensors = places.iter().zip(&self.tensors);
            let buffers: Option<Vec<_>> =
                tensors.map(|(place, bytes)| peers.regions.buffer(place, *bytes)).collect();
            let Some(buffers) = buffers else {
                // It announced the memory, failed later, and has freed it.
                let rank = peers.links[peers.link_to(member)].peer;
                let (host, reason) = ("this host".to_owned(), "it gave up its memory".to_owned());
                return Err(farandole_transport::Error::PeerLost { rank, host, reason }.into());
            };
            lists.push(Flat::new(buffers));
        }
        Ok(Stage::Working(Work::new(peers, reducer, lists)))
    }

    /// Ends the operation: no member works in this member's memory any more.
    fn part(&mut self) -> Result<()> {
        let own = std::mem::take(&mut self.exposed);
        if own.iter().all(Memory::is_shareable) {
            return Ok(());
        }
        // Another communicator gave it up: the others' results went to where it was.
        Err(Error::Shape {
            reason: "the memory was in use by another operation that failed".to_owned(),
        })
    }
}

impl Job for InPlace {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        let next = match &mut self.stage {
            Stage::Meeting => {
                any |= self.heads.poll(peers)?;
                if self.heads.sent() && self.heads.received() {
                    Some(self.meet(peers)?)
                } else if self.heads.sent() && self.exposed.is_empty() {
                    Some(self.elsewhere(peers)?)
                } else {
                    None
                }
            }
            Stage::Judging { verdicts, places } => {
                any |= verdicts.poll(peers)?;
                if verdicts.sent() && verdicts.received() {
                    let all = verdicts.said(peers.member).all(|said| said.first() == Some(&1));
                    let places = std::mem::take(places);
                    Some(self.judge(peers, all, &places)?)
                } else {
                    None
                }
            }
            Stage::Working(work) => {
                any = true;
                work.advance().then(|| Stage::Parting(Exchange::new(peers, vec![0; UNIT])))
            }
            Stage::Parting(words) => {
                any |= words.poll(peers)?;
                if words.sent() && words.received() {
                    self.part()?;
                    return Ok(Moved { any: true, done: true });
                }
                None
            }
            Stage::Elsewhere(pipeline) if !self.heads.received() => {
                any |= self.heads.poll(peers)?;
                any |= pipeline.post_all(peers)?;
                None
            }
            Stage::Elsewhere(pipeline) => return pipeline.poll(peers),
        };
        if let Some(next) = next {
            self.stage = next;
            any = true;
        }
        Ok(Moved { any, done: false })
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        for memory in &self.exposed {
            // Without memory for a copy it stays in place; peers notice the failure after a block
            // or two.
            let _ = memory.region().map(farandole_shm::Region::detach);
        }
    }
}

/// The own part of all members' memory.
struct Work {
    reducer: Reducer,
    /// Every member's tensors.
    lists: Vec<Flat>,
    left: Range<usize>,
    block: Vec<u8>,
}

impl Work {
    fn new(peers: &Peers, reducer: Reducer, lists: Vec<Flat>) -> Self {
        let bytes = lists.first().map_or(0, Flat::len);
        let units = bytes.div_ceil(UNIT);
        let start = |member: usize| (units * member / peers.size() * UNIT).min(bytes);
        let left = start(peers.member)..start(peers.member + 1);
        Self { reducer, lists, left, block: vec![0; BLOCK] }
    }

    /// True when all is done.
    fn advance(&mut self) -> bool {
        let Self { reducer, lists, left, block } = self;
        let bytes = left.len().min(SLICE);
        Flat::change_all(lists, left.start, bytes, |all| reducer.run_in_place(all, block));
        left.start += bytes;
        left.start >= left.end
    }
}

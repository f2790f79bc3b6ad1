// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in shared memory, without copying the tensors: each member reduces its own part
//! directly from the memory of all members, in member order, and writes the result to the memory of
//! all members.
//!
//! No tensor bytes go over links. The members take 2 rounds of a few bytes from every member to all
//! others, and a third round for memory that is new to them:
//!
//! ```text
//! where    the location of each tensor, or that it lies in private memory; when all of
//!          these messages have arrived, all members have entered the operation
//! verdict  whether the member could map the memory that was new to it
//! part     the member no longer uses any other member's memory
//! ```
//!
//! If a tensor lies in private memory of its member, or if memory could not be mapped, all members
//! know this after the same round and use the pipeline. A member with private tensors knows it
//! before, and begins without waiting for the messages of the others.
//!
//! Parts do not overlap, and a member reads and writes only its own part of all members' memory, so
//! no read meets another member's write. A member is done once all others have sent `part`: then no
//! other member touches its memory any more. If a member gives up before, it detaches its memory
//! from the others (`SharedRegion::detach_from_peers`), which may not know of the failure yet.
//! Their mappings keep the bytes, so members that still complete compute correct results.
//!
//! **No deadlock.** Each round is sent without waiting for any member, and every arriving message
//! is taken at once; between rounds a member waits for nothing. All members take the same rounds,
//! because the choice of rounds depends only on messages that all members have received.

mod tensor_location;

use std::ops::Range;

use farandole_kernels::{BlockReducer, Buffer, GatherList, HostMemory};

use super::chunk_sizes::UNIT_BYTES;
use super::member_exchange::MemberExchange;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use super::pipelined_allreduce::PipelinedAllreduceJob;
use crate::{Error, Result};
use tensor_location::{PeerRegions, TensorLocation};

/// Fewest bytes for an allreduce in place: below, the rounds cost more than it gains.
const MIN_IN_PLACE_BYTES: usize = 256 << 10;
/// Most tensors of one operation: each tensor takes one unit of the first round.
const MAX_IN_PLACE_TENSORS: usize = 64;
/// Bytes that are reduced before they are copied, if that takes two passes: they are still in the
/// first-level cache.
const IN_PLACE_BLOCK_BYTES: usize = 16 << 10;
/// Bytes that are reduced in one poll.
// The engine checks deadlines and other operations only between two polls.
const IN_PLACE_BYTES_PER_POLL: usize = 256 << 10;

/// Returns whether members exchange the locations of their tensors. The answer depends only on
/// values that are equal on all members.
pub(super) fn is_in_place_candidate(peers: &PeerLinks, outputs: &GatherList) -> bool {
    let tensors = outputs.buffers().iter().filter(|buffer| !buffer.is_empty()).count();
    peers.shape.hosts == 1 && outputs.len() >= MIN_IN_PLACE_BYTES && tensors <= MAX_IN_PLACE_TENSORS
}

pub(super) struct InPlaceAllreduceJob {
    stage: InPlaceStage,
    locations: MemberExchange,
    /// Bytes of each tensor.
    tensors: Vec<usize>,
    /// Buffers and reducer, until the reduction or the pipeline takes them.
    task: Option<AllreduceTask>,
    /// Memory of this member that other members may be using.
    exposed: Vec<HostMemory>,
    /// Mapped memory of other members, kept from operation to operation.
    regions: PeerRegions,
}

struct AllreduceTask {
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
}

enum InPlaceStage {
    ExchangingLocations,
    ExchangingVerdicts { verdicts: MemberExchange, places: Vec<Vec<TensorLocation>> },
    Reducing(InPlaceReduction),
    AwaitingPeers(MemberExchange),
    Pipelined(Box<PipelinedAllreduceJob>),
}

impl InPlaceAllreduceJob {
    pub(super) fn new(
        peers: &mut PeerLinks,
        reducer: BlockReducer,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Self {
        let mut regions: PeerRegions = peers.scratch.caches.take_cache();
        regions.unmap_retired_regions();
        let tensors: Vec<usize> =
            outputs.buffers().iter().map(Buffer::len).filter(|bytes| *bytes > 0).collect();
        let mut head = Vec::with_capacity(tensors.len() * UNIT_BYTES);
        let mut exposed = Vec::new();
        if let Some((places, memories)) = tensor_location::own_locations(&inputs, &outputs) {
            places.iter().for_each(|location| location.encode_location_unit(&mut head));
            exposed = memories;
        }
        // Zeros stand for tensors in private memory.
        head.resize(tensors.len() * UNIT_BYTES, 0);
        let heads = MemberExchange::new(peers, head);
        Self {
            stage: InPlaceStage::ExchangingLocations,
            locations: heads,
            tensors,
            task: Some(AllreduceTask { reducer, inputs, outputs }),
            exposed,
            regions,
        }
    }

    fn take_task(&mut self) -> Result<AllreduceTask> {
        let taken = || Error::Shape { reason: "an allreduce was begun twice".to_owned() };
        self.task.take().ok_or_else(taken)
    }

    fn fall_back_to_pipeline(&mut self, peers: &PeerLinks) -> Result<InPlaceStage> {
        // All members fall back, so no other member uses this memory.
        self.exposed.clear();
        let AllreduceTask { reducer, inputs, outputs } = self.take_task()?;
        Ok(InPlaceStage::Pipelined(Box::new(PipelinedAllreduceJob::new(
            peers, reducer, inputs, outputs,
        )?)))
    }

    /// Returns the tensor locations of all members, if all members have sent them.
    fn all_tensor_locations(&self, member: usize) -> Option<Vec<Vec<TensorLocation>>> {
        self.locations
            .member_messages(member)
            .map(|head| head.chunks(UNIT_BYTES).map(TensorLocation::decode_location_unit).collect())
            .collect()
    }

    /// Continues after all members have sent the locations of their tensors.
    fn handle_locations(&mut self, peers: &mut PeerLinks) -> Result<InPlaceStage> {
        let Some(places) = self.all_tensor_locations(peers.member) else {
            return self.fall_back_to_pipeline(peers);
        };
        let mut new = false;
        for location in places.iter().flatten() {
            match self.regions.recorded_mapping_verdict(location) {
                Some(true) => {}
                // A mapping that failed once would fail again, and the extra round would cost time.
                Some(false) => return self.fall_back_to_pipeline(peers),
                None => new = true,
            }
        }
        if !new {
            return self.start_reduction(peers, &places);
        }
        let mut mapped = true;
        for (_, places) in places.iter().enumerate().filter(|(member, _)| *member != peers.member) {
            mapped &= places.iter().all(|location| self.regions.map_region(location));
        }
        // Sent also after a failure: the others have to know it before they use the memory.
        let verdicts = MemberExchange::new(peers, vec![u8::from(mapped); UNIT_BYTES]);
        Ok(InPlaceStage::ExchangingVerdicts { verdicts, places })
    }

    /// Continues after all members have reported whether they could map the new memory.
    fn handle_mapping_verdicts(
        &mut self,
        peers: &mut PeerLinks,
        all: bool,
        places: &[Vec<TensorLocation>],
    ) -> Result<InPlaceStage> {
        for location in places.iter().flatten() {
            if self.regions.recorded_mapping_verdict(location).is_none() {
                self.regions.record_mapping_verdict(location, all);
            }
        }
        if all { self.start_reduction(peers, places) } else { self.fall_back_to_pipeline(peers) }
    }

    fn start_reduction(
        &mut self,
        peers: &PeerLinks,
        places: &[Vec<TensorLocation>],
    ) -> Result<InPlaceStage> {
        let AllreduceTask { reducer, outputs, .. } = self.take_task()?;
        let mut own = Some(outputs);
        let mut lists = Vec::with_capacity(places.len());
        for (member, places) in places.iter().enumerate() {
            if member == peers.member {
                lists.extend(own.take().map(|own| {
                    GatherList::new(
                        own.buffers().iter().filter(|buffer| !buffer.is_empty()).cloned(),
                    )
                }));
                continue;
            }
            let tensors = places.iter().zip(&self.tensors);
            let buffers: Option<Vec<_>> = tensors
                .map(|(location, bytes)| self.regions.region_buffer(location, *bytes))
                .collect();
            let Some(buffers) = buffers else {
                // The member announced the memory, failed later, and has freed it.
                let rank = peers.links[peers.link_to(member)].peer;
                let (host, reason) = ("this host".to_owned(), "it gave up its memory".to_owned());
                return Err(farandole_transport::Error::PeerLost { rank, host, reason }.into());
            };
            lists.push(GatherList::new(buffers));
        }
        Ok(InPlaceStage::Reducing(InPlaceReduction::new(peers, reducer, lists)))
    }

    /// Ends the operation: no other member uses the memory of this member any more.
    fn release_exposed_memory(&mut self) -> Result<()> {
        let own = std::mem::take(&mut self.exposed);
        if own.iter().all(HostMemory::is_shareable) {
            return Ok(());
        }
        // An operation of another communicator failed and detached the memory, so the other members
        // wrote their results to the old mapping.
        Err(Error::Shape {
            reason: "the memory was in use by another operation that failed".to_owned(),
        })
    }
}

impl CollectiveJob for InPlaceAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        let next = match &mut self.stage {
            InPlaceStage::ExchangingLocations => {
                any |= self.locations.poll(peers)?;
                if self.locations.is_sent_to_all_members()
                    && self.locations.is_received_from_all_members()
                {
                    Some(self.handle_locations(peers)?)
                } else if self.locations.is_sent_to_all_members() && self.exposed.is_empty() {
                    // This member knows the outcome already: all will fall back when they see its
                    // message.
                    Some(self.fall_back_to_pipeline(peers)?)
                } else {
                    None
                }
            }
            InPlaceStage::ExchangingVerdicts { verdicts, places } => {
                any |= verdicts.poll(peers)?;
                if verdicts.is_sent_to_all_members() && verdicts.is_received_from_all_members() {
                    let all =
                        verdicts.member_messages(peers.member).all(|said| said.first() == Some(&1));
                    let places = std::mem::take(places);
                    Some(self.handle_mapping_verdicts(peers, all, &places)?)
                } else {
                    None
                }
            }
            InPlaceStage::Reducing(work) => {
                any = true;
                work.reduce_next_slice().then(|| {
                    InPlaceStage::AwaitingPeers(MemberExchange::new(peers, vec![0; UNIT_BYTES]))
                })
            }
            InPlaceStage::AwaitingPeers(words) => {
                any |= words.poll(peers)?;
                if words.is_sent_to_all_members() && words.is_received_from_all_members() {
                    self.release_exposed_memory()?;
                    peers.scratch.caches.keep_cache(std::mem::take(&mut self.regions));
                    return Ok(PollProgress { any: true, done: true });
                }
                None
            }
            // The links still carry locations before the inputs of the others, so the pipeline may
            // only send.
            InPlaceStage::Pipelined(pipeline) if !self.locations.is_received_from_all_members() => {
                any |= self.locations.poll(peers)?;
                any |= pipeline.send_inputs(peers)?;
                None
            }
            InPlaceStage::Pipelined(pipeline) => {
                let moved = pipeline.poll(peers)?;
                if moved.done {
                    peers.scratch.caches.keep_cache(std::mem::take(&mut self.regions));
                }
                return Ok(moved);
            }
        };
        if let Some(next) = next {
            self.stage = next;
            any = true;
        }
        Ok(PollProgress { any, done: false })
    }
}

impl Drop for InPlaceAllreduceJob {
    fn drop(&mut self) {
        for memory in &self.exposed {
            // If there is no memory for a copy, the region stays attached; peers notice the failure
            // after a block or two.
            let _ = memory.shared_region().map(farandole_shm::SharedRegion::detach_from_peers);
        }
    }
}

/// Reduction of the own part in the memory of all members.
struct InPlaceReduction {
    reducer: BlockReducer,
    /// Tensors of every member.
    lists: Vec<GatherList>,
    remaining: Range<usize>,
    block: Vec<u8>,
}

impl InPlaceReduction {
    fn new(peers: &PeerLinks, reducer: BlockReducer, lists: Vec<GatherList>) -> Self {
        let bytes = lists.first().map_or(0, GatherList::len);
        let units = bytes.div_ceil(UNIT_BYTES);
        // In units, so that no two members write to one cache line.
        let start = |member: usize| (units * member / peers.member_count() * UNIT_BYTES).min(bytes);
        let left = start(peers.member)..start(peers.member + 1);
        Self { reducer, lists, remaining: left, block: vec![0; IN_PLACE_BLOCK_BYTES] }
    }

    /// Reduces the next bytes. Returns true when the whole part is reduced.
    fn reduce_next_slice(&mut self) -> bool {
        let Self { reducer, lists, remaining: left, block } = self;
        let bytes = left.len().min(IN_PLACE_BYTES_PER_POLL);
        GatherList::update_all_ranges(lists, left.start, bytes, |all| {
            reducer.reduce_in_place(all, block)
        });
        left.start += bytes;
        left.start >= left.end
    }
}

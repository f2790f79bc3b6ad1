// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce in three phases: within the host, across hosts, and back within the host.
//!
//! Elements are cut into chunks. In every host one member carries a chunk, in turns: the others
//! send it their inputs, and it joins these inputs with its own to the partial of the host. The `H`
//! carriers of a chunk form a separate pipeline: each owns one part of the chunk, receives the
//! partials of this part, computes the result, and sends the result to the other carriers. Then
//! each carrier distributes the whole chunk in its host. 4 steps, all in progress at the same time
//! for different chunks. With `L` members on each of `H` hosts, every member sends
//! `2 * (H - 1) / H * N / L` bytes to other hosts and `2 * (L - 1) / L * N` bytes within its host.
//! The partials of 16-bit floats take twice their bytes on the way to the owner, unless the
//! reduction rounds them.
//!
//! The link from `r` to `q` carries a fixed sequence of messages: for `t = 0, 1, ...`, first the
//! early message for chunk `t`, then the late message for chunk `t - A`; empty messages are left
//! out. `A` is smaller between hosts than within them.
//!
//! ```text
//! same host:   early(t): r's input, if q carries t
//!              late(t):  the result, if r carries t
//! other host:  early(t): the partial of q's part, if both carry t
//!              late(t):  the result of r's part, if both carry t
//! ```
//!
//! So a result goes to other hosts after partials up to `A` (between) chunks later. These partials
//! need inputs that come after results of `A` (within) chunks before them. The difference of both
//! values of `A` is the number of chunks that are between hosts at once.
//!
//! **No deadlock.** For each `t` in order, let there be these steps: the inputs, partials and
//! reduction of `t` in one; then the results of `t - A` (between) go between hosts; then the
//! results of `t - A` (within) go within hosts, after they went between hosts, because `A` (within)
//! is not smaller. Every link carries its messages in the order of these steps. Suppose no member
//! can move, and consider the first unfinished step. All messages of earlier steps have been read,
//! so its messages are the first on their links, and the rings have room for some of them. If the
//! step sends results, the results were computed or have arrived, so the sender can write, and the
//! receiver can store the arriving bytes. If the step is a reduction, let `b` be the first byte of
//! the chunk that is not reduced. The bytes before `b` are reduced, hence joined by all carriers
//! and no longer in rings. All carriers come to `b` next, and have the inputs, as these are the
//! first on their links. The carriers can write the partial: the ring to the owner has room, and at
//! least one slot of the owner's store is free. Then the owner has all partials of `b`. So some
//! member can move, however small rings are. [`HierarchySchedule`] cuts chunks so that they are
//! large enough for partials of several chunks. Earlier and later operations change nothing: see
//! `pipeline`.

mod schedule;

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use farandole_kernels::{BlockReducer, GatherList};
use farandole_transport::Link;

use super::chunk_sizes::UNIT_BYTES;
use super::copy_path::RingCopier;
use super::message::MessageProgress;
use super::message_position::LinkPositions;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;
pub(super) use schedule::HierarchySchedule;
use schedule::RouteDirection;

/// Position in the sequence of chunks that this member carries.
#[derive(Clone, Copy, Debug)]
struct ChunkCursor {
    chunk: usize,
    /// Position in the chunk, in bytes of elements.
    at: usize,
}

/// Link that a hierarchy uses.
#[derive(Clone, Copy, Debug)]
struct HierarchyRoute {
    link: usize,
    host: usize,
    out: RouteDirection,
    back: RouteDirection,
}

/// Routes that the first hierarchy of a communicator has found.
#[derive(Default)]
struct HierarchyRouteCache(Option<Arc<[HierarchyRoute]>>);

/// Returns the links that hierarchies use. If all hosts have the same number of members, these are
/// the links within the host, and one link to each other host.
fn find_hierarchy_routes(peers: &PeerLinks) -> Arc<[HierarchyRoute]> {
    let route = |link: usize| {
        let (own, peer) = (peers.member, peers.member_of_link(link));
        let direction = |from, to| RouteDirection::new(&peers.hosts, from, to);
        HierarchyRoute {
            link,
            host: peers.hosts.host_of(peer),
            out: direction(own, peer),
            back: direction(peer, own),
        }
    };
    (0..peers.links.len())
        .map(route)
        .filter(|route| !route.out.carries_no_messages() || !route.back.carries_no_messages())
        .collect()
}

/// Number of stored result bytes of a chunk, by host of their owner. Needed to distribute the
/// chunk.
struct StoredResultBytes {
    chunk: usize,
    bytes: Vec<usize>,
}

pub(super) struct HierarchicalAllreduceJob {
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
    schedule: HierarchySchedule,
    member: usize,
    host: usize,
    /// Number of members on this host; this member carries every `stride`-th chunk.
    stride: usize,
    /// Links within the host, as indices of links.
    local: Range<usize>,
    /// Links within the host, as indices of routes.
    near: Range<usize>,
    routes: Arc<[HierarchyRoute]>,
    /// Positions in the message sequences, by route.
    streams: Vec<LinkPositions>,
    joining: ChunkCursor,
    reducing: ChunkCursor,
    /// This host's partials of the own parts, by carried chunk.
    store: Vec<Vec<u8>>,
    arrived: VecDeque<StoredResultBytes>,
    /// First chunk that this member carries and has not distributed.
    handed_out: usize,
    /// Routes to the other carriers of the chunk that is being reduced.
    carriers: Vec<usize>,
}

impl HierarchicalAllreduceJob {
    pub(super) fn new(
        peers: &mut PeerLinks,
        reducer: BlockReducer,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Result<Self> {
        let mut store = std::mem::take(&mut peers.scratch.store);
        // The routes do not depend on the bytes, and finding them means looking at all links.
        let HierarchyRouteCache(routes) = peers.scratch.caches.take_cache();
        let routes = routes.unwrap_or_else(|| find_hierarchy_routes(peers));
        peers.scratch.caches.keep_cache(HierarchyRouteCache(Some(Arc::clone(&routes))));
        let (peers, hosts) = (&*peers, &peers.hosts);
        let expansion = reducer.partial_expansion();
        let schedule = HierarchySchedule::new(inputs.len(), hosts, expansion, peers.capacity)
            .ok_or_else(|| peers.ring_too_small_error())?;
        let (member, host) = (peers.member, hosts.own_host());
        let stream = |route: &HierarchyRoute| LinkPositions {
            writing: schedule.next_nonempty_message(0, &route.out),
            reading: schedule.next_nonempty_message(0, &route.back),
        };
        let local = peers.local_links();
        let before = |link| routes.partition_point(|route| route.link < link);
        let first = ChunkCursor { chunk: member - hosts.host_members(host).start, at: 0 };
        store.resize_with(schedule.chunks_in_flight(host), Vec::new);
        let slot = schedule.max_part_bytes() * expansion;
        store.iter_mut().filter(|old| old.len() < slot).for_each(|old| old.resize(slot, 0));
        Ok(Self {
            streams: routes.iter().map(stream).collect(),
            near: before(local.start)..before(local.end),
            local,
            routes,
            store,
            stride: hosts.host_members(host).len(),
            joining: first,
            reducing: first,
            arrived: VecDeque::new(),
            handed_out: first.chunk,
            carriers: Vec::new(),
            reducer,
            inputs,
            outputs,
            schedule,
            member,
            host,
        })
    }

    /// Returns the route to the carrier of a chunk on another host.
    fn route_to_carrier(&self, peers: &PeerLinks, host: usize, chunk: usize) -> usize {
        let link = peers.link_to(peers.hosts.carrier_for_turn(host, chunk));
        self.routes.partition_point(|route| route.link < link)
    }

    fn chunk_store_slot(&self, chunk: usize) -> usize {
        chunk / self.stride % self.store.len()
    }

    /// Sends this member's input to a carrier on this host, at most as many bytes as the link
    /// takes.
    fn send_input(
        &mut self,
        index: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let LinkPositions { writing, .. } = &mut self.streams[index];
        let Some(chunk) = writing.operand_chunk() else { return Ok(false) };
        let (start, inputs) = (self.schedule.chunk_extent(chunk).0, &self.inputs);
        let put = |at, to: &mut [u8]| copies.copy_from_list(inputs, start + at, to);
        let any = writing.message.send_window(&mut *link.sender, put)?;
        self.advance_write_position(index);
        Ok(any)
    }

    fn advance_write_position(&mut self, index: usize) {
        let LinkPositions { writing, .. } = &mut self.streams[index];
        if writing.message.is_finished() {
            *writing = self.schedule.next_message(*writing, &self.routes[index].out);
        }
    }

    fn advance_read_position(&mut self, index: usize) {
        let LinkPositions { reading, .. } = &mut self.streams[index];
        if reading.message.is_finished() {
            *reading = self.schedule.next_message(*reading, &self.routes[index].back);
        }
    }

    /// Joins inputs of this host that have arrived. The partial is written to the window of the
    /// link to the owner of the part, or to the own store.
    fn reduce_host_inputs(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let ChunkCursor { chunk, at } = self.joining;
        let (start, len) = self.schedule.chunk_extent(chunk);
        if chunk >= self.schedule.chunk_count() {
            return Ok(false);
        }
        let Some((owner, part)) = self.schedule.owning_host(chunk, at) else { return Ok(false) };
        let expansion = self.reducer.partial_expansion();
        let ready = |stream: &LinkPositions| stream.reading.operand_chunk() == Some(chunk);
        let near = self.near.clone().zip(self.local.clone());
        if !self.streams[self.near.clone()].iter().all(ready) {
            return Ok(false);
        }
        // Bytes of elements that can be joined: whole units, except at the end of the chunk.
        let mut bytes = part.end - at;
        for (index, link) in near.clone() {
            bytes = bytes.min(
                arrived_bytes(
                    &mut peers.links[link],
                    &self.streams[index].reading.message,
                    UNIT_BYTES,
                )?
                .0,
            );
        }
        let target = (owner != self.host).then(|| self.route_to_carrier(peers, owner, chunk));
        let target = target.map(|target| (target, self.routes[target].link));
        if let Some((target, link)) = target {
            // The link still carries an earlier message.
            if self.streams[target].writing.operand_chunk() != Some(chunk) {
                return Ok(false);
            }
            let window = peers.links[link].sender.window()?.len();
            // Whole units of elements, so that the partial and the inputs end at the same element.
            bytes = bytes.min(window / (UNIT_BYTES * expansion) * UNIT_BYTES);
        } else if chunk / self.stride >= self.reducing.chunk / self.stride + self.store.len() {
            // The slot still holds the partial of an earlier chunk that is not reduced yet.
            return Ok(false);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let slot = self.chunk_store_slot(chunk);
        let (before, rest) = peers.links.split_at_mut(self.local.start);
        let (local, after) = rest.split_at_mut(self.local.len());
        let out = match target {
            None => &mut self.store[slot][(at - part.start) * expansion..],
            Some((_, link)) if link < self.local.start => before[link].sender.window()?,
            Some((_, link)) => after[link - self.local.end].sender.window()?,
        };
        let windows = local.iter_mut().map(|link| link.receiver.window());
        let windows = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Links to earlier members come first.
        let place = self.member - self.local.start;
        if !peers.reductions.record_if_simulating(bytes * (windows.len() + 1 + expansion)) {
            let (reducer, inputs) = (&self.reducer, &self.inputs);
            reduce_host_blocks(reducer, &windows, place, inputs, start + at, bytes, out);
        }
        if let Some((target, link)) = target {
            let message = &mut self.streams[target].writing.message;
            let wire = (bytes * expansion).next_multiple_of(UNIT_BYTES);
            out[bytes * expansion..wire].fill(0);
            message.advance_by(wire);
            peers.links[link].sender.commit(wire)?;
            self.advance_write_position(target);
        }
        let wire = bytes.next_multiple_of(UNIT_BYTES);
        for (index, link) in near {
            peers.links[link].receiver.release(wire)?;
            self.streams[index].reading.message.advance_by(wire);
            self.advance_read_position(index);
        }
        self.joining.at += bytes;
        if self.joining.at == len {
            self.joining = ChunkCursor { chunk: chunk + self.stride, at: 0 };
        }
        Ok(true)
    }

    /// Computes results from the partials of the own part that have arrived.
    fn reduce_own_part(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let ChunkCursor { chunk, at } = self.reducing;
        if chunk >= self.schedule.chunk_count() {
            return Ok(false);
        }
        let (part, len) = self.schedule.part_extent(chunk, self.host);
        // The own part can be reduced before later parts are joined, so `reducing` can be at a
        // later chunk than `joining`.
        let joined = match self.joining.chunk.cmp(&chunk) {
            Ordering::Less => 0,
            Ordering::Equal => self.joining.at.saturating_sub(part).min(len),
            Ordering::Greater => len,
        };
        let mut bytes = joined.saturating_sub(at);
        // A short chunk may have no part for this host; it still counts as reduced.
        if len == 0 && self.joining.chunk > chunk {
            self.record_reduced_bytes(chunk, 0, len);
            return Ok(true);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let expansion = self.reducer.partial_expansion();
        let others = (0..peers.hosts.host_count()).filter(|host| *host != self.host);
        // Reused, so that a reduction allocates no list of carriers.
        let mut carriers = std::mem::take(&mut self.carriers);
        carriers.clear();
        carriers.extend(others.map(|host| self.route_to_carrier(peers, host, chunk)));
        for index in &carriers {
            let LinkPositions { reading, .. } = &self.streams[*index];
            if reading.operand_chunk() != Some(chunk) {
                bytes = 0;
                break;
            }
            let link = &mut peers.links[self.routes[*index].link];
            bytes = bytes
                .min(arrived_bytes(link, &reading.message, UNIT_BYTES * expansion)?.0 / expansion);
        }
        if bytes == 0 {
            self.carriers = carriers;
            return Ok(false);
        }
        let own =
            &self.store[self.chunk_store_slot(chunk)][at * expansion..(at + bytes) * expansion];
        let mut partials = Vec::with_capacity(carriers.len() + 1);
        // Carriers and links are in the order of the hosts.
        let (mut rest, mut passed) = (&mut peers.links[..], 0);
        for index in &carriers {
            let link = self.routes[*index].link;
            let Some((carrier, after)) = rest.split_at_mut(link - passed).1.split_first_mut()
            else {
                break;
            };
            partials.push(carrier.receiver.window()?);
            (rest, passed) = (after, link + 1);
        }
        partials.insert(self.host, own);
        let start = self.schedule.chunk_extent(chunk).0 + part + at;
        if !peers.reductions.record_if_simulating(bytes * (partials.len() * expansion + 1)) {
            self.outputs.fill_range(start, bytes, |from, out| {
                let range = from * expansion..(from + out.len()) * expansion;
                let partials: Vec<&[u8]> =
                    partials.iter().map(|partial| &partial[range.clone()]).collect();
                self.reducer.finish_partials(&partials, out);
            });
        }
        let wire = (bytes * expansion).next_multiple_of(UNIT_BYTES);
        for index in &carriers {
            peers.links[self.routes[*index].link].receiver.release(wire)?;
            self.streams[*index].reading.message.advance_by(wire);
            self.advance_read_position(*index);
        }
        self.carriers = carriers;
        self.record_reduced_bytes(chunk, bytes, len);
        Ok(true)
    }

    fn record_reduced_bytes(&mut self, chunk: usize, bytes: usize, len: usize) {
        self.record_stored_bytes(chunk, self.host, bytes);
        self.reducing.at += bytes;
        if self.reducing.at == len {
            self.reducing = ChunkCursor { chunk: chunk + self.stride, at: 0 };
        }
    }

    /// Records stored results of a chunk that this member carries.
    fn record_stored_bytes(&mut self, chunk: usize, host: usize, bytes: usize) {
        // Without other members on this host, nothing is distributed.
        if self.local.is_empty() {
            return;
        }
        while self.handed_out + self.arrived.len() * self.stride <= chunk {
            let next = self.handed_out + self.arrived.len() * self.stride;
            let bytes = vec![0; self.schedule.hosts().host_count()];
            self.arrived.push_back(StoredResultBytes { chunk: next, bytes });
        }
        if let Some(arrived) = self.arrived.iter_mut().find(|arrived| arrived.chunk == chunk) {
            arrived.bytes[host] += bytes;
        }
    }

    /// Returns the number of result bytes from the start of a carried chunk up to the first missing
    /// one.
    fn complete_prefix_bytes(&self, chunk: usize) -> usize {
        let Some(arrived) = self.arrived.iter().find(|arrived| arrived.chunk == chunk) else {
            return 0;
        };
        let mut complete = 0;
        // Parts lie in the order of hosts, and the message starts at the first byte: a gap ends it.
        for (host, bytes) in arrived.bytes.iter().enumerate() {
            complete += bytes;
            if *bytes < self.schedule.part_extent(chunk, host).1 {
                break;
            }
        }
        complete
    }

    /// Sends results: own parts to the other hosts' carriers, whole chunks within the host.
    fn send_results(
        &mut self,
        index: usize,
        link: &mut Link,
        copies: &mut RingCopier,
    ) -> Result<bool> {
        let ahead = self.routes[index].out.ahead;
        let Some(chunk) = self.streams[index].writing.result_chunk(ahead) else { return Ok(false) };
        let start = self.schedule.chunk_extent(chunk).0;
        let (start, len, ready) = if self.near.contains(&index) {
            (start, self.schedule.chunk_extent(chunk).1, self.complete_prefix_bytes(chunk))
        } else {
            let (part, len) = self.schedule.part_extent(chunk, self.host);
            let done = if self.reducing.chunk > chunk { len } else { self.reducing.at };
            (start + part, len, if self.reducing.chunk < chunk { 0 } else { done })
        };
        let LinkPositions { writing, .. } = &mut self.streams[index];
        let most = if ready == len {
            usize::MAX
        } else {
            // Links carry whole units, so an incomplete unit waits for the rest of its results.
            (ready / UNIT_BYTES * UNIT_BYTES).saturating_sub(writing.message.moved_bytes())
        };
        let outputs = &self.outputs;
        let put = |at, to: &mut [u8]| copies.copy_from_list(outputs, start + at, to);
        let any = writing.message.send_at_most_bytes(most, &mut *link.sender, put)?;
        self.advance_write_position(index);
        Ok(any)
    }

    /// Stores results that have arrived.
    fn receive_results(&mut self, index: usize, link: &mut Link) -> Result<bool> {
        let LinkPositions { reading, .. } = &mut self.streams[index];
        let Some(chunk) = reading.result_chunk(self.routes[index].back.ahead) else {
            return Ok(false);
        };
        let start = self.schedule.chunk_extent(chunk).0;
        let (host, local) = (self.routes[index].host, self.near.contains(&index));
        let start = if local { start } else { start + self.schedule.part_extent(chunk, host).0 };
        let (outputs, before) = (&self.outputs, reading.message);
        let any = reading
            .message
            .receive_window(&mut *link.receiver, |at, from| outputs.write_at(start + at, from))?;
        let bytes = before.unpadded_bytes_of(reading.message.moved_bytes() - before.moved_bytes());
        self.advance_read_position(index);
        if !local {
            self.record_stored_bytes(chunk, host, bytes);
        }
        Ok(any)
    }

    /// Drops the records of chunks that were distributed.
    fn drop_distributed_chunks(&mut self) {
        while let Some(front) = self.arrived.front() {
            let waits = |index: usize| {
                let ahead = self.routes[index].out.ahead;
                !self.streams[index].writing.is_past_result_message(ahead, front.chunk)
            };
            if self.near.clone().any(waits) {
                return;
            }
            self.handed_out = front.chunk + self.stride;
            self.arrived.pop_front();
        }
    }
}

/// Returns the bytes in the window that belong to this message: whole units, or all remaining
/// bytes. The first number excludes padding, the second includes it.
pub(super) fn arrived_bytes(
    link: &mut Link,
    message: &MessageProgress,
    unit: usize,
) -> Result<(usize, usize)> {
    let left = message.remaining_bytes();
    let whole = |bytes: usize| if bytes >= left { left } else { bytes / unit * unit };
    let window = link.receiver.window()?.len();
    let wire = whole(window);
    if wire == 0 && window > 0 {
        link.receiver.check_not_ended(window)?;
    }
    Ok((message.unpadded_bytes_of(wire), wire))
}

/// Joins the inputs of a host in member order. `place` is this member's position among them.
pub(super) fn reduce_host_blocks(
    reducer: &BlockReducer,
    windows: &[&[u8]],
    place: usize,
    own: &GatherList,
    start: usize,
    bytes: usize,
    out: &mut [u8],
) {
    let begin = |inputs: &[&[u8]], out: &mut [u8]| reducer.reduce_to_partial(inputs, out);
    let from = HostInputs { windows, place, own, start, bytes };
    from.reduce_into_partials(reducer.partial_expansion(), begin, out);
}

/// Inputs of a host in member order. `place` is this member's position among them.
pub(super) struct HostInputs<'a> {
    pub(super) windows: &'a [&'a [u8]],
    pub(super) place: usize,
    pub(super) own: &'a GatherList,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

impl HostInputs<'_> {
    /// Joins the inputs to partials with `width` times the bytes of elements.
    pub(super) fn reduce_into_partials(
        &self,
        width: usize,
        join: impl Fn(&[&[u8]], &mut [u8]),
        out: &mut [u8],
    ) {
        self.own.visit_range(self.start, self.bytes, |offset, mine| {
            let here = offset..offset + mine.len();
            let out = &mut out[here.start * width..here.end * width];
            let (before, after) = self.windows.split_at(self.place);
            let mut inputs: Vec<&[u8]> =
                before.iter().map(|window| &window[here.clone()]).collect();
            inputs.push(mine);
            inputs.extend(after.iter().map(|window| &window[here.clone()]));
            join(&inputs, out);
        });
    }
}

impl CollectiveJob for HierarchicalAllreduceJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        // Every member begins with its successor, so that members do not all start with the same
        // ring.
        let first = self.routes.partition_point(|route| route.link < self.member);
        for index in (first..self.near.end).chain(self.near.start..first) {
            let link = self.routes[index].link;
            any |= self.send_input(index, &mut peers.links[link], &mut peers.copies[link])?;
        }
        // A call joins at most one part, and a chunk has a part for each host.
        for _ in 0..self.schedule.hosts().host_count() {
            if !self.reduce_host_inputs(peers)? {
                break;
            }
            any = true;
        }
        any |= self.reduce_own_part(peers)?;
        for index in (first..self.routes.len()).chain(0..first) {
            let link = self.routes[index].link;
            // Receives before it sends, so that results from other hosts go to local members in the
            // same poll.
            any |= self.receive_results(index, &mut peers.links[link])?;
            any |= self.send_results(index, &mut peers.links[link], &mut peers.copies[link])?;
        }
        self.drop_distributed_chunks();
        let done = self.reducing.chunk >= self.schedule.chunk_count()
            && self.streams.iter().all(LinkPositions::is_at_end);
        if done {
            peers.scratch.store = std::mem::take(&mut self.store);
        }
        Ok(PollProgress { any, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        self.routes.iter().map(|route| route.link).collect()
    }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reduce-scatter across hosts with several members: each host first joins its inputs for a member
//! on another host, so that only one partial crosses, whatever the number of members.
//!
//! For every member `d` each host has a carrier: on the host of `d` it is `d` itself, on other
//! hosts one of the members, in turns. The other members of a host send their inputs of `d`'s part
//! to the carrier. The carrier joins the inputs to the partial of the host and sends the partial to
//! `d`, and `d` computes the result from the partials of all hosts. 2 steps. With `L` members on
//! each of `H` hosts and parts of `n` bytes, a member sends `(L - 1) * H * n` bytes within its host
//! and `(H - 1) * n` bytes to other hosts, instead of `(H - 1) * L * n`. The partials of 16-bit
//! floats take twice their bytes, unless the reduction rounds them.
//!
//! **No deadlock.** All members work on members' parts in ascending order of members: a link within
//! a host carries inputs in that order, a carrier joins in that order, and a link between hosts
//! carries one partial. Let `d` be the first member whose part is not done. Every carrier has
//! consumed all bytes before `d`'s inputs on its links, so these inputs arrive, and the carrier
//! joins them for as long as `d` takes the partials. `d` joins its own host's partial while its
//! store has room, and the store has room whenever all joined bytes are reduced. The partials of
//! all other hosts arrive on links that carry nothing else. So `d` can continue.

use std::collections::VecDeque;
use std::ops::Range;

use farandole_kernels::{BlockReducer, GatherList};

use super::super::chunk_sizes::UNIT_BYTES;
use super::super::hierarchy_allreduce::{arrived_bytes, reduce_host_blocks};
use super::super::members_by_host::MembersByHost;
use super::super::message::MessageProgress;
use super::super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use super::{REDUCESCATTER_PIECE_BYTES, member_part};
use crate::{AllreduceAlgorithm, CrossoverTable, Result, TensorSegment};

/// Bytes of this host's partial of the own part that may wait for the partials of other hosts.
const MAX_WAITING_PARTIAL_BYTES: usize = 256 << 10;

/// Part of a member on a link.
struct HostReducescatterPart {
    of: usize,
    message: MessageProgress,
}

/// Data on one link.
struct HostReducescatterLinkState {
    out: VecDeque<HostReducescatterPart>,
    incoming: VecDeque<HostReducescatterPart>,
}

pub(in super::super) struct HostReducescatterJob {
    reducer: BlockReducer,
    member: usize,
    host: usize,
    /// Links within the host.
    local: Range<usize>,
    /// Part of each member in the inputs.
    parts: Vec<GatherList>,
    output: GatherList,
    streams: Vec<HostReducescatterLinkState>,
    /// Members whose parts this member joins on its host. `at` is the position in the part of the
    /// first of them.
    carried: VecDeque<usize>,
    at: usize,
    /// Partials of the own part that are not reduced yet.
    store: Vec<u8>,
    store_capacity: usize,
    /// Bytes of the own part that are joined.
    joined: usize,
    reduced: usize,
}

/// Returns whether this algorithm is faster, decided as for an allreduce of as many bytes. The
/// answer is the same on all members.
pub(in super::super) fn is_joining_hosts_faster(
    peers: &PeerLinks,
    crossover: &CrossoverTable,
    reducer: &BlockReducer,
    bytes: &[Vec<usize>],
) -> bool {
    let all = bytes.iter().flatten().sum();
    // Both algorithms across hosts join them, so the latency does not matter.
    let chosen = crossover.choose_algorithm(peers.shape, all, peers.capacity, None);
    matches!(chosen, AllreduceAlgorithm::Hierarchy | AllreduceAlgorithm::Halving)
        && peers.hosts.largest_host_size() > 1
        // A window must hold at least one unit of partials.
        && peers.capacity >= UNIT_BYTES * reducer.partial_expansion()
}

/// Returns the member that joins the inputs of a host for the part of member `of`.
fn part_carrier(hosts: &MembersByHost, host: usize, of: usize) -> usize {
    if hosts.host_of(of) == host { of } else { hosts.carrier_for_turn(host, of) }
}

/// Returns the members for whose parts `from` sends inputs or a partial to `to`.
fn parts_sent_between(hosts: &MembersByHost, from: usize, to: usize) -> Vec<usize> {
    let host = hosts.host_of(from);
    if hosts.host_of(to) != host {
        return if part_carrier(hosts, host, to) == from { vec![to] } else { Vec::new() };
    }
    let members = 0..hosts.host_members(hosts.host_count() - 1).end;
    members.filter(|of| part_carrier(hosts, host, *of) == to).collect()
}

impl HostReducescatterJob {
    pub(in super::super) fn new(
        peers: &mut PeerLinks,
        reducer: BlockReducer,
        segments: &[TensorSegment],
        bytes: &[Vec<usize>],
    ) -> Self {
        let mut store = std::mem::take(&mut peers.scratch.packed);
        store.clear();
        let (member, hosts) = (peers.member, &peers.hosts);
        let parts: Vec<GatherList> =
            (0..peers.member_count()).map(|of| member_part(segments, bytes, of)).collect();
        let host = hosts.own_host();
        let expansion = reducer.partial_expansion();
        let queue = |from: usize, to: usize| {
            let partial = hosts.host_of(from) != hosts.host_of(to);
            let part = |of: usize| HostReducescatterPart {
                of,
                message: MessageProgress::new(
                    parts[of].len() * if partial { expansion } else { 1 },
                ),
            };
            let travelling = parts_sent_between(hosts, from, to).into_iter().map(part);
            travelling.filter(|part| !part.message.is_finished()).collect()
        };
        let stream = |link: usize| {
            let peer = peers.member_of_link(link);
            HostReducescatterLinkState { out: queue(member, peer), incoming: queue(peer, member) }
        };
        let carried =
            |of: &usize| part_carrier(hosts, host, *of) == member && !parts[*of].is_empty();
        Self {
            streams: (0..peers.links.len()).map(stream).collect(),
            carried: (0..peers.member_count()).filter(carried).collect(),
            store_capacity: MAX_WAITING_PARTIAL_BYTES / (UNIT_BYTES * expansion) * UNIT_BYTES,
            local: peers.local_links(),
            output: GatherList::new(segments.iter().map(|segment| segment.output.clone())),
            reducer,
            member,
            host,
            parts,
            at: 0,
            store,
            joined: 0,
            reduced: 0,
        }
    }

    /// Sends this member's inputs to carriers on this host, at most as many bytes as the links
    /// take.
    fn send_inputs(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let mut any = false;
        for index in self.local.clone() {
            let Some(HostReducescatterPart { of, message }) = self.streams[index].out.front_mut()
            else {
                continue;
            };
            let (part, copies) = (&self.parts[*of], &mut peers.copies[index]);
            any |= message.send_at_most_bytes(
                REDUCESCATTER_PIECE_BYTES,
                &mut *peers.links[index].sender,
                |at, to| copies.copy_from_list(part, at, to),
            )?;
            if message.is_finished() {
                self.streams[index].out.pop_front();
            }
        }
        Ok(any)
    }

    /// Joins inputs of this host that have arrived. The partial is written to the window of the
    /// link to the owner of the part, or to the own store.
    fn reduce_host_inputs(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let Some(of) = self.carried.front().copied() else { return Ok(false) };
        let expansion = self.reducer.partial_expansion();
        let len = self.parts[of].len();
        // Bytes of elements that can be joined: whole units, except at the end of the part.
        let mut bytes = len - self.at;
        for index in self.local.clone() {
            let Some(HostReducescatterPart { message, .. }) = self.streams[index].incoming.front()
            else {
                return Ok(false);
            };
            bytes = bytes.min(arrived_bytes(&mut peers.links[index], message, UNIT_BYTES)?.0);
        }
        let target = (of != self.member).then(|| peers.link_to(of));
        bytes = bytes.min(match target {
            Some(target) => {
                peers.links[target].sender.window()?.len() / (UNIT_BYTES * expansion) * UNIT_BYTES
            }
            // Joined bytes wait in the store until the partials of the other hosts have arrived.
            None => self.store_capacity - (self.joined - self.reduced),
        });
        if bytes == 0 {
            return Ok(false);
        }
        let (before, rest) = peers.links.split_at_mut(self.local.start);
        let (local, after) = rest.split_at_mut(self.local.len());
        let out = match target {
            None => {
                let stored = self.store.len();
                self.store.resize(stored + bytes * expansion, 0);
                &mut self.store[stored..]
            }
            Some(target) if target < self.local.start => before[target].sender.window()?,
            Some(target) => after[target - self.local.end].sender.window()?,
        };
        let windows = local.iter_mut().map(|link| link.receiver.window());
        let windows = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Links to earlier members come first.
        let place = self.member - self.local.start;
        reduce_host_blocks(&self.reducer, &windows, place, &self.parts[of], self.at, bytes, out);
        match target {
            None => self.joined += bytes,
            Some(target) => {
                let wire = (bytes * expansion).next_multiple_of(UNIT_BYTES);
                out[bytes * expansion..wire].fill(0);
                peers.links[target].sender.commit(wire)?;
                advance_first_message(&mut self.streams[target].out, wire);
            }
        }
        for index in self.local.clone() {
            let wire = bytes.next_multiple_of(UNIT_BYTES);
            peers.links[index].receiver.release(wire)?;
            advance_first_message(&mut self.streams[index].incoming, wire);
        }
        self.at += bytes;
        if self.at == len {
            self.carried.pop_front();
            self.at = 0;
        }
        Ok(true)
    }

    /// Computes results from the partials of the own part that have arrived.
    fn reduce_own_part(&mut self, peers: &mut PeerLinks) -> Result<bool> {
        let expansion = self.reducer.partial_expansion();
        let mut bytes = self.joined - self.reduced;
        if bytes == 0 {
            return Ok(false);
        }
        let carriers: Vec<usize> = (0..peers.hosts.host_count())
            .filter(|host| *host != self.host)
            .map(|host| peers.link_to(peers.hosts.carrier_for_turn(host, self.member)))
            .collect();
        for index in &carriers {
            let Some(HostReducescatterPart { message, .. }) = self.streams[*index].incoming.front()
            else {
                return Ok(false);
            };
            bytes = bytes.min(
                arrived_bytes(&mut peers.links[*index], message, UNIT_BYTES * expansion)?.0
                    / expansion,
            );
        }
        if bytes == 0 {
            return Ok(false);
        }
        let links =
            peers.links.iter_mut().enumerate().filter(|(index, _)| carriers.contains(index));
        let windows = links.map(|(_, link)| link.receiver.window());
        let mut partials = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        // Windows are in the order of hosts, and the kernel needs that order.
        partials.insert(self.host, &self.store);
        self.output.fill_range(self.reduced, bytes, |from, out| {
            let range = from * expansion..(from + out.len()) * expansion;
            let partials: Vec<&[u8]> =
                partials.iter().map(|partial| &partial[range.clone()]).collect();
            self.reducer.finish_partials(&partials, out);
        });
        for index in carriers {
            let wire = (bytes * expansion).next_multiple_of(UNIT_BYTES);
            peers.links[index].receiver.release(wire)?;
            advance_first_message(&mut self.streams[index].incoming, wire);
        }
        self.store.drain(..bytes * expansion);
        self.reduced += bytes;
        Ok(true)
    }
}

/// Records that `wire` bytes of the first message have moved, and removes the message when it is
/// finished.
fn advance_first_message(parts: &mut VecDeque<HostReducescatterPart>, wire: usize) {
    if let Some(HostReducescatterPart { message, .. }) = parts.front_mut() {
        message.advance_by(wire);
        if message.is_finished() {
            parts.pop_front();
        }
    }
}

impl CollectiveJob for HostReducescatterJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = self.send_inputs(peers)?;
        // Each call joins inputs for one member only.
        for _ in 0..peers.hosts.host_count() {
            if !self.reduce_host_inputs(peers)? {
                break;
            }
            any = true;
        }
        any |= self.reduce_own_part(peers)?;
        let over = |stream: &HostReducescatterLinkState| {
            stream.out.is_empty() && stream.incoming.is_empty()
        };
        let reduced = self.reduced == self.parts[self.member].len();
        let done = reduced && self.carried.is_empty() && self.streams.iter().all(over);
        if done {
            peers.scratch.packed = std::mem::take(&mut self.store);
        }
        Ok(PollProgress { any, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        let is_used = |stream: &HostReducescatterLinkState| {
            !stream.out.is_empty() || !stream.incoming.is_empty()
        };
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_joined_once_on_every_host_and_crosses_once_from_each() {
        for numbers in [&[0, 0, 1][..], &[0, 0, 1, 1], &[0, 0, 0, 1, 1, 2, 2, 2, 2]] {
            let hosts = MembersByHost::new(numbers, 0);
            let everybody = 0..numbers.len();
            for of in everybody.clone() {
                let (mut within, mut between) = (0, 0);
                for from in everybody.clone() {
                    for to in everybody.clone().filter(|to| *to != from) {
                        let times = parts_sent_between(&hosts, from, to)
                            .iter()
                            .filter(|other| **other == of)
                            .count();
                        *if hosts.host_of(from) == hosts.host_of(to) {
                            &mut within
                        } else {
                            &mut between
                        } += times;
                    }
                }
                assert_eq!(
                    (within, between),
                    (numbers.len() - hosts.host_count(), hosts.host_count() - 1),
                    "{of}"
                );
            }
        }
    }
}

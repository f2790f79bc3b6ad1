// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reduce-scatter across hosts with several members: what a host has for a member elsewhere is
//! joined there first, so it crosses once, whatever the number of members.
//!
//! For every member `d` each host has a carrier: `d` itself on its own host, elsewhere one of the
//! members, in turns. The others on a host send their inputs of `d`'s part to the carrier, it joins
//! them to the host's partial and sends that to `d`, and `d` makes the result of the partials of
//! all hosts. 2 steps; with `L` members on each of `H` hosts and parts of `n` bytes a member sends
//! `(L - 1) * H * n` bytes within its host and `(H - 1) * n` to others (partials of 16-bit floats
//! take twice their bytes, unless the reduction rounds them), where members without this would send
//! `(H - 1) * L * n`.
//!
//! **No deadlock.** All work on members' parts in ascending order of members: on a link within a
//! host lie inputs in that order, a carrier joins in that order, and on a link between hosts lies
//! one partial. Let `d` be the first member whose part is not done. Every carrier has consumed all
//! that lies before `d`'s inputs on its links, so these arrive, and it joins them for as long as
//! `d` takes the partials. `d` has its own host's partial as far as its store has room, which it
//! has whenever everything joined was reduced; all others arrive on links where they are alone. So
//! `d` can continue.

use std::collections::VecDeque;
use std::ops::Range;

use super::super::UNIT;
use super::super::hierarchy::{arrived, join_blocks};
use super::super::hosts::Hosts;
use super::super::message::Message;
use super::super::peers::{Job, Moved, Peers};
use super::{PIECE, parts};
use crate::buffer::Flat;
use crate::kernel::Reducer;
use crate::{Algorithm, Crossover, Result, Segment};

/// Bytes of partials of the own part that may wait for those of other hosts.
const STORE: usize = 256 << 10;

/// A member's part on a link.
struct Part {
    of: usize,
    message: Message,
}

/// The data on one link.
struct Stream {
    out: VecDeque<Part>,
    incoming: VecDeque<Part>,
}

pub(in super::super) struct Across {
    reducer: Reducer,
    member: usize,
    host: usize,
    /// Links within the host.
    local: Range<usize>,
    /// Every member's part of the inputs.
    parts: Vec<Flat>,
    output: Flat,
    streams: Vec<Stream>,
    /// Members whose parts this one joins on its host, and how far it has come with the first.
    carried: VecDeque<usize>,
    at: usize,
    /// Partials of the own part that were not reduced yet.
    store: Vec<u8>,
    room: usize,
    /// Bytes of the own part.
    joined: usize,
    reduced: usize,
}

/// Returns whether it pays, as for an allreduce of as many bytes; all members answer the same.
pub(in super::super) fn pays(
    peers: &Peers,
    crossover: &Crossover,
    reducer: &Reducer,
    bytes: &[Vec<usize>],
) -> bool {
    let all = bytes.iter().flatten().sum();
    let chosen = crossover.choose(peers.shape, all, peers.capacity);
    matches!(chosen, Algorithm::Hierarchy | Algorithm::Halving)
        && peers.hosts.largest() > 1
        && peers.capacity >= UNIT * reducer.expansion()
}

/// Returns the member that joins a host's inputs of a member's part.
fn carrier(hosts: &Hosts, host: usize, of: usize) -> usize {
    if hosts.of(of) == host { of } else { hosts.carrier(host, of) }
}

/// Returns the members of whose parts something goes from one member to another.
fn travels(hosts: &Hosts, from: usize, to: usize) -> Vec<usize> {
    let host = hosts.of(from);
    if hosts.of(to) != host {
        return if carrier(hosts, host, to) == from { vec![to] } else { Vec::new() };
    }
    let members = 0..hosts.members(hosts.count() - 1).end;
    members.filter(|of| carrier(hosts, host, *of) == to).collect()
}

impl Across {
    pub(in super::super) fn new(
        peers: &mut Peers,
        reducer: Reducer,
        segments: &[Segment],
        bytes: &[Vec<usize>],
    ) -> Self {
        let mut store = std::mem::take(&mut peers.scratch.packed);
        store.clear();
        let (member, hosts) = (peers.member, &peers.hosts);
        let parts: Vec<Flat> = (0..peers.size()).map(|of| parts(segments, bytes, of)).collect();
        let host = hosts.own();
        let expansion = reducer.expansion();
        let queue = |from: usize, to: usize| {
            let partial = hosts.of(from) != hosts.of(to);
            let part = |of: usize| Part {
                of,
                message: Message::new(parts[of].len() * if partial { expansion } else { 1 }),
            };
            let travelling = travels(hosts, from, to).into_iter().map(part);
            travelling.filter(|part| !part.message.is_finished()).collect()
        };
        let stream = |link: usize| {
            let peer = peers.member_of(link);
            Stream { out: queue(member, peer), incoming: queue(peer, member) }
        };
        let carried = |of: &usize| carrier(hosts, host, *of) == member && parts[*of].len() > 0;
        Self {
            streams: (0..peers.links.len()).map(stream).collect(),
            carried: (0..peers.size()).filter(carried).collect(),
            room: STORE / (UNIT * expansion) * UNIT,
            local: peers.local_links(),
            output: Flat::new(segments.iter().map(|segment| segment.output.clone())),
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

    /// Sends carriers on this host what the links take of this member's inputs.
    fn post(&mut self, peers: &mut Peers) -> Result<bool> {
        let mut any = false;
        for index in self.local.clone() {
            let Some(Part { of, message }) = self.streams[index].out.front_mut() else { continue };
            let part = &self.parts[*of];
            any |= message
                .put_some(PIECE, &mut *peers.links[index].sender, |at, to| part.read(at, to))?;
            if message.is_finished() {
                self.streams[index].out.pop_front();
            }
        }
        Ok(any)
    }

    /// Joins inputs of this host that have arrived, into the window towards the member whose part
    /// it is, or into the own store.
    fn join(&mut self, peers: &mut Peers) -> Result<bool> {
        let Some(of) = self.carried.front().copied() else { return Ok(false) };
        let expansion = self.reducer.expansion();
        let len = self.parts[of].len();
        // Bytes of elements that can be joined; all are whole units, but for the part's end.
        let mut bytes = len - self.at;
        for index in self.local.clone() {
            let Some(Part { message, .. }) = self.streams[index].incoming.front() else {
                return Ok(false);
            };
            bytes = bytes.min(arrived(&mut peers.links[index], message, UNIT)?.0);
        }
        let target = (of != self.member).then(|| peers.link_to(of));
        bytes = bytes.min(match target {
            Some(target) => peers.links[target].sender.window()?.len() / (UNIT * expansion) * UNIT,
            None => self.room - (self.joined - self.reduced),
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
        join_blocks(&self.reducer, &windows, place, &self.parts[of], self.at, bytes, out);
        match target {
            None => self.joined += bytes,
            Some(target) => {
                let wire = (bytes * expansion).next_multiple_of(UNIT);
                out[bytes * expansion..wire].fill(0);
                peers.links[target].sender.commit(wire)?;
                went(&mut self.streams[target].out, wire);
            }
        }
        for index in self.local.clone() {
            let wire = bytes.next_multiple_of(UNIT);
            peers.links[index].receiver.release(wire)?;
            went(&mut self.streams[index].incoming, wire);
        }
        self.at += bytes;
        if self.at == len {
            self.carried.pop_front();
            self.at = 0;
        }
        Ok(true)
    }

    /// Makes results of the partials that have arrived of the own part.
    fn reduce(&mut self, peers: &mut Peers) -> Result<bool> {
        let expansion = self.reducer.expansion();
        let mut bytes = self.joined - self.reduced;
        if bytes == 0 {
            return Ok(false);
        }
        let carriers: Vec<usize> = (0..peers.hosts.count())
            .filter(|host| *host != self.host)
            .map(|host| peers.link_to(peers.hosts.carrier(host, self.member)))
            .collect();
        for index in &carriers {
            let Some(Part { message, .. }) = self.streams[*index].incoming.front() else {
                return Ok(false);
            };
            bytes = bytes
                .min(arrived(&mut peers.links[*index], message, UNIT * expansion)?.0 / expansion);
        }
        if bytes == 0 {
            return Ok(false);
        }
        let links =
            peers.links.iter_mut().enumerate().filter(|(index, _)| carriers.contains(index));
        let windows = links.map(|(_, link)| link.receiver.window());
        let mut partials = windows.collect::<farandole_transport::Result<Vec<&[u8]>>>()?;
        partials.insert(self.host, &self.store);
        self.output.fill(self.reduced, bytes, |from, out| {
            let range = from * expansion..(from + out.len()) * expansion;
            let partials: Vec<&[u8]> =
                partials.iter().map(|partial| &partial[range.clone()]).collect();
            self.reducer.finish(&partials, out);
        });
        for index in carriers {
            let wire = (bytes * expansion).next_multiple_of(UNIT);
            peers.links[index].receiver.release(wire)?;
            went(&mut self.streams[index].incoming, wire);
        }
        self.store.drain(..bytes * expansion);
        self.reduced += bytes;
        Ok(true)
    }
}

/// Bytes of the first message went.
fn went(parts: &mut VecDeque<Part>, wire: usize) {
    if let Some(Part { message, .. }) = parts.front_mut() {
        message.advance(wire);
        if message.is_finished() {
            parts.pop_front();
        }
    }
}

impl Job for Across {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = self.post(peers)?;
        for _ in 0..peers.hosts.count() {
            if !self.join(peers)? {
                break;
            }
            any = true;
        }
        any |= self.reduce(peers)?;
        let over = |stream: &Stream| stream.out.is_empty() && stream.incoming.is_empty();
        let reduced = self.reduced == self.parts[self.member].len();
        let done = reduced && self.carried.is_empty() && self.streams.iter().all(over);
        if done {
            peers.scratch.packed = std::mem::take(&mut self.store);
        }
        Ok(Moved { any, done })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        let is_used = |stream: &Stream| !stream.out.is_empty() || !stream.incoming.is_empty();
        (0..self.streams.len()).filter(|link| is_used(&self.streams[*link])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_joined_once_on_every_host_and_crosses_once_from_each() {
        for numbers in [&[0, 0, 1][..], &[0, 0, 1, 1], &[0, 0, 0, 1, 1, 2, 2, 2, 2]] {
            let hosts = Hosts::new(numbers, 0);
            let everybody = 0..numbers.len();
            for of in everybody.clone() {
                let (mut within, mut between) = (0, 0);
                for from in everybody.clone() {
                    for to in everybody.clone().filter(|to| *to != from) {
                        let times =
                            travels(&hosts, from, to).iter().filter(|other| **other == of).count();
                        *if hosts.of(from) == hosts.of(to) { &mut within } else { &mut between } +=
                            times;
                    }
                }
                assert_eq!(
                    (within, between),
                    (numbers.len() - hosts.count(), hosts.count() - 1),
                    "{of}"
                );
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What goes over which link in which order: the same on every member.

use std::ops::Range;

use super::super::UNIT;
use super::super::hosts::Hosts;
use super::super::message::Message;

/// Chunks that a member works on ahead of the one it waits for, of those that it carries.
const LOOKAHEAD: usize = 3;
/// Chunks stay in the second-level cache.
const LARGEST_CHUNK: usize = 256 << 10;
/// Below, a chunk costs more in messages than it gains in overlap.
const SMALLEST_CHUNK: usize = 16 << 10;
/// Chunks of each member's share that even a small tensor is cut into.
const OVERLAP: usize = 4;

/// Where in the sequence of messages one direction of a link is. In slot `2 t` is what is early for chunk `t` (an
/// input, or a partial), in slot `2 t + 1` what is late for chunk `t - ahead` (a result).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Position {
    slot: usize,
    pub(super) message: Message,
}

/// The two ends of one direction of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Elements are cut in chunks; a chunk is carried, in every host, by members in turn, and cut in one part for each host.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    bytes: usize,
    hosts: Hosts,
    expansion: usize,
    chunk: usize,
    chunks: usize,
    ahead: usize,
}

impl Schedule {
    /// Nothing when rings are too small.
    pub(super) fn new(bytes: usize, hosts: &Hosts, expansion: usize, capacity: usize) -> Option<Self> {
        let ahead = LOOKAHEAD * hosts.largest();
        let chunk = chunk_for(bytes, hosts, expansion, capacity)?;
        Some(Self { bytes, hosts: hosts.clone(), expansion, chunk, chunks: bytes.div_ceil(chunk), ahead })
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Chunks that are begun, by the time that one is late, of those that a member of this host carries.
    pub(super) fn begun(&self, host: usize) -> usize {
        self.ahead / self.hosts.members(host).len().max(1) + 2
    }

    /// Bytes of the longest part of a chunk.
    pub(super) fn longest_part(&self) -> usize {
        part_for(self.chunk, self.hosts.count())
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The host that owns what is at `at` of a chunk, and where its part begins and ends.
    pub(super) fn owner(&self, chunk: usize, at: usize) -> Option<(usize, Range<usize>)> {
        (0..self.hosts.count()).find_map(|host| {
            let (start, len) = self.part(chunk, host);
            (start..start + len).contains(&at).then_some((host, start..start + len))
        })
    }

    /// Where a chunk begins, and its length.
    pub(super) fn chunk(&self, chunk: usize) -> (usize, usize) {
        let start = (chunk * self.chunk).min(self.bytes);
        (start, (self.bytes - start).min(self.chunk))
    }

    /// Where a host's part of a chunk begins in it, and its length.
    pub(super) fn part(&self, chunk: usize, host: usize) -> (usize, usize) {
        let bytes = self.chunk(chunk).1;
        let (units, hosts) = (bytes.div_ceil(UNIT), self.hosts.count());
        // Parts differ by one unit at most; the longer ones come first.
        let (each, longer) = (units / hosts, units % hosts);
        let start = |host: usize| ((each * host + host.min(longer)) * UNIT).min(bytes);
        (start(host), start(host + 1) - start(host))
    }

    /// The first position from `slot` on whose message is not empty. Past the last slot the message is finished.
    pub(super) fn seek(&self, mut slot: usize, ends: Ends) -> Position {
        while slot < self.slots() {
            let bytes = match (self.early(slot), self.late(slot)) {
                (Some(chunk), _) => self.early_bytes(chunk, ends),
                (_, Some(chunk)) => self.late_bytes(chunk, ends),
                _ => 0,
            };
            if bytes > 0 {
                return Position { slot, message: Message::new(bytes) };
            }
            slot += 1;
        }
        Position { slot: self.slots(), message: Message::default() }
    }

    /// The position after this one.
    pub(super) fn next(&self, position: Position, ends: Ends) -> Position {
        self.seek(position.slot + 1, ends)
    }

    pub(super) fn is_over(&self, position: Position) -> bool {
        position.slot >= self.slots()
    }

    /// The chunk of which an input or partial is at this position.
    pub(super) fn early_at(&self, position: Position) -> Option<usize> {
        self.early(position.slot)
    }

    /// The chunk of which a result is at this position.
    pub(super) fn late_at(&self, position: Position) -> Option<usize> {
        self.late(position.slot)
    }

    /// Whether the result of a chunk was before this position.
    pub(super) fn is_past(&self, position: Position, chunk: usize) -> bool {
        position.slot > 2 * (chunk + self.ahead) + 1
    }

    fn slots(&self) -> usize {
        2 * (self.chunks + self.ahead)
    }

    fn early(&self, slot: usize) -> Option<usize> {
        (slot.is_multiple_of(2) && slot / 2 < self.chunks).then_some(slot / 2)
    }

    fn late(&self, slot: usize) -> Option<usize> {
        let chunk = (slot / 2).checked_sub(self.ahead).filter(|chunk| *chunk < self.chunks)?;
        (slot % 2 == 1).then_some(chunk)
    }

    fn carries(&self, member: usize, chunk: usize) -> bool {
        self.hosts.carrier(self.hosts.of(member), chunk) == member
    }

    fn early_bytes(&self, chunk: usize, Ends { from, to }: Ends) -> usize {
        let (ours, theirs) = (self.hosts.of(from), self.hosts.of(to));
        if ours == theirs {
            return if self.carries(to, chunk) { self.chunk(chunk).1 } else { 0 };
        }
        let both = self.carries(from, chunk) && self.carries(to, chunk);
        if both { self.part(chunk, theirs).1 * self.expansion } else { 0 }
    }

    fn late_bytes(&self, chunk: usize, Ends { from, to }: Ends) -> usize {
        let (ours, theirs) = (self.hosts.of(from), self.hosts.of(to));
        if ours == theirs {
            return if self.carries(from, chunk) { self.chunk(chunk).1 } else { 0 };
        }
        let both = self.carries(from, chunk) && self.carries(to, chunk);
        if both { self.part(chunk, ours).1 } else { 0 }
    }
}

fn part_for(chunk: usize, hosts: usize) -> usize {
    chunk.div_ceil(UNIT).div_ceil(hosts) * UNIT
}

/// Bytes of a chunk: see the proof in the module above for what rings must hold.
fn chunk_for(bytes: usize, hosts: &Hosts, expansion: usize, capacity: usize) -> Option<usize> {
    let ahead = LOOKAHEAD * hosts.largest();
    let sizes = hosts.sizes();
    let fewest = |least: usize| sizes.iter().copied().filter(|size| *size >= least).min();
    // Messages that may lie in a ring within a host, and between hosts.
    let within = fewest(2).map(|members| ahead / members + 3);
    let between = fewest(1).map_or(0, |members| ahead / members + 3);
    let fits = |chunk: usize| {
        within.is_none_or(|messages| messages * chunk <= capacity)
            && between * part_for(chunk, sizes.len()) * expansion <= capacity
    };
    let share = (bytes / hosts.largest() / OVERLAP).next_multiple_of(UNIT);
    let mut chunk = share.clamp(SMALLEST_CHUNK, LARGEST_CHUNK);
    while chunk > 0 && !fits(chunk) {
        chunk = chunk / 2 / UNIT * UNIT;
    }
    (chunk > 0).then_some(chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORLDS: [&[u32]; 5] =
        [&[0, 0, 1, 1], &[0, 0, 1], &[0, 1, 2], &[0, 0, 0, 1, 1, 2], &[0, 0, 0, 0, 0, 1]];

    #[test]
    fn parts_cover_every_chunk_in_units() {
        for hosts in WORLDS {
            let hosts = Hosts::new(hosts, 0);
            for bytes in [1, 64, 65, 100_003, 3 << 20] {
                let schedule = Schedule::new(bytes, &hosts, 2, 1 << 20).unwrap();
                let mut end = 0;
                for chunk in 0..schedule.chunks() {
                    let (start, len) = schedule.chunk(chunk);
                    assert_eq!(start, end);
                    let mut covered = 0;
                    for host in 0..hosts.count() {
                        let (at, part) = schedule.part(chunk, host);
                        assert!(at == covered && part <= schedule.longest_part());
                        assert!(part % UNIT == 0 || at + part == len);
                        covered += part;
                    }
                    assert_eq!(covered, len);
                    end += len;
                }
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn every_byte_crosses_between_hosts_once_each_way_for_each_host() {
        for numbers in WORLDS {
            let hosts = Hosts::new(numbers, 0);
            let schedule = Schedule::new(1_000_000, &hosts, 1, 1 << 20).unwrap();
            let (mut early, mut late) = (0, 0);
            for from in 0..numbers.len() {
                for to in (0..numbers.len()).filter(|to| hosts.of(*to) != hosts.of(from)) {
                    let ends = Ends { from, to };
                    early +=
                        (0..schedule.chunks()).map(|chunk| schedule.early_bytes(chunk, ends)).sum::<usize>();
                    late +=
                        (0..schedule.chunks()).map(|chunk| schedule.late_bytes(chunk, ends)).sum::<usize>();
                }
            }
            assert_eq!((early, late), ((hosts.count() - 1) * 1_000_000, (hosts.count() - 1) * 1_000_000));
        }
    }

    #[test]
    fn rings_hold_what_may_lie_in_them_or_it_says_so() {
        for numbers in WORLDS {
            let hosts = Hosts::new(numbers, 0);
            for capacity in [4096, 16 << 10, 1 << 20] {
                for expansion in [1, 2, 8] {
                    let Some(schedule) = Schedule::new(1 << 26, &hosts, expansion, capacity) else {
                        assert!(capacity < 16 << 10);
                        continue;
                    };
                    for host in 0..hosts.count() {
                        let messages = schedule.begun(host) + 1;
                        assert!(messages * schedule.longest_part() * expansion <= capacity);
                        let alone = hosts.members(host).len() == 1;
                        assert!(alone || messages * schedule.chunk <= capacity);
                    }
                }
            }
        }
        assert!(Schedule::new(1 << 20, &Hosts::new(&[0, 0, 1], 0), 1, 64).is_none());
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The schedule of an allreduce by halves: what each link carries in which order. It is the same on
//! every member.

use std::collections::BTreeSet;
use std::ops::Range;

use super::super::hosts::Hosts;
use super::super::position::{Found, Position};
use super::super::program::Carried;
use super::super::{LARGEST_CHUNK, SMALLEST_CHUNK, UNIT, even_chunk};

/// Chunks in each step at the same time, of those that a member carries.
const LOOKAHEAD: usize = 2;
/// Chunks whose inputs are posted within a host before the result of the first, besides those in
/// steps between hosts.
const LOOKAHEAD_WITHIN: usize = 4;
/// Chunks of each member's share that even a small tensor is cut into.
const OVERLAP: usize = 12;

/// One step of a chunk between two hosts. Partial sums go one way each, and their results come
/// back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    /// The other host.
    pub(super) host: usize,
    /// Bytes of elements, from the start of the chunk, whose partials are received and joined here.
    pub(super) keep: Range<usize>,
    /// Bytes of elements whose partials are sent to the other host and joined there.
    pub(super) give: Range<usize>,
    /// Whether the own partial is the earlier of the two in the order of sums.
    pub(super) is_earlier: bool,
}

/// A link over which something goes.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Lane {
    pub(super) link: usize,
    own: Place,
    peer: Place,
    /// Number of chunks by which results come after early messages.
    pub(super) ahead: usize,
}

/// Host of a member, its number there, and the members there.
#[derive(Clone, Copy, Debug)]
struct Place {
    host: usize,
    number: usize,
    size: usize,
}

impl Place {
    fn new(hosts: &Hosts, member: usize) -> Self {
        let host = hosts.of(member);
        let members = hosts.members(host);
        Self { host, number: member - members.start, size: members.len() }
    }

    fn carries(&self, chunk: usize) -> bool {
        chunk % self.size == self.number
    }

    /// Returns the first chunk from this one on that the member carries.
    fn first(&self, chunk: usize) -> usize {
        self.number + chunk.saturating_sub(self.number).div_ceil(self.size) * self.size
    }
}

impl Lane {
    pub(super) fn is_near(&self) -> bool {
        self.own.host == self.peer.host
    }

    /// Returns the sender and the receiver in one direction.
    fn ends(&self, way: Way) -> (Place, Place) {
        match way {
            Way::Out => (self.own, self.peer),
            Way::Back => (self.peer, self.own),
        }
    }
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    Back,
}

/// Elements are cut in chunks, which members of a host carry in turns.
#[derive(Clone, Debug)]
pub(in super::super) struct Schedule {
    bytes: usize,
    hosts: Hosts,
    width: usize,
    chunk: usize,
    chunks: usize,
    /// Hosts that swap: a power of two.
    full: usize,
    /// Hosts before this one are paired: one of the two gives its partials to the other first.
    folded: usize,
}

impl Schedule {
    /// `width` is how many times the bytes of an element a partial sum takes. Nothing when rings
    /// are too small.
    pub(in super::super) fn new(
        bytes: usize,
        hosts: &Hosts,
        width: usize,
        capacity: usize,
    ) -> Option<Self> {
        let share = (bytes / hosts.largest() / OVERLAP).next_multiple_of(UNIT);
        let longest = share.clamp(SMALLEST_CHUNK, LARGEST_CHUNK);
        let chunk = even_chunk(bytes, longest, hosts.largest());
        let (count, hosts) = (hosts.count(), hosts.clone());
        let full = 1 << count.checked_ilog2().unwrap_or(0);
        let (chunks, folded) = (bytes.div_ceil(chunk), 2 * (count - full));
        (capacity >= UNIT).then_some(Self { bytes, hosts, width, chunk, chunks, full, folded })
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(in super::super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns a chunk as a member of this host carries it.
    pub(super) fn carried(&self, chunk: usize, host: usize) -> Carried<'_> {
        let (carrier, bytes) = (self.hosts.carrier(host, chunk), self.chunk(chunk).1);
        Carried { hosts: &self.hosts, carrier, bytes }
    }

    /// Returns the start of a chunk, and its length.
    pub(super) fn chunk(&self, chunk: usize) -> (usize, usize) {
        let start = (chunk * self.chunk).min(self.bytes);
        (start, (self.bytes - start).min(self.chunk))
    }

    /// Returns the bytes of a chunk's partials.
    pub(super) fn longest(&self) -> usize {
        self.chunk.min(self.bytes) * self.width
    }

    /// Levels of steps: that of pairs, if there are any, and one for each doubling of the distance.
    pub(super) fn levels(&self) -> usize {
        self.full.ilog2() as usize + usize::from(self.folded > 0)
    }

    /// Returns the step of a host at a level, if it is not that of pairs to which the host does not
    /// belong.
    pub(super) fn step_at(&self, host: usize, level: usize) -> Option<usize> {
        level.checked_sub(usize::from(host >= self.folded && self.folded > 0))
    }

    /// Number of chunks by which results come after partials between hosts that meet at this level.
    /// The results of a chunk pass the levels in reverse. If they came equally late at all of them,
    /// each chunk would wait for the one before.
    pub(super) fn ahead_between(&self, level: usize) -> usize {
        LOOKAHEAD * 2 * (self.levels() - level) * self.hosts.largest()
    }

    /// Number of chunks by which results come after inputs within a host.
    pub(super) fn ahead_within(&self) -> usize {
        self.ahead_between(0) + LOOKAHEAD_WITHIN * self.hosts.largest()
    }

    /// Returns the chunks whose partials a member of this host keeps at the same time.
    pub(super) fn begun(&self, host: usize) -> usize {
        let members = self.hosts.members(host).len().max(1);
        let begun = (LOOKAHEAD * self.levels() + 1) * self.hosts.largest() / members;
        begun.min(self.chunks.div_ceil(members))
    }

    /// Returns the place of a host among those that swap. Both hosts of a pair have the same.
    fn place(&self, host: usize) -> usize {
        if host < self.folded { host / 2 } else { host - self.folded / 2 }
    }

    /// The hosts of a pair take turns, so that both send as much as the others.
    fn turn(&self, chunk: usize) -> usize {
        chunk / self.hosts.largest() % 2
    }

    /// Returns whether a host swaps halves of this chunk. If not, the other host of its pair does.
    fn swaps(&self, host: usize, chunk: usize) -> bool {
        host >= self.folded || host % 2 == self.turn(chunk)
    }

    /// Returns the host at a place.
    fn at(&self, place: usize, chunk: usize) -> usize {
        if place < self.folded / 2 { 2 * place + self.turn(chunk) } else { place + self.folded / 2 }
    }

    /// Returns a step of a chunk on a host; `None` after the last one.
    pub(super) fn stage(&self, host: usize, chunk: usize, step: usize) -> Option<Stage> {
        let mut range = 0..self.chunk(chunk).1;
        let mut step = step;
        if host < self.folded {
            let swaps = self.swaps(host, chunk);
            if step == 0 {
                let none = range.end..range.end;
                let (keep, give) = if swaps { (range, none) } else { (none, range) };
                return Some(Stage {
                    host: host ^ 1,
                    keep,
                    give,
                    is_earlier: host.is_multiple_of(2),
                });
            }
            step -= 1;
            if !swaps {
                return None;
            }
        }
        let distance = 1_usize
            .checked_shl(u32::try_from(step).ok()?)
            .filter(|distance| *distance < self.full)?;
        let place = self.place(host);
        for step in 0..step {
            range = halves(range, place >> step & 1 == 0).0;
        }
        let is_earlier = place & distance == 0;
        let (keep, give) = halves(range, is_earlier);
        Some(Stage { host: self.at(place ^ distance, chunk), keep, give, is_earlier })
    }

    /// Returns the number of the steps of a chunk on a host.
    pub(super) fn stages(&self, host: usize, chunk: usize) -> usize {
        let swaps = self.full.ilog2() as usize;
        match (host < self.folded, self.swaps(host, chunk)) {
            (true, true) => swaps + 1,
            (true, false) => 1,
            (false, _) => swaps,
        }
    }

    /// Returns the step in which `host` meets another host.
    fn meets(&self, host: usize, other: usize) -> Option<usize> {
        self.step_at(host, self.level(host, other)?)
    }

    /// Returns the level at which two hosts meet.
    fn level(&self, host: usize, other: usize) -> Option<usize> {
        match self.place(host) ^ self.place(other) {
            0 => Some(0),
            distance if distance.is_power_of_two() => {
                Some(usize::from(self.folded > 0) + distance.ilog2() as usize)
            }
            _ => None,
        }
    }

    /// Returns what one host sends to another of a chunk: partials, and results.
    fn crosses(&self, from: usize, to: usize, chunk: usize) -> (usize, usize) {
        let stage = self.meets(from, to).and_then(|step| self.stage(from, chunk, step));
        match stage.filter(|stage| stage.host == to) {
            Some(Stage { keep, give, .. }) => (give.len() * self.width, keep.len()),
            None => (0, 0),
        }
    }

    /// Returns the other hosts with which a host exchanges anything.
    fn partners(&self, host: usize) -> BTreeSet<usize> {
        let turns = [0, self.hosts.largest()];
        let steps = |chunk| {
            (0..self.stages(host, chunk)).filter_map(move |step| self.partner(host, chunk, step))
        };
        turns.into_iter().flat_map(steps).collect()
    }

    fn partner(&self, host: usize, chunk: usize, step: usize) -> Option<usize> {
        self.stage(host, chunk, step).map(|stage| stage.host)
    }

    /// Returns the links of a member over which something goes, whatever the number of bytes, by
    /// link.
    pub(super) fn lanes(&self, member: usize) -> Vec<Lane> {
        let hosts = &self.hosts;
        let own = Place::new(hosts, member);
        let mut peers: BTreeSet<usize> = hosts.near(member).collect();
        for host in self.partners(own.host) {
            let size = hosts.members(host).len();
            let period = [size, 2 * hosts.largest()].into_iter().fold(own.size, common_multiple);
            let carried = (own.number..period).step_by(own.size);
            let meets = |chunk: &usize| {
                let step = self.meets(own.host, host);
                step.and_then(|step| self.partner(own.host, *chunk, step)) == Some(host)
            };
            peers.extend(carried.filter(meets).map(|chunk| hosts.carrier(host, chunk)));
        }
        let link = |peer: &usize| if *peer < member { *peer } else { *peer - 1 };
        let lane = |peer: &usize| {
            let (link, peer) = (link(peer), Place::new(hosts, *peer));
            let level = self.level(own.host, peer.host).filter(|_| own.host != peer.host);
            let ahead =
                level.map_or_else(|| self.ahead_within(), |level| self.ahead_between(level));
            Lane { link, own, peer, ahead }
        };
        peers.iter().map(lane).collect()
    }

    /// Returns the first message from `slot` on.
    fn seek(&self, slot: usize, lane: &Lane, way: Way) -> Position {
        let early = |from| self.early(from, lane, way);
        Position::seek(slot, lane.ahead, early, |from| self.late(from, lane, way))
    }

    pub(super) fn first(&self, lane: &Lane, way: Way) -> Position {
        self.seek(0, lane, way)
    }

    /// Returns the position after this one.
    pub(super) fn next(&self, position: Position, lane: &Lane, way: Way) -> Position {
        self.seek(position.after(), lane, way)
    }

    /// Returns the next early message that is not empty: its chunk and its bytes.
    fn early(&self, from: usize, lane: &Lane, way: Way) -> Found {
        let (sender, receiver) = lane.ends(way);
        if lane.is_near() {
            let chunk = receiver.first(from);
            return (chunk < self.chunks).then(|| (chunk, self.chunk(chunk).1));
        }
        self.both(from, sender, receiver, |chunk| self.crosses(sender.host, receiver.host, chunk).0)
    }

    /// Returns the next late message that is not empty: its chunk and its bytes.
    fn late(&self, from: usize, lane: &Lane, way: Way) -> Found {
        let (sender, receiver) = lane.ends(way);
        if lane.is_near() {
            let chunk = sender.first(from);
            return (chunk < self.chunks).then(|| (chunk, self.chunk(chunk).1));
        }
        self.both(from, sender, receiver, |chunk| self.crosses(sender.host, receiver.host, chunk).1)
    }

    /// Returns the first chunk that both carry and that has bytes.
    fn both(
        &self,
        from: usize,
        sender: Place,
        receiver: Place,
        bytes: impl Fn(usize) -> usize,
    ) -> Found {
        let carried = (sender.first(from)..self.chunks).step_by(sender.size);
        let both = carried.filter(|chunk| receiver.carries(*chunk));
        both.map(|chunk| (chunk, bytes(chunk))).find(|(_, bytes)| *bytes > 0)
    }
}

/// Returns both halves of a range, in units: the one to keep first.
fn halves(range: Range<usize>, is_lower: bool) -> (Range<usize>, Range<usize>) {
    let middle = (range.start + (range.len() / 2).next_multiple_of(UNIT)).min(range.end);
    let (lower, upper) = (range.start..middle, middle..range.end);
    if is_lower { (lower, upper) } else { (upper, lower) }
}

fn common_multiple(one: usize, other: usize) -> usize {
    let multiples = (1..=other).map(|k| k * one);
    multiples.into_iter().find(|multiple| multiple.is_multiple_of(other)).unwrap_or(one * other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts of these sizes.
    fn hosts(sizes: &[usize]) -> Hosts {
        let numbers: Vec<u32> =
            (0..).zip(sizes).flat_map(|(host, size)| std::iter::repeat_n(host, *size)).collect();
        Hosts::new(&numbers, 0)
    }

    fn worlds() -> Vec<Vec<usize>> {
        let one: Vec<Vec<usize>> = (2..=17).map(|count| vec![1; count]).collect();
        let uneven =
            [vec![2, 2], vec![3, 1, 2], vec![2, 3, 2, 3, 2], vec![4; 6], vec![5, 2, 2, 1, 1, 3, 2]];
        one.into_iter().chain(uneven).collect()
    }

    #[test]
    fn both_hosts_of_a_step_see_it_alike_and_every_byte_has_one_owner() {
        for world in worlds() {
            let hosts = hosts(&world);
            for bytes in [4, 64, 65, 1000, 100_003, 3 << 20] {
                let schedule = Schedule::new(bytes, &hosts, 2, 1 << 20).unwrap();
                for chunk in 0..schedule.chunks() {
                    let mut owned = 0;
                    for host in 0..hosts.count() {
                        let mut range = 0..schedule.chunk(chunk).1;
                        for step in 0..schedule.stages(host, chunk) {
                            let stage = schedule.stage(host, chunk, step).unwrap();
                            assert_eq!(schedule.meets(host, stage.host), Some(step));
                            let theirs = schedule.meets(stage.host, host).unwrap();
                            let theirs = schedule.stage(stage.host, chunk, theirs).unwrap();
                            assert_eq!(
                                (theirs.host, &theirs.give, theirs.is_earlier),
                                (host, &stage.keep, !stage.is_earlier)
                            );
                            assert_eq!(stage.keep.len() + stage.give.len(), range.len());
                            range = stage.keep;
                        }
                        assert_eq!(schedule.stage(host, chunk, schedule.stages(host, chunk)), None);
                        owned += range.len();
                    }
                    assert_eq!(owned, schedule.chunk(chunk).1, "{world:?}, {bytes}");
                }
            }
        }
    }

    #[test]
    fn a_member_has_links_only_to_those_that_it_exchanges_something_with() {
        for world in worlds() {
            let hosts = hosts(&world);
            let size: usize = world.iter().sum();
            let schedule = Schedule::new(8 << 20, &hosts, 1, 1 << 20).unwrap();
            for member in 0..size {
                let lanes = schedule.lanes(member);
                assert!(lanes.windows(2).all(|pair| pair[0].link < pair[1].link));
                for lane in lanes {
                    let either =
                        [Way::Out, Way::Back].map(|way| !schedule.first(&lane, way).is_over());
                    assert!(either.contains(&true), "{world:?}: {member} {lane:?}");
                }
            }
        }
    }

    #[test]
    fn many_hosts_have_few_links_and_send_equally_much() {
        for (count, each, most) in [(64, 8, 6), (48, 8, 11), (33, 4, 11), (512, 8, 9)] {
            let hosts = hosts(&vec![each; count]);
            let schedule = Schedule::new(64 << 20, &hosts, 1, 1 << 20).unwrap();
            let mut sent = Vec::new();
            for host in 0..count {
                let lanes = schedule.lanes(host * each);
                let far = lanes.iter().filter(|lane| !lane.is_near()).count();
                assert!(far <= most, "{count} x {each}: {far} links of host {host}");
                let bytes = |lane: &Lane| {
                    let mut position = schedule.first(lane, Way::Out);
                    let mut bytes = 0;
                    while !position.is_over() {
                        bytes += position.message.left();
                        position = schedule.next(position, lane, Way::Out);
                    }
                    bytes
                };
                sent.push(lanes.iter().filter(|lane| !lane.is_near()).map(bytes).sum::<usize>());
            }
            // Of the share of a member, which is sent twice.
            let share = 2.0 * f64::from(64 << 20) / each as f64;
            let (least, most) = (*sent.iter().min().unwrap(), *sent.iter().max().unwrap());
            assert!(
                least as f64 > 0.95 * share && (most as f64) < 1.01 * share,
                "{least} {most} {share}"
            );
        }
    }
}

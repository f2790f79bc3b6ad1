// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The schedule of an allreduce by halving: the messages of each link, in order. The schedule is
//! the same on every member.

use std::collections::BTreeSet;
use std::ops::Range;

use super::super::chunk_sizes::{MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, UNIT_BYTES, even_chunk_bytes};
use super::super::members_by_host::MembersByHost;
use super::super::message_position::{MessagePosition, NextMessage};

/// Chunks of one carrier that are in the same step at the same time.
const LOOKAHEAD_CHUNKS: usize = 2;
/// Chunks whose inputs are sent within a host before the result of the first chunk, in addition to
/// the chunks that are in steps between hosts.
const LOOKAHEAD_WITHIN_HOST: usize = 4;
/// Number of chunks into which even a small share of a member is cut.
const MIN_CHUNKS_PER_SHARE: usize = 12;

/// One step of a chunk between two hosts. The hosts swap partial sums, and later their results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HalvingStage {
    /// The other host.
    pub(super) host: usize,
    /// Bytes of elements, from the start of the chunk, whose partials are received and joined here.
    pub(super) keep: Range<usize>,
    /// Bytes of elements whose partials are sent to the other host and joined there.
    pub(super) give: Range<usize>,
    /// Whether the own partial is the earlier of the two in the order of sums.
    pub(super) is_earlier: bool,
}

/// Link that a halving uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct HalvingLink {
    pub(super) link: usize,
    own: MemberHostPosition,
    peer: MemberHostPosition,
    /// Lag of results behind early messages, in chunks.
    pub(super) ahead: usize,
}

/// Host of a member, the number of the member on this host, and the number of members on it.
#[derive(Clone, Copy, Debug)]
struct MemberHostPosition {
    host: usize,
    number: usize,
    size: usize,
}

impl MemberHostPosition {
    fn new(hosts: &MembersByHost, member: usize) -> Self {
        let host = hosts.host_of(member);
        let members = hosts.host_members(host);
        Self { host, number: member - members.start, size: members.len() }
    }

    fn carries_chunk(&self, chunk: usize) -> bool {
        chunk % self.size == self.number
    }

    /// Returns the first chunk that the member carries, starting at `chunk`.
    fn next_carried_chunk(&self, chunk: usize) -> usize {
        self.number + chunk.saturating_sub(self.number).div_ceil(self.size) * self.size
    }
}

impl HalvingLink {
    pub(super) fn is_within_host(&self) -> bool {
        self.own.host == self.peer.host
    }

    /// Returns the sender and the receiver in one direction.
    fn sender_and_receiver(
        &self,
        direction: LinkDirection,
    ) -> (MemberHostPosition, MemberHostPosition) {
        match direction {
            LinkDirection::Outgoing => (self.own, self.peer),
            LinkDirection::Incoming => (self.peer, self.own),
        }
    }
}

/// Direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkDirection {
    Outgoing,
    Incoming,
}

/// Schedule of a halving. Elements are cut into chunks, which the members of a host carry in turn.
#[derive(Clone, Debug)]
pub(in super::super) struct HalvingSchedule {
    bytes: usize,
    hosts: MembersByHost,
    width: usize,
    chunk: usize,
    chunks: usize,
    /// Number of hosts that swap: a power of two.
    full: usize,
    /// Number of the first hosts that form pairs: one host of a pair first gives its partials to
    /// the other.
    folded: usize,
}

impl HalvingSchedule {
    /// Returns the schedule; `None` if rings are too small. `width` is the size of a partial sum as
    /// a multiple of the size of an element.
    pub(in super::super) fn new(
        bytes: usize,
        hosts: &MembersByHost,
        width: usize,
        capacity: usize,
    ) -> Option<Self> {
        let share =
            // At least so many chunks, so that even small tensors keep all steps busy at the same
            // time.
            (bytes / hosts.largest_host_size() / MIN_CHUNKS_PER_SHARE).next_multiple_of(UNIT_BYTES);
        let longest = share.clamp(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
        let chunk = even_chunk_bytes(bytes, longest, hosts.largest_host_size());
        let (count, hosts) = (hosts.host_count(), hosts.clone());
        let full = 1 << count.checked_ilog2().unwrap_or(0);
        let (chunks, folded) = (bytes.div_ceil(chunk), 2 * (count - full));
        (capacity >= UNIT_BYTES).then_some(Self {
            bytes,
            hosts,
            width,
            chunk,
            chunks,
            full,
            folded,
        })
    }

    pub(super) fn hosts(&self) -> &MembersByHost {
        &self.hosts
    }

    pub(super) fn accumulator_width(&self) -> usize {
        self.width
    }

    pub(in super::super) fn chunk_count(&self) -> usize {
        self.chunks
    }

    /// Returns the start of a chunk, and its length.
    pub(super) fn chunk_extent(&self, chunk: usize) -> (usize, usize) {
        let start = (chunk * self.chunk).min(self.bytes);
        (start, (self.bytes - start).min(self.chunk))
    }

    /// Returns the number of bytes of the partials of the longest chunk.
    pub(super) fn max_partial_bytes(&self) -> usize {
        self.chunk.min(self.bytes) * self.width
    }

    /// Returns the number of levels: one for the steps of pairs, if there are any, and one for each
    /// doubling of the distance.
    pub(super) fn level_count(&self) -> usize {
        self.full.ilog2() as usize + usize::from(self.folded > 0)
    }

    /// Returns the step of a host at a level, or none at the level of pairs if the host belongs to
    /// no pair.
    pub(super) fn step_at_level(&self, host: usize, level: usize) -> Option<usize> {
        level.checked_sub(usize::from(host >= self.folded && self.folded > 0))
    }

    /// Returns the lag of results behind partials, in chunks, between hosts that meet at this
    /// level. The results of a chunk pass the levels in reverse. If the lag were equal at all
    /// levels, each chunk would wait for the one before.
    pub(super) fn result_lag_between_hosts(&self, level: usize) -> usize {
        LOOKAHEAD_CHUNKS * 2 * (self.level_count() - level) * self.hosts.largest_host_size()
    }

    /// Returns the lag of results behind inputs within a host, in chunks.
    pub(super) fn result_lag_within_host(&self) -> usize {
        self.result_lag_between_hosts(0) + LOOKAHEAD_WITHIN_HOST * self.hosts.largest_host_size()
    }

    /// Returns the number of chunks whose partials a member of this host keeps at the same time.
    pub(super) fn chunks_in_flight(&self, host: usize) -> usize {
        let members = self.hosts.host_members(host).len().max(1);
        let begun =
            (LOOKAHEAD_CHUNKS * self.level_count() + 1) * self.hosts.largest_host_size() / members;
        // A short operation has fewer chunks than this, and more memory would stay unused.
        begun.min(self.chunks.div_ceil(members))
    }

    /// Returns the position of a host among the hosts that swap. Both hosts of a pair have the same
    /// position.
    fn position_among_swapping_hosts(&self, host: usize) -> usize {
        if host < self.folded { host / 2 } else { host - self.folded / 2 }
    }

    /// Returns which host of each pair swaps halves of this chunk. The hosts of a pair take turns,
    /// so that both send as much as the other hosts.
    fn swapping_host_of_pair(&self, chunk: usize) -> usize {
        chunk / self.hosts.largest_host_size() % 2
    }

    /// Returns whether a host swaps halves of this chunk. If not, the other host of its pair does.
    fn swaps_halves(&self, host: usize, chunk: usize) -> bool {
        host >= self.folded || host % 2 == self.swapping_host_of_pair(chunk)
    }

    /// Returns the host at a position among the hosts that swap.
    fn swapping_host_at(&self, place: usize, chunk: usize) -> usize {
        if place < self.folded / 2 {
            2 * place + self.swapping_host_of_pair(chunk)
        } else {
            place + self.folded / 2
        }
    }

    /// Returns a step of a chunk on a host; `None` after the last step.
    pub(super) fn find_stage(
        &self,
        host: usize,
        chunk: usize,
        step: usize,
    ) -> Option<HalvingStage> {
        let mut range = 0..self.chunk_extent(chunk).1;
        let mut step = step;
        if host < self.folded {
            let swaps = self.swaps_halves(host, chunk);
            if step == 0 {
                let none = range.end..range.end;
                let (keep, give) = if swaps { (range, none) } else { (none, range) };
                return Some(HalvingStage {
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
        let place = self.position_among_swapping_hosts(host);
        // Each earlier step kept one half, so the range follows from the place alone.
        for step in 0..step {
            range = split_halves(range, place >> step & 1 == 0).0;
        }
        let is_earlier = place & distance == 0;
        let (keep, give) = split_halves(range, is_earlier);
        Some(HalvingStage {
            host: self.swapping_host_at(place ^ distance, chunk),
            keep,
            give,
            is_earlier,
        })
    }

    /// Returns the number of steps of a chunk on a host.
    pub(super) fn stage_count(&self, host: usize, chunk: usize) -> usize {
        let swaps = self.full.ilog2() as usize;
        match (host < self.folded, self.swaps_halves(host, chunk)) {
            (true, true) => swaps + 1,
            (true, false) => 1,
            (false, _) => swaps,
        }
    }

    /// Returns the step in which `host` meets another host.
    fn meeting_step(&self, host: usize, other: usize) -> Option<usize> {
        self.step_at_level(host, self.meeting_level(host, other)?)
    }

    /// Returns the level at which two hosts meet.
    fn meeting_level(&self, host: usize, other: usize) -> Option<usize> {
        match self.position_among_swapping_hosts(host) ^ self.position_among_swapping_hosts(other) {
            0 => Some(0),
            // Hosts meet only if their positions differ in exactly one bit.
            distance if distance.is_power_of_two() => {
                Some(usize::from(self.folded > 0) + distance.ilog2() as usize)
            }
            _ => None,
        }
    }

    /// Returns the bytes of a chunk that one host sends to another: of partials, and of results.
    fn bytes_between_hosts(&self, from: usize, to: usize, chunk: usize) -> (usize, usize) {
        let stage = self.meeting_step(from, to).and_then(|step| self.find_stage(from, chunk, step));
        match stage.filter(|stage| stage.host == to) {
            Some(HalvingStage { keep, give, .. }) => (give.len() * self.width, keep.len()),
            None => (0, 0),
        }
    }

    /// Returns the other hosts with which a host exchanges messages.
    fn partner_hosts(&self, host: usize) -> BTreeSet<usize> {
        // The hosts of a pair take turns. These two chunks show both turns.
        let turns = [0, self.hosts.largest_host_size()];
        let steps = |chunk| {
            (0..self.stage_count(host, chunk))
                .filter_map(move |step| self.partner_host(host, chunk, step))
        };
        turns.into_iter().flat_map(steps).collect()
    }

    fn partner_host(&self, host: usize, chunk: usize, step: usize) -> Option<usize> {
        self.find_stage(host, chunk, step).map(|stage| stage.host)
    }

    /// Returns the links that a member uses, in link order. They do not depend on the number of
    /// bytes.
    pub(super) fn member_links(&self, member: usize) -> Vec<HalvingLink> {
        let hosts = &self.hosts;
        let own = MemberHostPosition::new(hosts, member);
        let mut peers: BTreeSet<usize> = hosts.local_peers(member).collect();
        for host in self.partner_hosts(own.host) {
            let size = hosts.host_members(host).len();
            // The carriers of a chunk on both hosts, and the turns of pairs, repeat after this
            // number of chunks.
            let period = [size, 2 * hosts.largest_host_size()]
                .into_iter()
                .fold(own.size, least_common_multiple);
            let carried = (own.number..period).step_by(own.size);
            let meets = |chunk: &usize| {
                let step = self.meeting_step(own.host, host);
                step.and_then(|step| self.partner_host(own.host, *chunk, step)) == Some(host)
            };
            peers.extend(carried.filter(meets).map(|chunk| hosts.carrier_for_turn(host, chunk)));
        }
        // A member has no link to itself, so the links to later members move down by one.
        let link = |peer: &usize| if *peer < member { *peer } else { *peer - 1 };
        let halving_link = |peer: &usize| {
            let (link, peer) = (link(peer), MemberHostPosition::new(hosts, *peer));
            let level = self.meeting_level(own.host, peer.host).filter(|_| own.host != peer.host);
            let ahead = level.map_or_else(
                || self.result_lag_within_host(),
                |level| self.result_lag_between_hosts(level),
            );
            HalvingLink { link, own, peer, ahead }
        };
        peers.iter().map(halving_link).collect()
    }

    /// Returns the first message, starting at `slot`.
    fn next_nonempty_message(
        &self,
        slot: usize,
        halving_link: &HalvingLink,
        direction: LinkDirection,
    ) -> MessagePosition {
        let early = |from| self.next_carried_message(from, halving_link, direction, false);
        MessagePosition::first_nonempty(slot, halving_link.ahead, early, |from| {
            self.next_carried_message(from, halving_link, direction, true)
        })
    }

    pub(super) fn first_message(
        &self,
        halving_link: &HalvingLink,
        direction: LinkDirection,
    ) -> MessagePosition {
        self.next_nonempty_message(0, halving_link, direction)
    }

    /// Returns the position after this one.
    pub(super) fn next_message(
        &self,
        position: MessagePosition,
        halving_link: &HalvingLink,
        direction: LinkDirection,
    ) -> MessagePosition {
        self.next_nonempty_message(position.next_slot(), halving_link, direction)
    }

    /// Returns the next message that is not empty, its chunk and its bytes: of operands, which are
    /// early, or of results, which are late.
    fn next_carried_message(
        &self,
        from: usize,
        halving_link: &HalvingLink,
        direction: LinkDirection,
        is_result: bool,
    ) -> NextMessage {
        let (sender, receiver) = halving_link.sender_and_receiver(direction);
        if halving_link.is_within_host() {
            let carrier = if is_result { sender } else { receiver };
            let chunk = carrier.next_carried_chunk(from);
            return (chunk < self.chunks).then(|| (chunk, self.chunk_extent(chunk).1));
        }
        self.next_shared_chunk(from, sender, receiver, |chunk| {
            let (early, late) = self.bytes_between_hosts(sender.host, receiver.host, chunk);
            if is_result { late } else { early }
        })
    }

    /// Returns the first chunk, starting at `from`, that both members carry and that has bytes.
    fn next_shared_chunk(
        &self,
        from: usize,
        sender: MemberHostPosition,
        receiver: MemberHostPosition,
        bytes: impl Fn(usize) -> usize,
    ) -> NextMessage {
        let carried = (sender.next_carried_chunk(from)..self.chunks).step_by(sender.size);
        let both = carried.filter(|chunk| receiver.carries_chunk(*chunk));
        both.map(|chunk| (chunk, bytes(chunk))).find(|(_, bytes)| *bytes > 0)
    }
}

/// Returns both halves of a range, in units: first the half to keep.
fn split_halves(range: Range<usize>, is_lower: bool) -> (Range<usize>, Range<usize>) {
    // In units, so that no element is cut and messages stay aligned.
    let middle = (range.start + (range.len() / 2).next_multiple_of(UNIT_BYTES)).min(range.end);
    let (lower, upper) = (range.start..middle, middle..range.end);
    if is_lower { (lower, upper) } else { (upper, lower) }
}

fn least_common_multiple(one: usize, other: usize) -> usize {
    let multiples = (1..=other).map(|k| k * one);
    multiples.into_iter().find(|multiple| multiple.is_multiple_of(other)).unwrap_or(one * other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts of these sizes.
    fn hosts(sizes: &[usize]) -> MembersByHost {
        let numbers: Vec<u32> =
            (0..).zip(sizes).flat_map(|(host, size)| std::iter::repeat_n(host, *size)).collect();
        MembersByHost::new(&numbers, 0)
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
                let schedule = HalvingSchedule::new(bytes, &hosts, 2, 1 << 20).unwrap();
                for chunk in 0..schedule.chunk_count() {
                    let mut owned = 0;
                    for host in 0..hosts.host_count() {
                        let mut range = 0..schedule.chunk_extent(chunk).1;
                        for step in 0..schedule.stage_count(host, chunk) {
                            let stage = schedule.find_stage(host, chunk, step).unwrap();
                            assert_eq!(schedule.meeting_step(host, stage.host), Some(step));
                            let theirs = schedule.meeting_step(stage.host, host).unwrap();
                            let theirs = schedule.find_stage(stage.host, chunk, theirs).unwrap();
                            assert_eq!(
                                (theirs.host, &theirs.give, theirs.is_earlier),
                                (host, &stage.keep, !stage.is_earlier)
                            );
                            assert_eq!(stage.keep.len() + stage.give.len(), range.len());
                            range = stage.keep;
                        }
                        assert_eq!(
                            schedule.find_stage(host, chunk, schedule.stage_count(host, chunk)),
                            None
                        );
                        owned += range.len();
                    }
                    assert_eq!(owned, schedule.chunk_extent(chunk).1, "{world:?}, {bytes}");
                }
            }
        }
    }

    #[test]
    fn a_member_has_links_only_to_those_that_it_exchanges_something_with() {
        for world in worlds() {
            let hosts = hosts(&world);
            let size: usize = world.iter().sum();
            let schedule = HalvingSchedule::new(8 << 20, &hosts, 1, 1 << 20).unwrap();
            for member in 0..size {
                let halving_links = schedule.member_links(member);
                assert!(halving_links.windows(2).all(|pair| pair[0].link < pair[1].link));
                for halving_link in halving_links {
                    let either =
                        [LinkDirection::Outgoing, LinkDirection::Incoming].map(|direction| {
                            !schedule.first_message(&halving_link, direction).is_at_end()
                        });
                    assert!(either.contains(&true), "{world:?}: {member} {halving_link:?}");
                }
            }
        }
    }

    #[test]
    fn many_hosts_have_few_links_and_send_equally_much() {
        for (count, each, most) in [(64, 8, 6), (48, 8, 11), (33, 4, 11), (512, 8, 9)] {
            let hosts = hosts(&vec![each; count]);
            let schedule = HalvingSchedule::new(64 << 20, &hosts, 1, 1 << 20).unwrap();
            let mut sent = Vec::new();
            for host in 0..count {
                let halving_links = schedule.member_links(host * each);
                let far = halving_links
                    .iter()
                    .filter(|halving_link| !halving_link.is_within_host())
                    .count();
                assert!(far <= most, "{count} x {each}: {far} links of host {host}");
                let bytes = |halving_link: &HalvingLink| {
                    let mut position =
                        schedule.first_message(halving_link, LinkDirection::Outgoing);
                    let mut bytes = 0;
                    while !position.is_at_end() {
                        bytes += position.message.remaining_bytes();
                        position =
                            schedule.next_message(position, halving_link, LinkDirection::Outgoing);
                    }
                    bytes
                };
                sent.push(
                    halving_links
                        .iter()
                        .filter(|halving_link| !halving_link.is_within_host())
                        .map(bytes)
                        .sum::<usize>(),
                );
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

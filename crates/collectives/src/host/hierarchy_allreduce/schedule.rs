// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The schedule of an allreduce: the messages of each link, in order. The schedule is the same on
//! every member.

use std::ops::Range;

use farandole_transport::PACKET_PAYLOAD_BYTES;

use super::super::chunk_sizes::{
    MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, UNIT_BYTES, even_chunk_bytes, part_start,
};
use super::super::members_by_host::MembersByHost;
use super::super::message_position::MessagePosition;

/// Chunks of one carrier whose partials are sent before the result of the first of them.
const LOOKAHEAD_CHUNKS: usize = 3;
/// Chunks of one carrier whose inputs are sent within a host before the result of the first of
/// them. If this number were [`LOOKAHEAD_CHUNKS`], too, each result would wait for the one before:
/// a partial needs inputs, which would come after that result.
const LOOKAHEAD_WITHIN_HOST: usize = 2 * LOOKAHEAD_CHUNKS;
/// Shortest part of a long chunk: chunks grow with the number of hosts, so that each part remains
/// large enough for a message.
const MIN_PART_BYTES: usize = 16 << 10;
/// Number of chunks into which even a small share of a member is cut.
const MIN_CHUNKS_PER_SHARE: usize = 4;

/// Every `step`-th chunk, starting with `first`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ChunkStride {
    first: usize,
    step: usize,
}

impl ChunkStride {
    /// Returns the chunks with remainder `one` modulo `several` and remainder `other` modulo
    /// `many`; `None` if there is no such chunk.
    fn intersect_chunk_strides(
        (one, several): (usize, usize),
        (other, many): (usize, usize),
    ) -> Option<Self> {
        // The first such chunk is less than the least common multiple.
        let first = (0..many).map(|k| one + k * several).find(|chunk| chunk % many == other)?;
        let step = (1..=many).map(|k| k * several).find(|step| step.is_multiple_of(many))?;
        Some(Self { first, step })
    }

    /// Returns the first of these chunks that is not before `chunk`.
    fn first_chunk_not_before(self, chunk: usize) -> usize {
        self.first + chunk.saturating_sub(self.first).div_ceil(self.step) * self.step
    }
}

/// One direction of a link: the chunks that it carries and the owner of each part. A direction
/// depends only on the hosts of the members.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouteDirection {
    early: Option<ChunkStride>,
    late: Option<ChunkStride>,
    /// Lag of results behind early messages, in chunks.
    pub(super) ahead: usize,
    from: usize,
    to: usize,
}

impl RouteDirection {
    pub(super) fn new(hosts: &MembersByHost, from: usize, to: usize) -> Self {
        let place = |member: usize| {
            let host = hosts.host_of(member);
            let members = hosts.host_members(host);
            (host, (member - members.start, members.len()))
        };
        let ((here, sender), (there, receiver)) = (place(from), place(to));
        let turns = |(first, step)| Some(ChunkStride { first, step });
        let (early, late, ahead) = if here == there {
            (turns(receiver), turns(sender), result_lag_within_host(hosts))
        } else {
            let both = ChunkStride::intersect_chunk_strides(sender, receiver);
            (both, both, result_lag_between_hosts(hosts))
        };
        Self { early, late, ahead, from: here, to: there }
    }

    /// Returns whether this direction carries no messages at all.
    pub(super) fn carries_no_messages(&self) -> bool {
        self.early.is_none() && self.late.is_none()
    }
}

/// Schedule of a hierarchy. Elements are cut into chunks. In every host the members carry chunks in
/// turn, and each chunk is cut into one part for each host.
#[derive(Clone, Debug)]
pub(in super::super) struct HierarchySchedule {
    bytes: usize,
    hosts: MembersByHost,
    expansion: usize,
    chunk: usize,
    chunks: usize,
}

impl HierarchySchedule {
    /// Returns the schedule; `None` if rings are too small.
    pub(in super::super) fn new(
        bytes: usize,
        hosts: &MembersByHost,
        expansion: usize,
        capacity: usize,
    ) -> Option<Self> {
        let chunk = chunk_bytes(bytes, hosts, expansion, capacity)?;
        Some(Self { bytes, hosts: hosts.clone(), expansion, chunk, chunks: bytes.div_ceil(chunk) })
    }

    pub(in super::super) fn chunk_count(&self) -> usize {
        self.chunks
    }

    /// Returns the number of chunks that one carrier on this host has begun when the result message
    /// of the first of them is due.
    pub(super) fn chunks_in_flight(&self, host: usize) -> usize {
        result_lag_between_hosts(&self.hosts) / self.hosts.host_members(host).len().max(1) + 2
    }

    /// Returns the number of bytes of the longest part of a chunk.
    pub(super) fn max_part_bytes(&self) -> usize {
        part_bytes(self.chunk, self.hosts.host_count())
    }

    pub(super) fn hosts(&self) -> &MembersByHost {
        &self.hosts
    }

    /// Returns the host that owns position `at` of a chunk, and the range of its part.
    pub(super) fn owning_host(&self, chunk: usize, at: usize) -> Option<(usize, Range<usize>)> {
        let bytes = self.chunk_extent(chunk).1;
        let (units, hosts) = (bytes.div_ceil(UNIT_BYTES), self.hosts.host_count());
        let (each, longer) = (units / hosts, units % hosts);
        let unit = at / UNIT_BYTES;
        let host = if unit < longer * (each + 1) {
            unit / (each + 1)
        } else {
            longer + (unit - longer * (each + 1)).checked_div(each)?
        };
        let (start, len) = if at < bytes { self.part_extent(chunk, host) } else { return None };
        Some((host, start..start + len))
    }

    /// Returns the start of a chunk, and its length.
    pub(super) fn chunk_extent(&self, chunk: usize) -> (usize, usize) {
        let start = (chunk * self.chunk).min(self.bytes);
        (start, (self.bytes - start).min(self.chunk))
    }

    /// Returns the start of a host's part in a chunk, and its length.
    pub(super) fn part_extent(&self, chunk: usize, host: usize) -> (usize, usize) {
        let bytes = self.chunk_extent(chunk).1;
        let start = |host: usize| part_start(bytes, self.hosts.host_count(), host);
        (start(host), start(host + 1) - start(host))
    }

    /// Returns the first position, from `slot`, with a message that is not empty.
    pub(super) fn next_nonempty_message(
        &self,
        slot: usize,
        direction: &RouteDirection,
    ) -> MessagePosition {
        // Chunks never get longer: if a message is empty, all later messages of its turns are
        // empty, too.
        let find = |turns: Option<ChunkStride>, from, bytes: &dyn Fn(usize) -> usize| {
            let chunk = self.chunk_if_in_range(turns?.first_chunk_not_before(from))?;
            Some((chunk, bytes(chunk))).filter(|(_, bytes)| *bytes > 0)
        };
        let early = |from| {
            find(direction.early, from, &|chunk| self.operand_message_bytes(chunk, direction))
        };
        let late =
            |from| find(direction.late, from, &|chunk| self.result_message_bytes(chunk, direction));
        MessagePosition::first_nonempty(slot, direction.ahead, early, late)
    }

    fn chunk_if_in_range(&self, chunk: usize) -> Option<usize> {
        (chunk < self.chunks).then_some(chunk)
    }

    /// Returns the position after this one.
    pub(super) fn next_message(
        &self,
        position: MessagePosition,
        direction: &RouteDirection,
    ) -> MessagePosition {
        self.next_nonempty_message(position.next_slot(), direction)
    }

    fn operand_message_bytes(
        &self,
        chunk: usize,
        RouteDirection { from, to, .. }: &RouteDirection,
    ) -> usize {
        if from == to {
            self.chunk_extent(chunk).1
        } else {
            self.part_extent(chunk, *to).1 * self.expansion
        }
    }

    fn result_message_bytes(
        &self,
        chunk: usize,
        RouteDirection { from, to, .. }: &RouteDirection,
    ) -> usize {
        if from == to { self.chunk_extent(chunk).1 } else { self.part_extent(chunk, *from).1 }
    }
}

fn part_bytes(chunk: usize, hosts: usize) -> usize {
    chunk.div_ceil(UNIT_BYTES).div_ceil(hosts) * UNIT_BYTES
}

/// Returns the lag of results behind partials between hosts, in chunks.
fn result_lag_between_hosts(hosts: &MembersByHost) -> usize {
    // Members carry chunks in turn: each is at least `LOOKAHEAD_CHUNKS` of its own chunks ahead.
    LOOKAHEAD_CHUNKS * hosts.largest_host_size()
}

/// Returns the lag of results behind inputs within a host, in chunks.
fn result_lag_within_host(hosts: &MembersByHost) -> usize {
    LOOKAHEAD_WITHIN_HOST * hosts.largest_host_size()
}

/// Returns the number of bytes of a chunk. Between hosts, a ring must hold the partials that are
/// sent ahead. Within a host, a ring need not hold a whole chunk.
fn chunk_bytes(
    bytes: usize,
    hosts: &MembersByHost,
    expansion: usize,
    capacity: usize,
) -> Option<usize> {
    let sizes = hosts.host_sizes();
    let fewest = sizes.iter().copied().filter(|size| *size > 0).min()?;
    let part = capacity / expansion / (result_lag_between_hosts(hosts) / fewest + 3) / UNIT_BYTES
        * UNIT_BYTES;
    let share =
        (bytes / hosts.largest_host_size() / MIN_CHUNKS_PER_SHARE).next_multiple_of(UNIT_BYTES);
    let largest = MAX_CHUNK_BYTES.max(sizes.len() * MIN_PART_BYTES);
    let chunk = share.clamp(MIN_CHUNK_BYTES, largest).min(part * sizes.len());
    // A part that fills whole packets: short packets between them once cost a quarter of the time.
    let packets = chunk / sizes.len() / PACKET_PAYLOAD_BYTES;
    let chunk = match packets {
        0 => chunk,
        _ => even_chunk_bytes(
            bytes,
            packets * PACKET_PAYLOAD_BYTES * sizes.len(),
            hosts.largest_host_size(),
        ),
    };
    (chunk > 0).then_some(chunk)
}

#[cfg(test)]
mod tests {
    use super::super::super::message::MessageProgress;
    use super::*;

    const WORLDS: [&[u32]; 5] =
        [&[0, 0, 1, 1], &[0, 0, 1], &[0, 1, 2], &[0, 0, 0, 1, 1, 2], &[0, 0, 0, 0, 0, 1]];

    /// Slots and bytes of all messages of one direction of a link, as the module above says them.
    fn messages(schedule: &HierarchySchedule, from: usize, to: usize) -> Vec<(usize, usize)> {
        let hosts = schedule.hosts();
        let direction = &RouteDirection::new(hosts, from, to);
        let (here, there) = (hosts.host_of(from), hosts.host_of(to));
        let carries =
            |member: usize, chunk| hosts.carrier_for_turn(hosts.host_of(member), chunk) == member;
        let bytes = |slot: usize| {
            if slot.is_multiple_of(2) {
                let chunk = slot / 2;
                return match (here == there, carries(from, chunk), carries(to, chunk)) {
                    (true, _, true) => schedule.chunk_extent(chunk).1,
                    (false, true, true) => {
                        schedule.part_extent(chunk, there).1 * schedule.expansion
                    }
                    _ => 0,
                };
            }
            let Some(chunk) = (slot / 2).checked_sub(direction.ahead) else { return 0 };
            match (here == there, carries(from, chunk), carries(to, chunk)) {
                (true, true, _) => schedule.chunk_extent(chunk).1,
                (false, true, true) => schedule.part_extent(chunk, here).1,
                _ => 0,
            }
        };
        let slots = 2 * (schedule.chunk_count() + direction.ahead);
        (0..slots).map(|slot| (slot, bytes(slot))).filter(|(_, bytes)| *bytes > 0).collect()
    }

    #[test]
    fn the_next_message_is_found_without_scanning_the_others() {
        for numbers in WORLDS {
            let hosts = MembersByHost::new(numbers, 0);
            for (bytes, expansion) in
                [(1, 1), (65, 2), (100_003, 1), (1 << 20, 2), ((3 << 20) + 70, 1)]
            {
                let schedule = HierarchySchedule::new(bytes, &hosts, expansion, 1 << 20).unwrap();
                for (from, to) in
                    (0..numbers.len()).flat_map(|one| (0..numbers.len()).map(move |two| (one, two)))
                {
                    let direction = RouteDirection::new(&hosts, from, to);
                    let mut found = Vec::new();
                    let mut position = schedule.next_nonempty_message(0, &direction);
                    while !position.is_at_end() {
                        found.push((position.slot, position.message.remaining_bytes()));
                        position = schedule.next_message(position, &direction);
                    }
                    let expected: Vec<(usize, usize)> = messages(&schedule, from, to)
                        .into_iter()
                        .map(|(slot, bytes)| (slot, MessageProgress::new(bytes).remaining_bytes()))
                        .collect();
                    assert!(
                        from == to || found == expected,
                        "{numbers:?}, {bytes} bytes from {from} to {to}"
                    );
                }
            }
        }
    }

    #[test]
    fn each_place_of_a_chunk_has_one_owner() {
        for numbers in WORLDS {
            let hosts = MembersByHost::new(numbers, 0);
            for bytes in [1, 64, 65, 129, 100_003] {
                let schedule = HierarchySchedule::new(bytes, &hosts, 1, 1 << 20).unwrap();
                for chunk in 0..schedule.chunk_count() {
                    for host in 0..hosts.host_count() {
                        let (start, len) = schedule.part_extent(chunk, host);
                        for at in start..start + len {
                            assert_eq!(
                                schedule.owning_host(chunk, at),
                                Some((host, start..start + len))
                            );
                        }
                    }
                    assert_eq!(schedule.owning_host(chunk, schedule.chunk_extent(chunk).1), None);
                }
            }
        }
    }

    #[test]
    fn parts_cover_every_chunk_in_units() {
        for hosts in WORLDS {
            let hosts = MembersByHost::new(hosts, 0);
            for bytes in [1, 64, 65, 100_003, 3 << 20] {
                let schedule = HierarchySchedule::new(bytes, &hosts, 2, 1 << 20).unwrap();
                let mut end = 0;
                for chunk in 0..schedule.chunk_count() {
                    let (start, len) = schedule.chunk_extent(chunk);
                    assert_eq!(start, end);
                    let mut covered = 0;
                    for host in 0..hosts.host_count() {
                        let (at, part) = schedule.part_extent(chunk, host);
                        assert!(at == covered && part <= schedule.max_part_bytes());
                        assert!(part % UNIT_BYTES == 0 || at + part == len);
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
            let hosts = MembersByHost::new(numbers, 0);
            let schedule = HierarchySchedule::new(1_000_000, &hosts, 1, 1 << 20).unwrap();
            let (mut early, mut late) = (0, 0);
            for from in 0..numbers.len() {
                for to in (0..numbers.len()).filter(|to| hosts.host_of(*to) != hosts.host_of(from))
                {
                    for (slot, bytes) in messages(&schedule, from, to) {
                        *if slot % 2 == 0 { &mut early } else { &mut late } += bytes;
                    }
                }
            }
            assert_eq!(
                (early, late),
                ((hosts.host_count() - 1) * 1_000_000, (hosts.host_count() - 1) * 1_000_000)
            );
        }
    }

    #[test]
    fn rings_hold_all_pending_messages_or_are_refused() {
        for numbers in WORLDS {
            let hosts = MembersByHost::new(numbers, 0);
            for capacity in [4096, 16 << 10, 1 << 20] {
                for expansion in [1, 2, 8] {
                    let Some(schedule) =
                        HierarchySchedule::new(1 << 26, &hosts, expansion, capacity)
                    else {
                        assert!(capacity < 16 << 10);
                        continue;
                    };
                    for host in 0..hosts.host_count() {
                        let messages = schedule.chunks_in_flight(host) + 1;
                        assert!(messages * schedule.max_part_bytes() * expansion <= capacity);
                    }
                }
            }
        }
        assert!(
            HierarchySchedule::new(1 << 20, &MembersByHost::new(&[0, 0, 1], 0), 1, 64).is_none()
        );
    }
}

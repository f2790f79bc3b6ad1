// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The schedule of an allreduce: what each link carries in which order. It is the same on every
//! member.

use std::ops::Range;

use super::super::hosts::Hosts;
use super::super::position::Position;
use super::super::program::Carried;
use super::super::{LARGEST_CHUNK, PACKET, SMALLEST_CHUNK, UNIT, even_chunk, start_of};

/// Chunks of which partials are sent before the result of the first, of those that a member
/// carries.
const LOOKAHEAD: usize = 3;
/// Chunks whose inputs are posted within a host before the result of the first, likewise. If it
/// were [`LOOKAHEAD`], too, each result would wait for the one before: a partial needs inputs,
/// which would come after that result.
const LOOKAHEAD_WITHIN: usize = 2 * LOOKAHEAD;
/// Chunks grow with the hosts, so that the part for each host stays worth a message.
const SMALLEST_PART: usize = 16 << 10;
/// Chunks of each member's share that even a small tensor is cut into.
const OVERLAP: usize = 4;

/// Every so many chunks, from a first one on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Turns {
    first: usize,
    step: usize,
}

impl Turns {
    /// Returns the chunks that are `one` modulo `several` and `other` modulo `many`; none where
    /// there is no such chunk.
    fn both((one, several): (usize, usize), (other, many): (usize, usize)) -> Option<Self> {
        // The first is before the least common multiple.
        let first = (0..many).map(|k| one + k * several).find(|chunk| chunk % many == other)?;
        let step = (1..=many).map(|k| k * several).find(|step| step.is_multiple_of(many))?;
        Some(Self { first, step })
    }

    /// Returns the first of them that is not before `chunk`.
    fn from(self, chunk: usize) -> usize {
        self.first + chunk.saturating_sub(self.first).div_ceil(self.step) * self.step
    }
}

/// One direction of a link: whose part of which chunks goes over it. It depends only on the hosts
/// of the members.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course {
    early: Option<Turns>,
    late: Option<Turns>,
    /// Number of chunks by which results come after early messages.
    pub(super) ahead: usize,
    from: usize,
    to: usize,
}

impl Course {
    pub(super) fn new(hosts: &Hosts, from: usize, to: usize) -> Self {
        let place = |member: usize| {
            let host = hosts.of(member);
            let members = hosts.members(host);
            (host, (member - members.start, members.len()))
        };
        let ((here, sender), (there, receiver)) = (place(from), place(to));
        let turns = |(first, step)| Some(Turns { first, step });
        let (early, late, ahead) = if here == there {
            (turns(receiver), turns(sender), ahead_within(hosts))
        } else {
            let both = Turns::both(sender, receiver);
            (both, both, ahead_between(hosts))
        };
        Self { early, late, ahead, from: here, to: there }
    }

    /// Returns whether nothing ever goes over it.
    pub(super) fn is_empty(&self) -> bool {
        self.early.is_none() && self.late.is_none()
    }
}

/// Elements are cut in chunks; a chunk is carried, in every host, by members in turn, and cut in
/// one part for each host.
#[derive(Clone, Debug)]
pub(in super::super) struct Schedule {
    bytes: usize,
    hosts: Hosts,
    expansion: usize,
    chunk: usize,
    chunks: usize,
}

impl Schedule {
    /// Nothing when rings are too small.
    pub(in super::super) fn new(
        bytes: usize,
        hosts: &Hosts,
        expansion: usize,
        capacity: usize,
    ) -> Option<Self> {
        let chunk = chunk_for(bytes, hosts, expansion, capacity)?;
        Some(Self { bytes, hosts: hosts.clone(), expansion, chunk, chunks: bytes.div_ceil(chunk) })
    }

    /// Number of chunks by which results come after early messages, between hosts and within a
    /// host.
    pub(super) fn ahead(&self) -> (usize, usize) {
        (ahead_between(&self.hosts), ahead_within(&self.hosts))
    }

    pub(in super::super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Chunks that are begun, by the time that one is late, of those that a member of this host
    /// carries.
    pub(super) fn begun(&self, host: usize) -> usize {
        ahead_between(&self.hosts) / self.hosts.members(host).len().max(1) + 2
    }

    /// Returns the bytes of the longest part of a chunk.
    pub(super) fn longest_part(&self) -> usize {
        part_for(self.chunk, self.hosts.count())
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns the host that owns position `at` of a chunk, and the range of its part.
    pub(super) fn owner(&self, chunk: usize, at: usize) -> Option<(usize, Range<usize>)> {
        let bytes = self.chunk(chunk).1;
        let (units, hosts) = (bytes.div_ceil(UNIT), self.hosts.count());
        let (each, longer) = (units / hosts, units % hosts);
        let unit = at / UNIT;
        let host = if unit < longer * (each + 1) {
            unit / (each + 1)
        } else {
            longer + (unit - longer * (each + 1)).checked_div(each)?
        };
        let (start, len) = if at < bytes { self.part(chunk, host) } else { return None };
        Some((host, start..start + len))
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

    /// Returns the start of a host's part in a chunk, and its length.
    pub(super) fn part(&self, chunk: usize, host: usize) -> (usize, usize) {
        let bytes = self.chunk(chunk).1;
        let start = |host: usize| start_of(bytes, self.hosts.count(), host);
        (start(host), start(host + 1) - start(host))
    }

    /// Returns the first position from `slot` on whose message is not empty.
    pub(super) fn seek(&self, slot: usize, course: &Course) -> Position {
        // Chunks get no longer: where a message is empty, those that follow it in its turns are,
        // too.
        let find = |turns: Option<Turns>, from, bytes: &dyn Fn(usize) -> usize| {
            let chunk = self.present(turns?.from(from))?;
            Some((chunk, bytes(chunk))).filter(|(_, bytes)| *bytes > 0)
        };
        let early = |from| find(course.early, from, &|chunk| self.early_bytes(chunk, course));
        let late = |from| find(course.late, from, &|chunk| self.late_bytes(chunk, course));
        Position::seek(slot, course.ahead, early, late)
    }

    fn present(&self, chunk: usize) -> Option<usize> {
        (chunk < self.chunks).then_some(chunk)
    }

    /// Returns the position after this one.
    pub(super) fn next(&self, position: Position, course: &Course) -> Position {
        self.seek(position.after(), course)
    }

    fn early_bytes(&self, chunk: usize, Course { from, to, .. }: &Course) -> usize {
        if from == to { self.chunk(chunk).1 } else { self.part(chunk, *to).1 * self.expansion }
    }

    fn late_bytes(&self, chunk: usize, Course { from, to, .. }: &Course) -> usize {
        if from == to { self.chunk(chunk).1 } else { self.part(chunk, *from).1 }
    }
}

fn part_for(chunk: usize, hosts: usize) -> usize {
    chunk.div_ceil(UNIT).div_ceil(hosts) * UNIT
}

/// By how many chunks results come after partials between hosts.
fn ahead_between(hosts: &Hosts) -> usize {
    LOOKAHEAD * hosts.largest()
}

/// By how many chunks results come after inputs within a host.
fn ahead_within(hosts: &Hosts) -> usize {
    LOOKAHEAD_WITHIN * hosts.largest()
}

/// Returns the bytes of a chunk. The rings between hosts hold the partials that are sent ahead.
/// Within a host, bytes do not travel: a ring need not hold a chunk.
fn chunk_for(bytes: usize, hosts: &Hosts, expansion: usize, capacity: usize) -> Option<usize> {
    let sizes = hosts.sizes();
    let fewest = sizes.iter().copied().filter(|size| *size > 0).min()?;
    let part = capacity / expansion / (ahead_between(hosts) / fewest + 3) / UNIT * UNIT;
    let share = (bytes / hosts.largest() / OVERLAP).next_multiple_of(UNIT);
    let largest = LARGEST_CHUNK.max(sizes.len() * SMALLEST_PART);
    let chunk = share.clamp(SMALLEST_CHUNK, largest).min(part * sizes.len());
    let packets = chunk / sizes.len() / PACKET;
    let chunk = match packets {
        0 => chunk,
        _ => even_chunk(bytes, packets * PACKET * sizes.len(), hosts.largest()),
    };
    (chunk > 0).then_some(chunk)
}

#[cfg(test)]
mod tests {
    use super::super::super::message::Message;
    use super::*;

    const WORLDS: [&[u32]; 5] =
        [&[0, 0, 1, 1], &[0, 0, 1], &[0, 1, 2], &[0, 0, 0, 1, 1, 2], &[0, 0, 0, 0, 0, 1]];

    /// Slots and bytes of all messages of one direction of a link, as the module above says them.
    fn messages(schedule: &Schedule, from: usize, to: usize) -> Vec<(usize, usize)> {
        let hosts = schedule.hosts();
        let course = &Course::new(hosts, from, to);
        let (here, there) = (hosts.of(from), hosts.of(to));
        let carries = |member: usize, chunk| hosts.carrier(hosts.of(member), chunk) == member;
        let bytes = |slot: usize| {
            if slot.is_multiple_of(2) {
                let chunk = slot / 2;
                return match (here == there, carries(from, chunk), carries(to, chunk)) {
                    (true, _, true) => schedule.chunk(chunk).1,
                    (false, true, true) => schedule.part(chunk, there).1 * schedule.expansion,
                    _ => 0,
                };
            }
            let Some(chunk) = (slot / 2).checked_sub(course.ahead) else { return 0 };
            match (here == there, carries(from, chunk), carries(to, chunk)) {
                (true, true, _) => schedule.chunk(chunk).1,
                (false, true, true) => schedule.part(chunk, here).1,
                _ => 0,
            }
        };
        let slots = 2 * (schedule.chunks() + course.ahead);
        (0..slots).map(|slot| (slot, bytes(slot))).filter(|(_, bytes)| *bytes > 0).collect()
    }

    #[test]
    fn the_next_message_is_found_without_scanning_the_others() {
        for numbers in WORLDS {
            let hosts = Hosts::new(numbers, 0);
            for (bytes, expansion) in
                [(1, 1), (65, 2), (100_003, 1), (1 << 20, 2), ((3 << 20) + 70, 1)]
            {
                let schedule = Schedule::new(bytes, &hosts, expansion, 1 << 20).unwrap();
                for (from, to) in
                    (0..numbers.len()).flat_map(|one| (0..numbers.len()).map(move |two| (one, two)))
                {
                    let course = Course::new(&hosts, from, to);
                    let mut found = Vec::new();
                    let mut position = schedule.seek(0, &course);
                    while !position.is_over() {
                        found.push((position.slot, position.message.left()));
                        position = schedule.next(position, &course);
                    }
                    let expected: Vec<(usize, usize)> = messages(&schedule, from, to)
                        .into_iter()
                        .map(|(slot, bytes)| (slot, Message::new(bytes).left()))
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
            let hosts = Hosts::new(numbers, 0);
            for bytes in [1, 64, 65, 129, 100_003] {
                let schedule = Schedule::new(bytes, &hosts, 1, 1 << 20).unwrap();
                for chunk in 0..schedule.chunks() {
                    for host in 0..hosts.count() {
                        let (start, len) = schedule.part(chunk, host);
                        for at in start..start + len {
                            assert_eq!(schedule.owner(chunk, at), Some((host, start..start + len)));
                        }
                    }
                    assert_eq!(schedule.owner(chunk, schedule.chunk(chunk).1), None);
                }
            }
        }
    }

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
                    for (slot, bytes) in messages(&schedule, from, to) {
                        *if slot % 2 == 0 { &mut early } else { &mut late } += bytes;
                    }
                }
            }
            assert_eq!(
                (early, late),
                ((hosts.count() - 1) * 1_000_000, (hosts.count() - 1) * 1_000_000)
            );
        }
    }

    #[test]
    fn rings_hold_all_pending_messages_or_are_refused() {
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
                    }
                }
            }
        }
        assert!(Schedule::new(1 << 20, &Hosts::new(&[0, 0, 1], 0), 1, 64).is_none());
    }
}

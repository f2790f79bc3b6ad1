// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of a hierarchy, written down.

use super::super::program::{Builder, Load, Program};
pub(in super::super) use super::schedule::Schedule;

/// One member's steps for the chunks, in the order of the slots of [`Schedule`].
struct Writer<'a> {
    schedule: &'a Schedule,
    width: usize,
    member: usize,
    host: usize,
    builder: Builder,
    /// The steps that make the results of a chunk, by chunk: first of the own part, then of parts
    /// from other hosts.
    results: Vec<Vec<u32>>,
    joined: Option<u32>,
    /// Other hosts stand behind this member itself.
    folded: bool,
}

/// Returns the steps of a member.
pub(in super::super) fn program(schedule: &Schedule, member: usize, width: usize) -> Program {
    let members = schedule.hosts().sizes().iter().sum();
    Writer::new(schedule, member, width, members, false).write()
}

/// Returns the steps of a member of the first host, for all: see `Plan::folded`.
pub(in super::super) fn folded(schedule: &Schedule, member: usize, width: usize) -> Program {
    Writer::new(schedule, member, width, schedule.hosts().largest(), true).write()
}

impl<'a> Writer<'a> {
    fn new(
        schedule: &'a Schedule,
        member: usize,
        width: usize,
        members: usize,
        folded: bool,
    ) -> Self {
        Self {
            schedule,
            width,
            member,
            host: schedule.hosts().of(member),
            builder: Builder::new(members),
            results: vec![Vec::new(); schedule.chunks()],
            joined: None,
            folded,
        }
    }

    fn write(mut self) -> Program {
        let (chunks, (between, within)) = (self.schedule.chunks(), self.schedule.ahead());
        let present = |chunk: &usize| *chunk < chunks;
        for t in 0..chunks + within {
            if present(&t) {
                self.early(t);
            }
            if let Some(chunk) = t.checked_sub(between).filter(present) {
                self.late_between(chunk);
            }
            if let Some(chunk) = t.checked_sub(within) {
                let results = std::mem::take(&mut self.results[chunk]);
                let carried = self.schedule.carried(chunk, self.host);
                self.builder.hand_out(&carried, self.member, &results);
            }
        }
        self.builder.finish()
    }

    /// Returns the other hosts, the next one first.
    fn far(&self) -> Vec<usize> {
        let (host, count) = (self.host, self.schedule.hosts().count());
        (1..count).map(|k| (host + k) % count).collect()
    }

    /// An input to the carrier; or all inputs, the partials, and the own part's result.
    fn early(&mut self, chunk: usize) {
        let carried = self.schedule.carried(chunk, self.host);
        let Some(mut inputs) = self.builder.gather(&carried, self.member) else { return };
        let members = inputs.len() + 1;
        inputs.extend(self.joined);
        let own = self.join(chunk, members, &inputs);
        let part = self.schedule.part(chunk, self.host).1;
        if part == 0 {
            return;
        }
        let mut partials = own.map_or(Vec::new(), |step| vec![step]);
        let (width, schedule) = (self.width, self.schedule);
        if self.folded {
            let load = self.partials(chunk);
            partials.extend(self.theirs(load));
        } else {
            partials.extend(self.receive(chunk, |_| part * width, false));
        }
        let touched = part * (schedule.hosts().count() * width + 1);
        self.results[chunk].push(self.builder.reduce(touched, &partials));
    }

    /// Joins the inputs of this host part by part, each towards its owner; the step that joins the
    /// own part.
    fn join(&mut self, chunk: usize, members: usize, inputs: &[u32]) -> Option<u32> {
        let (mut own, mut before) = (None, inputs.to_vec());
        for owner in 0..self.schedule.hosts().count() {
            let len = self.schedule.part(chunk, owner).1;
            if len == 0 {
                continue;
            }
            let step = self.builder.reduce(len * (members + self.width), &before);
            before = vec![step];
            self.joined = Some(step);
            if owner == self.host {
                own = Some(step);
            } else if !self.folded {
                let to = self.schedule.hosts().carrier(owner, chunk);
                self.builder.send(to, Load::one(len * self.width, false), &before);
            }
        }
        if self.folded {
            let load = self.partials(chunk);
            if !load.is_empty() {
                self.builder.send(self.member, load, &before);
            }
        }
        own
    }

    /// Partials of a chunk for all other hosts.
    fn partials(&self, chunk: usize) -> Load {
        let parts =
            self.far().into_iter().map(|host| self.schedule.part(chunk, host).1 * self.width);
        Load::all(parts, false)
    }

    /// Folded: receives what the counterparts of this member send when it sends the same.
    fn theirs(&mut self, load: Load) -> Vec<u32> {
        if load.is_empty() {
            Vec::new()
        } else {
            vec![self.builder.receive(self.member, load, &[])]
        }
    }

    /// Receives from the carriers of a chunk on the other hosts.
    fn receive(&mut self, chunk: usize, bytes: impl Fn(usize) -> usize, copied: bool) -> Vec<u32> {
        let far = self.far();
        let mut arrived = Vec::with_capacity(far.len());
        for host in far {
            let load = Load::one(bytes(host), copied);
            if !load.is_empty() {
                let from = self.schedule.hosts().carrier(host, chunk);
                arrived.push(self.builder.receive(from, load, &[]));
            }
        }
        arrived
    }

    /// If this member carries the chunk: results to the carriers on other hosts, and from them.
    fn late_between(&mut self, chunk: usize) {
        let part = self.schedule.part(chunk, self.host).1;
        let mut results = std::mem::take(&mut self.results[chunk]);
        if self.schedule.hosts().carrier(self.host, chunk) == self.member {
            let far = self.far();
            if self.folded {
                let load = Load::all(far.iter().map(|_| part), true);
                if !load.is_empty() {
                    self.builder.send(self.member, load, &results);
                }
                results.extend(self.theirs(load));
            } else {
                for host in far.into_iter().filter(|_| part > 0) {
                    let to = self.schedule.hosts().carrier(host, chunk);
                    self.builder.send(to, Load::one(part, true), &results);
                }
                let schedule = self.schedule;
                results.extend(self.receive(chunk, |host| schedule.part(chunk, host).1, true));
            }
        }
        self.results[chunk] = results;
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::hosts::Hosts;
    use super::super::super::program::tests::assert_goes;
    use super::super::schedule::Course;
    use super::*;

    #[test]
    fn a_program_sends_and_receives_what_the_schedule_says_in_its_order() {
        for numbers in
            [&[0, 0, 1, 1][..], &[0, 0, 1], &[0, 0, 0, 1, 1, 1, 2, 2, 2], &[0, 0, 0, 1, 1, 2]]
        {
            let hosts = Hosts::new(numbers, 0);
            for (bytes, width) in [(65, 1), (100_003, 2), (3 << 20, 1)] {
                let schedule = Schedule::new(bytes, &hosts, width, 1 << 20).unwrap();
                let programs: Vec<Program> =
                    (0..numbers.len()).map(|member| program(&schedule, member, width)).collect();
                for (from, to) in
                    (0..numbers.len()).flat_map(|one| (0..numbers.len()).map(move |two| (one, two)))
                {
                    if from == to {
                        continue;
                    }
                    let (course, mut expected) = (Course::new(&hosts, from, to), Vec::new());
                    let mut position = schedule.seek(0, &course);
                    while !position.is_over() {
                        expected.push(position.message.left() as u64);
                        position = schedule.next(position, &course);
                    }
                    assert_goes(&programs, from, to, &expected, numbers);
                }
            }
        }
    }
}

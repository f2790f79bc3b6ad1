// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of a hierarchy as a program.

use super::super::program::{CollectiveProgram, ProgramBuilder, TransferLoad};
pub(in super::super) use super::schedule::HierarchySchedule;

/// Writer of the steps of one member, chunk by chunk in the order of the slots of
/// [`HierarchySchedule`].
struct HierarchyProgramWriter<'a> {
    schedule: &'a HierarchySchedule,
    width: usize,
    member: usize,
    host: usize,
    builder: ProgramBuilder,
    /// Steps that produce the results of each chunk: first the reduction of the own part, then the
    /// receipts of parts from other hosts.
    results: Vec<Vec<u32>>,
    joined: Option<u32>,
    /// Whether this member represents its counterparts on all other hosts.
    folded: bool,
}

/// Returns the steps of a member.
pub(in super::super) fn member_program(
    schedule: &HierarchySchedule,
    member: usize,
    width: usize,
) -> CollectiveProgram {
    let members = schedule.hosts().host_sizes().iter().sum();
    HierarchyProgramWriter::new(schedule, member, width, members, false).write_program()
}

/// Returns the steps of a member of the first host, which represents all hosts: see
/// `AllreducePlan::folded_program`.
pub(in super::super) fn folded_program(
    schedule: &HierarchySchedule,
    member: usize,
    width: usize,
) -> CollectiveProgram {
    HierarchyProgramWriter::new(schedule, member, width, schedule.hosts().largest_host_size(), true)
        .write_program()
}

impl<'a> HierarchyProgramWriter<'a> {
    fn new(
        schedule: &'a HierarchySchedule,
        member: usize,
        width: usize,
        members: usize,
        folded: bool,
    ) -> Self {
        Self {
            schedule,
            width,
            member,
            host: schedule.hosts().host_of(member),
            builder: ProgramBuilder::new(members),
            results: vec![Vec::new(); schedule.chunk_count()],
            joined: None,
            folded,
        }
    }

    fn write_program(mut self) -> CollectiveProgram {
        let (chunks, (between, within)) =
            (self.schedule.chunk_count(), self.schedule.result_lags());
        let present = |chunk: &usize| *chunk < chunks;
        for t in 0..chunks + within {
            if present(&t) {
                self.write_reduction_steps(t);
            }
            if let Some(chunk) = t.checked_sub(between).filter(present) {
                self.write_result_exchange_steps(chunk);
            }
            if let Some(chunk) = t.checked_sub(within) {
                let results = std::mem::take(&mut self.results[chunk]);
                let carried = self.schedule.carried_chunk(chunk, self.host);
                self.builder.add_result_distribution_steps(&carried, self.member, &results);
            }
        }
        self.builder.into_program()
    }

    /// Returns the other hosts, starting with the next one.
    fn other_hosts(&self) -> Vec<usize> {
        let (host, count) = (self.host, self.schedule.hosts().host_count());
        (1..count).map(|k| (host + k) % count).collect()
    }

    /// Writes the early steps of a chunk: for the carrier, all inputs, the partials and the
    /// reduction of the own part; for other members, the input to the carrier.
    fn write_reduction_steps(&mut self, chunk: usize) {
        let carried = self.schedule.carried_chunk(chunk, self.host);
        let Some(mut inputs) = self.builder.add_input_gather_steps(&carried, self.member) else {
            return;
        };
        let members = inputs.len() + 1;
        // A member joins one part after the other, so a chunk waits for the last part of the chunk
        // before.
        inputs.extend(self.joined);
        let own = self.write_host_reductions(chunk, members, &inputs);
        let part = self.schedule.part_extent(chunk, self.host).1;
        if part == 0 {
            return;
        }
        let mut partials = own.map_or(Vec::new(), |step| vec![step]);
        let (width, schedule) = (self.width, self.schedule);
        if self.folded {
            let load = self.partials_load(chunk);
            partials.extend(self.add_folded_receives(load));
        } else {
            partials.extend(self.add_receives_from_carriers(chunk, |_| part * width, false));
        }
        // Reads one partial of each host, and writes elements.
        let touched = part * (schedule.hosts().host_count() * width + 1);
        self.results[chunk].push(self.builder.add_reduction(touched, &partials));
    }

    /// Joins the inputs of this host part by part and sends each partial to its owner. Returns the
    /// step that joins the own part.
    fn write_host_reductions(
        &mut self,
        chunk: usize,
        members: usize,
        inputs: &[u32],
    ) -> Option<u32> {
        let (mut own, mut before) = (None, inputs.to_vec());
        for owner in 0..self.schedule.hosts().host_count() {
            let len = self.schedule.part_extent(chunk, owner).1;
            if len == 0 {
                continue;
            }
            // Reads one input of each member, and writes a partial.
            let step = self.builder.add_reduction(len * (members + self.width), &before);
            before = vec![step];
            self.joined = Some(step);
            if owner == self.host {
                own = Some(step);
            } else if !self.folded {
                let to = self.schedule.hosts().carrier_for_turn(owner, chunk);
                self.builder.add_send(
                    to,
                    TransferLoad::load_of_one_message(len * self.width, false),
                    &before,
                );
            }
        }
        if self.folded {
            let load = self.partials_load(chunk);
            if !load.is_empty() {
                self.builder.add_send(self.member, load, &before);
            }
        }
        own
    }

    /// Returns the load of the partials of a chunk for all other hosts.
    fn partials_load(&self, chunk: usize) -> TransferLoad {
        let parts = self
            .other_hosts()
            .into_iter()
            .map(|host| self.schedule.part_extent(chunk, host).1 * self.width);
        TransferLoad::all_messages(parts, false)
    }

    /// Receives, in a folded program, the messages of this member's counterparts: the same load as
    /// this member sends.
    fn add_folded_receives(&mut self, load: TransferLoad) -> Vec<u32> {
        if load.is_empty() {
            Vec::new()
        } else {
            vec![self.builder.add_receive(self.member, load, &[])]
        }
    }

    /// Adds receipts from the carriers of a chunk on the other hosts.
    fn add_receives_from_carriers(
        &mut self,
        chunk: usize,
        bytes: impl Fn(usize) -> usize,
        copied: bool,
    ) -> Vec<u32> {
        let far = self.other_hosts();
        let mut arrived = Vec::with_capacity(far.len());
        for host in far {
            let load = TransferLoad::load_of_one_message(bytes(host), copied);
            if !load.is_empty() {
                let from = self.schedule.hosts().carrier_for_turn(host, chunk);
                arrived.push(self.builder.add_receive(from, load, &[]));
            }
        }
        arrived
    }

    /// Writes the exchange of results with the carriers on other hosts, if this member carries the
    /// chunk.
    fn write_result_exchange_steps(&mut self, chunk: usize) {
        let part = self.schedule.part_extent(chunk, self.host).1;
        let mut results = std::mem::take(&mut self.results[chunk]);
        if self.schedule.hosts().carrier_for_turn(self.host, chunk) == self.member {
            let far = self.other_hosts();
            if self.folded {
                let load = TransferLoad::all_messages(far.iter().map(|_| part), true);
                if !load.is_empty() {
                    self.builder.add_send(self.member, load, &results);
                }
                results.extend(self.add_folded_receives(load));
            } else {
                for host in far.into_iter().filter(|_| part > 0) {
                    let to = self.schedule.hosts().carrier_for_turn(host, chunk);
                    self.builder.add_send(
                        to,
                        TransferLoad::load_of_one_message(part, true),
                        &results,
                    );
                }
                let schedule = self.schedule;
                results.extend(self.add_receives_from_carriers(
                    chunk,
                    |host| schedule.part_extent(chunk, host).1,
                    true,
                ));
            }
        }
        self.results[chunk] = results;
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::hosts::MembersByHost;
    use super::super::super::program::tests::assert_messages_match;
    use super::super::schedule::RouteDirection;
    use super::*;

    #[test]
    fn a_program_sends_and_receives_what_the_schedule_says_in_its_order() {
        for numbers in
            [&[0, 0, 1, 1][..], &[0, 0, 1], &[0, 0, 0, 1, 1, 1, 2, 2, 2], &[0, 0, 0, 1, 1, 2]]
        {
            let hosts = MembersByHost::new(numbers, 0);
            for (bytes, width) in [(65, 1), (100_003, 2), (3 << 20, 1)] {
                let schedule = HierarchySchedule::new(bytes, &hosts, width, 1 << 20).unwrap();
                let programs: Vec<CollectiveProgram> = (0..numbers.len())
                    .map(|member| member_program(&schedule, member, width))
                    .collect();
                for (from, to) in
                    (0..numbers.len()).flat_map(|one| (0..numbers.len()).map(move |two| (one, two)))
                {
                    if from == to {
                        continue;
                    }
                    let (direction, mut expected) =
                        (RouteDirection::new(&hosts, from, to), Vec::new());
                    let mut position = schedule.seek_message(0, &direction);
                    while !position.is_at_end() {
                        expected.push(position.message.remaining_bytes() as u64);
                        position = schedule.next_message(position, &direction);
                    }
                    assert_messages_match(&programs, from, to, &expected, numbers);
                }
            }
        }
    }
}

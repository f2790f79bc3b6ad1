// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of a halving as a program.

use super::super::program::{CollectiveProgram, ProgramBuilder, TransferLoad};
pub(in super::super) use super::schedule::HalvingSchedule;
use super::schedule::HalvingStage;

/// Writer of the steps of one member, chunk by chunk in the order of the slots of
/// [`HalvingSchedule`].
struct HalvingProgramWriter<'a> {
    schedule: &'a HalvingSchedule,
    member: usize,
    host: usize,
    builder: ProgramBuilder,
    /// Steps that the next step of each chunk must follow.
    before: Vec<Vec<u32>>,
    /// Whether this member represents its counterparts on all other hosts.
    folded: bool,
}

/// Returns the steps of a member.
pub(in super::super) fn member_program(
    schedule: &HalvingSchedule,
    member: usize,
) -> CollectiveProgram {
    HalvingProgramWriter::new(schedule, member, false).write_program()
}

/// Returns the steps of a member of the first host, which represents all hosts: see
/// `AllreducePlan::folded_program`.
pub(in super::super) fn folded_program(
    schedule: &HalvingSchedule,
    member: usize,
) -> CollectiveProgram {
    HalvingProgramWriter::new(schedule, member, true).write_program()
}

impl<'a> HalvingProgramWriter<'a> {
    fn new(schedule: &'a HalvingSchedule, member: usize, folded: bool) -> Self {
        let members = schedule.hosts().host_sizes().iter().sum();
        let (host, builder) = (schedule.hosts().host_of(member), ProgramBuilder::new(members));
        let before = vec![Vec::new(); schedule.chunk_count()];
        Self { schedule, member, host, builder, before, folded }
    }

    /// Adds a send to the carrier on the other host of a stage.
    fn add_send_to_partner(
        &mut self,
        stage: &HalvingStage,
        (chunk, step): (usize, usize),
        load: TransferLoad,
        before: &[u32],
    ) -> u32 {
        let to = self.partner_member(stage, chunk);
        // The first host meets another host in each step, so each step has a separate link.
        let link = if self.folded { self.schedule.hosts().largest_host_size() + step } else { to };
        self.builder.add_send_over_link(link, to, load, before)
    }

    fn partner_member(&self, stage: &HalvingStage, chunk: usize) -> usize {
        if self.folded { self.member } else { self.chunk_carrier(stage.host, chunk) }
    }

    fn write_program(mut self) -> CollectiveProgram {
        let (chunks, within) =
            (self.schedule.chunk_count(), self.schedule.result_lag_within_host());
        for t in 0..chunks + within {
            if t < chunks {
                self.write_reduction_steps(t);
            }
            for level in (0..self.schedule.level_count()).rev() {
                let chunk = t.checked_sub(self.schedule.result_lag_between_hosts(level));
                if let Some(chunk) = chunk.filter(|chunk| *chunk < chunks) {
                    self.write_result_exchange_steps(chunk, level);
                }
            }
            if let Some(chunk) = t.checked_sub(within) {
                let results = std::mem::take(&mut self.before[chunk]);
                let carried = self.schedule.carried_chunk(chunk, self.host);
                self.builder.add_result_distribution_steps(&carried, self.member, &results);
            }
        }
        self.builder.into_program()
    }

    fn find_stage(&self, chunk: usize, step: usize) -> Option<HalvingStage> {
        let mut stage = self.schedule.find_stage(self.host, chunk, step)?;
        if self.folded {
            // The represented hosts send as much as they receive, and the first host keeps the
            // longer half.
            stage.give = stage.keep.clone();
        }
        Some(stage)
    }

    fn chunk_carrier(&self, host: usize, chunk: usize) -> usize {
        self.schedule.hosts().carrier_for_turn(host, chunk)
    }

    /// Writes the early steps of a chunk: for the carrier, all inputs and the swaps of partials;
    /// for other members, the input to the carrier.
    fn write_reduction_steps(&mut self, chunk: usize) {
        let carried = self.schedule.carried_chunk(chunk, self.host);
        let Some(inputs) = self.builder.add_input_gather_steps(&carried, self.member) else {
            return;
        };
        let (len, width) = (carried.bytes, self.schedule.accumulator_width());
        let mut before =
            vec![self.builder.add_reduction(len * (inputs.len() + 1 + width), &inputs)];
        let mut own = 0..len;
        for step in 0..self.schedule.stage_count(self.host, chunk) {
            let Some(stage) = self.find_stage(chunk, step) else { break };
            let HalvingStage { keep, give, .. } = stage.clone();
            let mut after = Vec::with_capacity(2);
            if !give.is_empty() {
                let load = TransferLoad::load_of_one_message(give.len() * width, true);
                after.push(self.add_send_to_partner(&stage, (chunk, step), load, &before));
            }
            if !keep.is_empty() {
                let (from, load) = (
                    self.partner_member(&stage, chunk),
                    TransferLoad::load_of_one_message(keep.len() * width, false),
                );
                let theirs = self.builder.add_receive(from, load, &before);
                // Both partials are read, the sum is written to a block in the cache, and the block
                // is copied back.
                after.push(self.builder.add_reduction(3 * keep.len() * width, &[theirs]));
            }
            own = keep;
            if !after.is_empty() {
                before = after;
            }
        }
        if !own.is_empty() {
            before = vec![self.builder.add_reduction(own.len() * (width + 1), &before)];
        }
        self.before[chunk] = before;
    }

    /// Writes the swap of results at a level, if this member carries the chunk.
    fn write_result_exchange_steps(&mut self, chunk: usize, level: usize) {
        if self.chunk_carrier(self.host, chunk) != self.member {
            return;
        }
        let Some(step) = self.schedule.step_at_level(self.host, level) else { return };
        let Some(stage) = self.find_stage(chunk, step) else { return };
        let (before, mut after) = (std::mem::take(&mut self.before[chunk]), Vec::with_capacity(2));
        if !stage.keep.is_empty() {
            let load = TransferLoad::load_of_one_message(stage.keep.len(), true);
            after.push(self.add_send_to_partner(&stage, (chunk, step), load, &before));
        }
        if !stage.give.is_empty() {
            let from = self.partner_member(&stage, chunk);
            after.push(self.builder.add_receive(
                from,
                TransferLoad::load_of_one_message(stage.give.len(), true),
                &before,
            ));
        }
        self.before[chunk] = if after.is_empty() { before } else { after };
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::hosts::MembersByHost;
    use super::super::super::program::tests::assert_messages_match;
    use super::super::schedule::LinkDirection;
    use super::*;

    #[test]
    fn a_program_sends_and_receives_what_the_schedule_says_in_its_order() {
        for numbers in
            [&[0, 0, 1, 1][..], &[0, 1, 2, 3, 4], &[0, 0, 0, 1, 1, 1, 2, 2, 2], &[0, 0, 0, 1, 1, 2]]
        {
            let hosts = MembersByHost::new(numbers, 0);
            for (bytes, width) in [(65, 1), (100_003, 2), (3 << 20, 1)] {
                let schedule = HalvingSchedule::new(bytes, &hosts, width, 1 << 20).unwrap();
                let programs: Vec<CollectiveProgram> =
                    (0..numbers.len()).map(|member| member_program(&schedule, member)).collect();
                for from in 0..numbers.len() {
                    let halving_links = schedule.member_links(from);
                    for to in (0..numbers.len()).filter(|to| *to != from) {
                        let link = if to < from { to } else { to - 1 };
                        let mut expected = Vec::new();
                        if let Some(halving_link) =
                            halving_links.iter().find(|halving_link| halving_link.link == link)
                        {
                            let mut position =
                                schedule.first_message(halving_link, LinkDirection::Outgoing);
                            while !position.is_at_end() {
                                expected.push(position.message.remaining_bytes() as u64);
                                position = schedule.next_message(
                                    position,
                                    halving_link,
                                    LinkDirection::Outgoing,
                                );
                            }
                        }
                        assert_messages_match(&programs, from, to, &expected, numbers);
                    }
                }
            }
        }
    }
}

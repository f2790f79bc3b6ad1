// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of a halving, written down.

use super::super::program::{Builder, Load, Program};
pub(in super::super) use super::schedule::Schedule;
use super::schedule::Stage;

/// One member's steps for the chunks, in the order of the slots of [`Schedule`].
struct Writer<'a> {
    schedule: &'a Schedule,
    member: usize,
    host: usize,
    builder: Builder,
    /// The steps that the next one of a chunk comes after, by chunk.
    before: Vec<Vec<u32>>,
    /// Other hosts stand behind this member itself.
    folded: bool,
}

/// Returns the steps of a member.
pub(in super::super) fn program(schedule: &Schedule, member: usize) -> Program {
    Writer::new(schedule, member, false).write()
}

/// Returns the steps of a member of the first host, for all: see `Plan::folded`.
pub(in super::super) fn folded(schedule: &Schedule, member: usize) -> Program {
    Writer::new(schedule, member, true).write()
}

impl<'a> Writer<'a> {
    fn new(schedule: &'a Schedule, member: usize, folded: bool) -> Self {
        let members = schedule.hosts().sizes().iter().sum();
        let (host, builder) = (schedule.hosts().of(member), Builder::new(members));
        let before = vec![Vec::new(); schedule.chunks()];
        Self { schedule, member, host, builder, before, folded }
    }

    /// Sends a carrier of another host something of a step.
    fn give(
        &mut self,
        stage: &Stage,
        (chunk, step): (usize, usize),
        load: Load,
        before: &[u32],
    ) -> u32 {
        let to = self.other(stage, chunk);
        // The first host meets another one in each step.
        let link = if self.folded { self.schedule.hosts().largest() + step } else { to };
        self.builder.send_over(link, to, load, before)
    }

    fn other(&self, stage: &Stage, chunk: usize) -> usize {
        if self.folded { self.member } else { self.carrier(stage.host, chunk) }
    }

    fn write(mut self) -> Program {
        let (chunks, within) = (self.schedule.chunks(), self.schedule.ahead_within());
        for t in 0..chunks + within {
            if t < chunks {
                self.early(t);
            }
            for level in (0..self.schedule.levels()).rev() {
                let chunk = t.checked_sub(self.schedule.ahead_between(level));
                if let Some(chunk) = chunk.filter(|chunk| *chunk < chunks) {
                    self.late_between(chunk, level);
                }
            }
            if let Some(chunk) = t.checked_sub(within) {
                let results = std::mem::take(&mut self.before[chunk]);
                let carried = self.schedule.carried(chunk, self.host);
                self.builder.hand_out(&carried, self.member, &results);
            }
        }
        self.builder.finish()
    }

    fn stage(&self, chunk: usize, step: usize) -> Option<Stage> {
        let mut stage = self.schedule.stage(self.host, chunk, step)?;
        if self.folded {
            // It receives as much as it sends. The first host keeps the longer half.
            stage.give = stage.keep.clone();
        }
        Some(stage)
    }

    fn carrier(&self, host: usize, chunk: usize) -> usize {
        self.schedule.hosts().carrier(host, chunk)
    }

    /// An input to the carrier; or all inputs, and the swaps of partials.
    fn early(&mut self, chunk: usize) {
        let carried = self.schedule.carried(chunk, self.host);
        let Some(inputs) = self.builder.gather(&carried, self.member) else { return };
        let (len, width) = (carried.bytes, self.schedule.width());
        let mut before = vec![self.builder.reduce(len * (inputs.len() + 1 + width), &inputs)];
        let mut own = 0..len;
        for step in 0..self.schedule.stages(self.host, chunk) {
            let Some(stage) = self.stage(chunk, step) else { break };
            let Stage { keep, give, .. } = stage.clone();
            let mut after = Vec::with_capacity(2);
            if !give.is_empty() {
                let load = Load::one(give.len() * width, true);
                after.push(self.give(&stage, (chunk, step), load, &before));
            }
            if !keep.is_empty() {
                let (from, load) =
                    (self.other(&stage, chunk), Load::one(keep.len() * width, false));
                let theirs = self.builder.receive(from, load, &before);
                // Read twice, written to a block in the cache, and copied back.
                after.push(self.builder.reduce(3 * keep.len() * width, &[theirs]));
            }
            own = keep;
            if !after.is_empty() {
                before = after;
            }
        }
        if !own.is_empty() {
            before = vec![self.builder.reduce(own.len() * (width + 1), &before)];
        }
        self.before[chunk] = before;
    }

    /// If this member carries the chunk: the swap of results at a level.
    fn late_between(&mut self, chunk: usize, level: usize) {
        if self.carrier(self.host, chunk) != self.member {
            return;
        }
        let Some(step) = self.schedule.step_at(self.host, level) else { return };
        let Some(stage) = self.stage(chunk, step) else { return };
        let (before, mut after) = (std::mem::take(&mut self.before[chunk]), Vec::with_capacity(2));
        if !stage.keep.is_empty() {
            let load = Load::one(stage.keep.len(), true);
            after.push(self.give(&stage, (chunk, step), load, &before));
        }
        if !stage.give.is_empty() {
            let from = self.other(&stage, chunk);
            after.push(self.builder.receive(from, Load::one(stage.give.len(), true), &before));
        }
        self.before[chunk] = if after.is_empty() { before } else { after };
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::hosts::Hosts;
    use super::super::super::program::tests::assert_goes;
    use super::super::schedule::Way;
    use super::*;

    #[test]
    fn a_program_sends_and_receives_what_the_schedule_says_in_its_order() {
        for numbers in
            [&[0, 0, 1, 1][..], &[0, 1, 2, 3, 4], &[0, 0, 0, 1, 1, 1, 2, 2, 2], &[0, 0, 0, 1, 1, 2]]
        {
            let hosts = Hosts::new(numbers, 0);
            for (bytes, width) in [(65, 1), (100_003, 2), (3 << 20, 1)] {
                let schedule = Schedule::new(bytes, &hosts, width, 1 << 20).unwrap();
                let programs: Vec<Program> =
                    (0..numbers.len()).map(|member| program(&schedule, member)).collect();
                for from in 0..numbers.len() {
                    let lanes = schedule.lanes(from);
                    for to in (0..numbers.len()).filter(|to| *to != from) {
                        let link = if to < from { to } else { to - 1 };
                        let mut expected = Vec::new();
                        if let Some(lane) = lanes.iter().find(|lane| lane.link == link) {
                            let mut position = schedule.first(lane, Way::Out);
                            while !position.is_over() {
                                expected.push(position.message.left() as u64);
                                position = schedule.next(position, lane, Way::Out);
                            }
                        }
                        assert_goes(&programs, from, to, &expected, numbers);
                    }
                }
            }
        }
    }
}

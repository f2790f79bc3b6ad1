// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A training step: allreduces beside the backward pass, as the engine fuses and orders them.

use std::collections::VecDeque;
use std::time::Duration;

use farandole_engine::control_plane_model::{self, PrioritizedTensor};

use crate::events::bytes_to_f64;
use crate::models::{ModelProfile, PassTiming};
use crate::{AllreduceSimulator, ControlRound, Result, SimulatedCluster};

/// Steps that are simulated with [`StepOptions::overlap_forward`], until their times repeat.
const OVERLAPPED_STEPS: usize = 6;

/// Settings of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOptions {
    /// Bytes up to which gradients are fused.
    pub fusion_threshold: u64,
    /// Whether a forward pass begins before all gradients are reduced, and each layer waits for its
    /// own. Then the first layers have priority, and large gradients are reduced in parts, as
    /// `DistributedOptimizer.overlap_forward` does.
    pub overlap_forward: bool,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEstimate {
    /// From the beginning of the forward pass until the last gradient is reduced; if forward passes
    /// overlap with reductions, from the end of a backward pass to the next one.
    pub time: Duration,
    /// The same on one rank alone.
    pub single_rank_time: Duration,
    /// All allreduces of a step, one after the other.
    pub reduction_time: Duration,
    /// Lists of the coordinator in a step.
    pub lists: usize,
    /// Allreduces of a step after fusion.
    pub operations: usize,
}

impl StepEstimate {
    /// Returns the examples per second of all ranks, divided by the examples per second of one rank
    /// times their number.
    pub fn scaling_efficiency(&self) -> f64 {
        self.single_rank_time.as_secs_f64() / self.time.as_secs_f64().max(1e-12)
    }

    /// Simulates a step of a model.
    ///
    /// # Errors
    /// As [`AllreduceSimulator::simulate`].
    pub fn simulate(
        collective: &mut AllreduceSimulator<'_>,
        control: &ControlRound,
        model: &ModelProfile,
        timing: PassTiming,
        options: StepOptions,
    ) -> Result<Self> {
        let cluster = collective.cluster();
        let alone = timing.forward + timing.backward;
        if cluster.ranks == 1 {
            let (time, reducing) = (alone, Duration::ZERO);
            return Ok(Self {
                time,
                single_rank_time: alone,
                reduction_time: reducing,
                lists: 0,
                operations: 0,
            });
        }
        let steps = if options.overlap_forward { OVERLAPPED_STEPS } else { 1 };
        let mut passes = SimulatedPasses::new(cluster, model, timing, steps);
        let mut reductions = SimulatedReductions::new(cluster.hosts, control, options);
        loop {
            passes.advance(&mut reductions);
            if !reductions.reduce_next_list(collective, &mut passes.missing_parts)? {
                break;
            }
        }
        let times = match passes.backward_ends[..] {
            // A step lasts until the backward pass ends, even if gradients are ready before.
            [end] => reductions.busy_until.max(end),
            [.., before, end] => end - before,
            [] => 0.0,
        };
        Ok(Self {
            time: Duration::from_secs_f64(times),
            single_rank_time: alone,
            reduction_time: Duration::from_secs_f64(reductions.reducing / steps_to_f64(steps)),
            lists: reductions.lists / steps,
            operations: reductions.operations / steps,
        })
    }
}

/// The passes of all steps on a rank, which wait for gradients of the step before.
struct SimulatedPasses<'a> {
    model: &'a ModelProfile,
    /// Seconds of each layer in a forward and in a backward pass.
    forward: Vec<f64>,
    backward: Vec<f64>,
    now: f64,
    step: usize,
    steps: usize,
    /// Layers of the present step whose forward pass is done.
    done: usize,
    /// For each layer, parts of the last step's gradient that are not reduced yet, and when the
    /// last reduced one was.
    missing_parts: Vec<(usize, f64)>,
    backward_ends: Vec<f64>,
}

impl<'a> SimulatedPasses<'a> {
    fn new(
        cluster: &SimulatedCluster,
        model: &'a ModelProfile,
        timing: PassTiming,
        steps: usize,
    ) -> Self {
        // All ranks wait for the slowest.
        let slowdown = if cluster.stragglers > 0 { cluster.slowdown } else { 1.0 };
        let all = bytes_to_f64(model.layers.iter().map(|layer| layer.work).sum::<u64>().max(1));
        let shares = |pass: Duration| {
            let seconds = pass.as_secs_f64() * slowdown;
            model.layers.iter().map(|layer| seconds * bytes_to_f64(layer.work) / all).collect()
        };
        Self {
            model,
            forward: shares(timing.forward),
            backward: shares(timing.backward),
            now: 0.0,
            step: 0,
            steps,
            done: 0,
            missing_parts: vec![(0, 0.0); model.layers.len()],
            backward_ends: Vec::new(),
        }
    }

    /// Computes until a layer needs a gradient that is not reduced.
    fn advance(&mut self, reductions: &mut SimulatedReductions) {
        while self.step < self.steps {
            while let Some((missing, reduced)) = self.missing_parts.get(self.done) {
                if *missing > 0 {
                    return;
                }
                self.now = self.now.max(*reduced) + self.forward[self.done];
                self.done += 1;
            }
            // The last layers come first, and each takes its share of the pass by its
            // multiplications.
            for (index, layer) in self.model.layers.iter().enumerate().rev() {
                self.now += self.backward[index];
                self.missing_parts[index].0 = reductions.announce(index, layer.bytes, self.now);
            }
            self.backward_ends.push(self.now);
            (self.step, self.done) = (self.step + 1, 0);
        }
    }
}

/// A part of a gradient that is announced.
struct AnnouncedPart {
    layer: usize,
    bytes: u64,
    /// Time at which the coordinator knows that all ranks have it.
    known_at: f64,
}

/// The coordinator's lists and their allreduces.
struct SimulatedReductions {
    options: StepOptions,
    announce: f64,
    distribute: f64,
    max_lists: usize,
    /// In order of readiness.
    waiting: Vec<AnnouncedPart>,
    /// Times at which the lists end that are under way.
    under_way: VecDeque<f64>,
    now: f64,
    busy_until: f64,
    lists: usize,
    operations: usize,
    reducing: f64,
}

impl SimulatedReductions {
    fn new(hosts: u32, control: &ControlRound, options: StepOptions) -> Self {
        let max_lists = control_plane_model::max_lists_in_execution(hosts as usize);
        Self {
            options,
            announce: control.announce_time.as_secs_f64(),
            distribute: control.distribute_time.as_secs_f64(),
            max_lists: usize::try_from(max_lists).unwrap_or(usize::MAX),
            waiting: Vec::new(),
            under_way: VecDeque::new(),
            now: 0.0,
            busy_until: 0.0,
            lists: 0,
            operations: 0,
            reducing: 0.0,
        }
    }

    /// Announces a gradient, and returns the number of its parts.
    fn announce(&mut self, layer: usize, bytes: u64, now: f64) -> usize {
        let limit = match self.options.overlap_forward {
            true => control_plane_model::PRIORITIZED_LIST_BYTES,
            false => u64::MAX,
        };
        let (mut left, mut parts) = (bytes, 0);
        while left > 0 {
            let part = left.min(limit);
            self.waiting.push(AnnouncedPart { layer, bytes: part, known_at: now + self.announce });
            left -= part;
            parts += 1;
        }
        parts
    }

    /// Reduces the next list; returns whether there was one. Counts the parts in `missing_parts`.
    fn reduce_next_list(
        &mut self,
        collective: &mut AllreduceSimulator<'_>,
        missing_parts: &mut [(usize, f64)],
    ) -> Result<bool> {
        let Some(first) = self.waiting.first() else { return Ok(false) };
        self.now = self.now.max(first.known_at);
        while self.under_way.front().is_some_and(|end| *end <= self.now) {
            self.under_way.pop_front();
        }
        // The engine has a limit of lists: the next one begins when the oldest ends.
        if self.under_way.len() >= self.max_lists {
            self.now = self.now.max(self.under_way.pop_front().unwrap_or(self.now));
        }
        // Gradients that are ready by now can come in the same list.
        let known = self.waiting.iter().take_while(|part| part.known_at <= self.now);
        let tensor = |part: &AnnouncedPart| PrioritizedTensor {
            priority: self.priority(part.layer),
            bytes: part.bytes,
            group: 0,
        };
        let tensors: Vec<_> = known.map(tensor).collect();
        let chosen = control_plane_model::plan_prioritized_list(&tensors);
        let bytes: Vec<u64> = chosen.iter().map(|index| self.waiting[*index].bytes).collect();
        // A list begins when the ranks have it and the list before has ended.
        self.busy_until = self.busy_until.max(self.now + self.distribute);
        let threshold = self.options.fusion_threshold;
        for tensors in control_plane_model::plan_fused_allreduces(&bytes, threshold) {
            let fused = tensors.iter().map(|index| bytes[*index]).sum();
            let took = collective.simulate(fused)?.time.as_secs_f64();
            self.busy_until += took;
            self.reducing += took;
            self.operations += 1;
            for index in tensors {
                let (missing, reduced) = &mut missing_parts[self.waiting[chosen[index]].layer];
                (*missing, *reduced) = (*missing - 1, reduced.max(self.busy_until));
            }
        }
        let mut index = 0;
        self.waiting.retain(|_| {
            index += 1;
            !chosen.contains(&(index - 1))
        });
        self.under_way.push_back(self.busy_until);
        self.lists += 1;
        Ok(true)
    }

    /// Returns the priority of a layer's gradient: the first layer of the forward pass comes first.
    fn priority(&self, layer: usize) -> i32 {
        if self.options.overlap_forward {
            -1 - i32::try_from(layer).unwrap_or(i32::MAX - 1)
        } else {
            0
        }
    }
}

fn steps_to_f64(steps: usize) -> f64 {
    bytes_to_f64(steps as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_come_from_the_last_layer_to_the_first() {
        let model = ModelProfile::from_name("vgg16").unwrap();
        let timing = PassTiming { forward: Duration::ZERO, backward: Duration::from_secs(2) };
        let cluster = SimulatedCluster::new(2, 2).unwrap();
        let control = ControlRound::simulate(&cluster).unwrap();
        let options = StepOptions { fusion_threshold: 0, overlap_forward: false };
        let mut reductions = SimulatedReductions::new(2, &control, options);
        SimulatedPasses::new(&cluster, &model, timing, 1).advance(&mut reductions);
        let ready = reductions.waiting;
        assert_eq!(ready.len(), 32);
        assert!(ready.is_sorted_by(|one, other| one.known_at <= other.known_at));
        assert_eq!(ready.iter().map(|part| part.bytes).sum::<u64>(), model.gradient_bytes());
        assert!((ready[31].known_at - control.announce_time.as_secs_f64() - 2.0).abs() < 1e-9);
        // The three largest tensors are the first.
        assert!(ready[5].known_at < 0.05 * 2.0);
    }
}

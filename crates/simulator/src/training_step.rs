// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A training step: allreduces beside the backward pass, as the engine fuses and orders them.

use std::collections::VecDeque;
use std::time::Duration;

use farandole_engine::control_plane_model;

use crate::events::bytes_to_f64;
use crate::models::{ModelProfile, PassTiming};
use crate::{AllreduceSimulator, ControlRound, Result};

/// A step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEstimate {
    /// From the beginning of the forward pass until the last gradient is reduced.
    pub time: Duration,
    /// The same on one rank alone.
    pub single_rank_time: Duration,
    /// All allreduces, one after the other.
    pub reduction_time: Duration,
    /// Lists of the coordinator.
    pub lists: usize,
    /// Allreduces after fusion.
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
        threshold: u64,
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
        // All ranks wait for the slowest.
        let slowdown = if cluster.stragglers > 0 { cluster.slowdown } else { 1.0 };
        let forward = timing.forward.as_secs_f64() * slowdown;
        let backward = timing.backward.as_secs_f64() * slowdown;
        let ready = gradient_ready_times(model, backward);
        let (up, down) =
            (control.announce_time.as_secs_f64(), control.distribute_time.as_secs_f64());
        let most = control_plane_model::max_lists_in_execution(cluster.hosts as usize);
        // When the lists end that are under way; until when the communicator is busy.
        let (mut under_way, mut busy) = (VecDeque::new(), 0.0f64);
        let (mut now, mut at) = (0.0f64, 0);
        let (mut lists, mut operations, mut reducing) = (0, 0, 0.0);
        while at < ready.len() {
            now = now.max(ready[at].0 + up);
            while under_way.front().is_some_and(|end| *end <= now) {
                under_way.pop_front();
            }
            // The engine has a limit of lists: the next one begins when the oldest ends.
            if under_way.len() as u64 >= most {
                now = now.max(under_way.pop_front().unwrap_or(now));
            }
            let first = at;
            // Gradients that are ready by now come in the same list.
            at += ready[first..].iter().take_while(|(time, _)| time + up <= now).count();
            let bytes: Vec<u64> = ready[first..at].iter().map(|(_, bytes)| *bytes).collect();
            // A list begins when the ranks have it and the list before has ended.
            busy = busy.max(now + down);
            for tensors in control_plane_model::plan_fused_allreduces(&bytes, threshold) {
                let fused = tensors.iter().map(|place| bytes[*place]).sum();
                let took = collective.simulate(fused)?.time.as_secs_f64();
                busy += took;
                reducing += took;
                operations += 1;
            }
            under_way.push_back(busy);
            lists += 1;
        }
        // A step lasts until the backward pass ends, even if gradients are ready before.
        let time = Duration::from_secs_f64(forward + busy.max(backward));
        Ok(Self {
            time,
            single_rank_time: alone,
            reduction_time: Duration::from_secs_f64(reducing),
            lists,
            operations,
        })
    }
}

/// Returns the time at which each gradient is ready, from the beginning of the backward pass, and
/// its bytes: the last layers come first, and each takes its share of the pass by its
/// multiplications.
fn gradient_ready_times(model: &ModelProfile, backward: f64) -> Vec<(f64, u64)> {
    let all = bytes_to_f64(model.layers.iter().map(|layer| layer.work).sum::<u64>().max(1));
    let mut done = 0;
    let ready = model.layers.iter().rev().map(|layer| {
        done += layer.work;
        (backward * bytes_to_f64(done) / all, layer.bytes)
    });
    ready.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_come_from_the_last_layer_to_the_first() {
        let model = ModelProfile::from_name("vgg16").unwrap();
        let ready = gradient_ready_times(&model, 2.0);
        assert_eq!(ready.len(), 32);
        assert!(ready.is_sorted_by(|one, other| one.0 <= other.0));
        assert_eq!(ready.iter().map(|(_, bytes)| bytes).sum::<u64>(), model.gradient_bytes());
        assert!((ready[31].0 - 2.0).abs() < 1e-9);
        // The three largest tensors are the first.
        assert!(ready[5].0 < 0.05 * 2.0);
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Control messages of a training step, up to 4,096 ranks, simulated in one thread over loopback
//! links.
//!
//! `cargo bench -p farandole-engine --bench control_plane`

#![expect(clippy::unwrap_used, reason = "a bench")]

use farandole_engine::simulation::SimulatedControlPlane;

/// Tensors of a step: those of a ResNet-50.
const TENSORS: usize = 161;
/// Ranks of a host.
const LOCAL: u32 = 8;

fn main() {
    println!(
        "{TENSORS} allreduces a step; messages are sent and received ones, the first step by name, \
         later ones by number"
    );
    println!(
        "{:>6} {:>6} {:>11} {:>12} {:>13} {:>11} {:>18}",
        "hosts",
        "ranks",
        "first step",
        "busiest rank",
        "mean per rank",
        "all ranks",
        "CPU per rank, step"
    );
    for hosts in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
        let mut plane = SimulatedControlPlane::new(hosts, LOCAL).unwrap();
        let first = plane.run_allreduce_step(TENSORS).unwrap();
        let later = plane.run_allreduce_step(TENSORS).unwrap();
        let ranks = hosts * LOCAL;
        let time = plane.measure_mean_step_time(TENSORS, 2).unwrap() / ranks;
        let mean = 2.0 * f64::from(u32::try_from(later.total).unwrap()) / f64::from(ranks);
        println!(
            "{hosts:>6} {ranks:>6} {:>11} {:>12} {mean:>13.2} {:>11} {time:>18.1?}",
            first.busiest, later.busiest, later.total
        );
    }
}

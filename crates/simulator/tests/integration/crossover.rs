// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The algorithm across hosts that the table chooses, next to the other one.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_config::Config;
use farandole_simulator::{AllreduceEstimate, AllreduceSimulator, SimulatedCluster};

/// Most that the choice may take, as a multiple of the faster algorithm.
const MAX_LOSS: f64 = 1.1;
/// Most that choices may take in the mean.
const MAX_MEAN_LOSS: f64 = 1.01;
const TENSOR_BYTES: [u64; 6] = [128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Simulates all sizes with an algorithm, or with the choice of the table.
fn simulate(cluster: &SimulatedCluster, algorithm: &str) -> Vec<AllreduceEstimate> {
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let config = Config { allreduce_algorithm: algorithm.to_owned(), ..config };
    let mut simulator = AllreduceSimulator::new(cluster, &config).unwrap();
    TENSOR_BYTES.iter().map(|bytes| simulator.simulate(*bytes).unwrap()).collect()
}

#[test]
fn the_chosen_algorithm_is_hardly_slower_than_the_other_one() {
    let (mut losses, mut choices) = (Vec::new(), BTreeMap::new());
    for (hosts, ranks) in [(4, 16), (8, 64), (12, 48), (16, 64), (24, 96), (32, 128)] {
        for microseconds in [5, 20, 50, 100, 200, 500] {
            let latency = Duration::from_micros(microseconds);
            let cluster =
                SimulatedCluster { latency, ..SimulatedCluster::new(hosts, ranks).unwrap() };
            let [chosen, hierarchy, halving] =
                ["auto", "hierarchy", "halving"].map(|algorithm| simulate(&cluster, algorithm));
            for ((chosen, hierarchy), halving) in chosen.iter().zip(&hierarchy).zip(&halving) {
                let faster = hierarchy.time.min(halving.time);
                let loss = chosen.time.as_secs_f64() / faster.as_secs_f64();
                assert!(loss < MAX_LOSS, "{loss} on {hosts} hosts, {latency:?}: {chosen:?}");
                losses.push(loss);
                *choices.entry(chosen.algorithm.unwrap().to_string()).or_insert(0) += 1;
            }
        }
    }
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    let most = losses.iter().copied().fold(1.0, f64::max);
    println!(
        "the choice takes {mean:.4} times as long in the mean, {most:.3} at most: {choices:?}"
    );
    assert!(mean < MAX_MEAN_LOSS, "{mean}");
    assert!(choices.len() == 2, "one algorithm was chosen everywhere: {choices:?}");
}

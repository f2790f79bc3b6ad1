// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Times of an allreduce across hosts by algorithm, for the table of algorithms.
//!
//! `cargo run --release -p farandole-simulator --example across -- 8` prints milliseconds for hosts
//! of 8 ranks.
#![expect(clippy::print_stdout, reason = "prints a table")]

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_config::Config;
use farandole_simulator::{AllreduceSimulator, SimulatedCluster};

const TENSOR_BYTES: [u64; 7] =
    [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
const COMPARED_ALGORITHMS: [&str; 4] = ["doubling", "pipeline", "hierarchy", "halving"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let local: u32 = std::env::args().nth(1).map_or(Ok(8), |ranks| ranks.parse())?;
    let hosts: Vec<u32> = match std::env::args().nth(2) {
        Some(hosts) => hosts.split(',').map(str::parse).collect::<Result<_, _>>()?,
        None => vec![2, 3, 4, 6, 8, 12, 16, 32, 64],
    };
    for (gigabits, latency) in [(25.0, 20), (100.0, 20), (25.0, 200)] {
        for hosts in &hosts {
            let latency = Duration::from_micros(latency);
            let bandwidth = gigabits * 1e9 / 8.0;
            let cluster = SimulatedCluster {
                bandwidth,
                latency,
                ..SimulatedCluster::new(*hosts, hosts * local)?
            };
            println!(
                "{hosts} hosts of {local}, {gigabits} Gbit/s, {latency:?}: {}",
                COMPARED_ALGORITHMS.join(" ")
            );
            for bytes in TENSOR_BYTES {
                let time = |algorithm: &str| {
                    let config = Config::read(|_| None, &BTreeMap::new());
                    let config = config.map(|config| Config {
                        allreduce_algorithm: algorithm.to_owned(),
                        ..config
                    });
                    let found = AllreduceSimulator::new(&cluster, &config.ok()?)
                        .ok()?
                        .simulate(bytes)
                        .ok()?;
                    Some(format!(
                        "{:10.3}{}",
                        found.time.as_secs_f64() * 1e3,
                        if found.folded { "f" } else { " " }
                    ))
                };
                let is_long = |algorithm: &str| {
                    (bytes > 1 << 20 && algorithm == "doubling")
                        || (hosts * local > 64 && algorithm == "pipeline")
                };
                let cell = |algorithm: &&str| match is_long(algorithm) {
                    true => format!("{:>11}", ""),
                    false => time(algorithm).unwrap_or_else(|| format!("{:>11}", "-")),
                };
                let cells: Vec<String> = COMPARED_ALGORITHMS.iter().map(cell).collect();
                println!("{bytes:>10} {}", cells.join(" "));
            }
        }
    }
    Ok(())
}

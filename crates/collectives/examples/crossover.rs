// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Times every algorithm of an allreduce by size, for the table in `crossover.rs`: threads of this
//! process, shared memory within hosts, TCP through the loopback device between them.
//!
//! `cargo run --release -p farandole-collectives --example crossover -- 2,2` prints microseconds
//! for two hosts of two.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "prints a table or stops")]

use std::time::{Duration, Instant};

use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{Harness, Links, Tensor, allreduce, complete};

const TENSOR_SIZES: [usize; 9] =
    [4, 1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20];
const ALGORITHM_NAMES: [&str; 5] = ["direct", "doubling", "pipeline", "hierarchy", "halving"];

fn main() {
    let world = std::env::args().nth(1).unwrap_or_else(|| "2,2".to_owned());
    let world: Vec<usize> = world.split(',').map(|ranks| ranks.parse().unwrap()).collect();
    println!("ranks by host: {world:?}");
    let names = ALGORITHM_NAMES.map(|name| format!("{name:>10}"));
    println!("{:>10} {}", "bytes", names.join(" "));
    let columns = ALGORITHM_NAMES.map(|algorithm| median_times(&world, algorithm));
    for (k, bytes) in TENSOR_SIZES.iter().enumerate() {
        let cells =
            columns.each_ref().map(|column| format!("{:10.1}", column[k].as_secs_f64() * 1e6));
        println!("{bytes:>10} {}", cells.join(" "));
    }
}

/// The median of each size on the first rank.
fn median_times(world: &[usize], algorithm: &str) -> Vec<Duration> {
    let world = Harness::on_hosts(world).over(Links::TwoHosts).ring(4 << 20).algorithms(algorithm);
    let mut times = world.run(|_, mut communicator| {
        let mut time = |bytes: usize| {
            let tensor = Tensor::new(&vec![0; bytes], true);
            let rounds = ((32_usize << 20) / bytes).clamp(5, 200);
            let mut taken: Vec<Duration> = (0..rounds)
                .map(|_| {
                    let start = Instant::now();
                    let sum =
                        allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(&tensor));
                    complete(&mut communicator, sum).unwrap();
                    start.elapsed()
                })
                .collect();
            taken.sort_unstable();
            taken[taken.len() / 2]
        };
        TENSOR_SIZES.map(&mut time).to_vec()
    });
    times.swap_remove(0)
}

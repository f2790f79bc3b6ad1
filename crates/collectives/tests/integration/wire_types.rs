// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `float32` that is a 16-bit float on links: the bits of a cast, a rounded sum and a cast back.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use farandole_collectives::{CollectiveOperation, Communicator, Error, OperationToken};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    ALGORITHMS, Harness, Links, Tensor, allreduce, complete, complete_all, counted, elements,
    oracle, special_elements,
};

const WIRE_OPS: [ReduceOp; 4] = [
    ReduceOp::Bf16WireAverage,
    ReduceOp::Bf16WireSum,
    ReduceOp::F16WireAverage,
    ReduceOp::F16WireSum,
];
const WORLDS: [&[usize]; 8] =
    [&[1], &[3], &[1, 1], &[2, 2], &[1, 3], &[1, 1, 1, 1], &[3, 1, 2], &[2, 2, 2, 2]];
/// None, one, odd, a block of casts and one more, over a unit, several chunks.
const COUNTS: [usize; 8] = [1, 0, 33, 2048, 2049, 3, 700, 40_003];
const FACTORS: [(f64, f64); 3] = [(1.0, 1.0), (0.5, 3.0), (1.0, -0.25)];

fn input(count: usize, rank: usize) -> Vec<u8> {
    special_elements(DataType::F32, count, (rank * 7919 + count) as u64)
}

/// Runs all sizes, alone and fused, and compares them with the oracle.
fn compare_with_oracle(harness: &Harness, world: &[usize], call: oracle::Allreduce) {
    let size: usize = world.iter().sum();
    let expected = COUNTS.map(|count| {
        let inputs: Vec<Vec<u8>> = (0..size).map(|rank| input(count, rank)).collect();
        oracle::allreduce_on(world, call, &inputs)
    });
    harness.run(|rank, mut communicator| {
        let make = |count: usize| Tensor::new(&input(count, rank.index()), count % 2 == 0);
        let (fused, alone) = (COUNTS.map(make), COUNTS.map(make));
        let oracle::Allreduce { dtype, op, prescale, postscale } = call;
        let operation = |tensors: &[Tensor]| {
            let segments = tensors.iter().map(Tensor::segment).collect();
            CollectiveOperation::Allreduce { dtype, op, prescale, postscale, segments }
        };
        let mut operations = vec![operation(&fused)];
        operations.extend(alone.iter().map(|tensor| operation(std::slice::from_ref(tensor))));
        complete_all(&mut communicator, operations).unwrap();
        for (k, expected) in expected.iter().enumerate() {
            for (how, tensor) in [("fused", &fused[k]), ("alone", &alone[k])] {
                oracle::compare(dtype, &tensor.result(), expected).unwrap_or_else(|differs| {
                    panic!("{call:?} on {world:?}, rank {rank}, {} {how}: {differs}", COUNTS[k])
                });
            }
        }
    });
}

#[test]
fn every_algorithm_has_the_bits_of_casts_and_a_rounded_sum() {
    for world in WORLDS {
        for op in WIRE_OPS {
            for (k, algorithms) in ALGORITHMS.into_iter().enumerate() {
                let (prescale, postscale) = FACTORS[k % FACTORS.len()];
                let call = oracle::Allreduce { dtype: DataType::F32, op, prescale, postscale };
                let harness = Harness::on_hosts(world).ring(32 << 10).algorithms(algorithms);
                compare_with_oracle(&harness, world, call);
            }
        }
    }
}

#[test]
fn elements_are_whole_where_sockets_deliver_parts_of_them() {
    for links in [Links::TwoHosts, Links::OnDemand] {
        for world in [&[1, 1][..], &[2, 2], &[1, 1, 1]] {
            for op in [ReduceOp::Bf16WireSum, ReduceOp::F16WireAverage] {
                let harness = Harness::on_hosts(world).over(links);
                compare_with_oracle(&harness, world, oracle::Allreduce::new(DataType::F32, op));
            }
        }
    }
}

#[test]
fn half_of_the_bytes_go_to_other_hosts() {
    let sent = |hosts: &[usize], op| {
        let sent = Arc::new(AtomicUsize::new(0));
        Harness::on_hosts(hosts).run_changed(
            |_, link| counted(link, &sent),
            |rank, mut communicator| {
                let tensor = Tensor::new(&elements(DataType::F32, 300_000, rank.0.into()), true);
                let operation = allreduce(DataType::F32, op, std::slice::from_ref(&tensor));
                complete(&mut communicator, operation).unwrap();
            },
        );
        sent.load(Ordering::Relaxed) as f64
    };
    for hosts in [&[1, 1][..], &[2, 2], &[2, 1, 3]] {
        let share = sent(hosts, ReduceOp::Bf16WireSum) / sent(hosts, ReduceOp::Sum);
        assert!((share - 0.5).abs() < 0.01, "{hosts:?}: {share}");
    }
}

#[test]
fn other_types_than_float32_are_refused() {
    for dtype in DataType::ALL.into_iter().filter(|dtype| *dtype != DataType::F32) {
        Harness::new(1).run(|_, mut communicator| {
            let tensor = Tensor::new(&elements(dtype, 4, 1), true);
            let operation = allreduce(dtype, ReduceOp::Bf16WireSum, std::slice::from_ref(&tensor));
            let refused = communicator.submit_operation(OperationToken(1), operation);
            assert!(matches!(refused, Err(Error::Unsupported { .. })), "{dtype}: {refused:?}");
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations over links that are opened at their first use: each asks for the links that it uses,
//! at both ends, and for no others.
#![expect(clippy::unwrap_used, reason = "tests")]

use farandole_collectives::{CollectiveOperation, HostCommunicator};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    ALGORITHMS, Harness, Links, Register, Tensor, allreduce, complete, complete_all, elements,
    oracle, reducescatter,
};
use farandole_world::Rank;

const WORLDS: [&[usize]; 8] = [
    &[2, 2],
    &[2, 1],
    &[1, 3],
    &[1, 1, 1],
    &[1, 1, 1, 1, 1],
    &[3, 1, 2],
    &[2, 2, 2, 2, 2],
    &[1; 9],
];

fn floats(count: usize, seed: usize) -> Vec<u8> {
    elements(DataType::F32, count, seed as u64)
}

/// The results of many operations of one rank, one after the other in one queue.
fn results(rank: Rank, communicator: &mut HostCommunicator, size: usize) -> Vec<Vec<u8>> {
    let me = rank.index();
    let (mut tensors, mut operations) = (Vec::new(), Vec::new());
    for count in [1, 0, 700, 40_003] {
        for op in [ReduceOp::Average, ReduceOp::RoundedSum, ReduceOp::Adasum] {
            let tensor = Tensor::new(&floats(count, me), count == 700);
            operations.push(allreduce(DataType::F32, op, std::slice::from_ref(&tensor)));
            tensors.push(tensor);
        }
    }
    for root in 0..size {
        for length in [0, 61, 200_003] {
            let tensor = Tensor::new(&elements(DataType::U8, length, me as u64), true);
            operations
                .push(CollectiveOperation::Broadcast { root, segments: vec![tensor.segment()] });
            tensors.push(tensor);
        }
    }
    // Bytes of each member: some have none.
    let rows = |turn: usize, member: usize| [0, 5, 30_000, member * 1000][(member + turn) % 4];
    for turn in 0..4 {
        let counts: Vec<usize> = (0..size).map(|member| rows(turn, member)).collect();
        let input = elements(DataType::U8, counts[me], me as u64);
        let tensor = Tensor::with_output(&input, counts.iter().sum());
        let (segments, bytes) = (vec![tensor.segment()], vec![counts.clone()]);
        operations.push(CollectiveOperation::Allgather { segments, bytes });
        tensors.push(tensor);

        // From one to another, in one direction alone, too.
        let block = |from: usize, to: usize| rows(turn, from * 3 + to);
        let sends: Vec<usize> = (0..size).map(|to| block(me, to)).collect();
        let receives: Vec<usize> = (0..size).map(|from| block(from, me)).collect();
        let input = elements(DataType::U8, sends.iter().sum(), me as u64);
        let tensor = Tensor::with_output(&input, receives.iter().sum());
        operations.push(CollectiveOperation::Alltoall {
            segment: tensor.segment(),
            sends,
            receives,
        });
        tensors.push(tensor);

        let parts: Vec<usize> = counts.iter().map(|bytes| bytes / 4 * 4).collect();
        let tensor = Tensor::with_output(&floats(parts.iter().sum::<usize>() / 4, me), parts[me]);
        let call = oracle::Allreduce::new(DataType::F32, ReduceOp::Sum);
        operations.push(reducescatter(call, std::slice::from_ref(&tensor), vec![parts]));
        tensors.push(tensor);
        operations.push(CollectiveOperation::Barrier);
    }
    complete_all(communicator, operations).unwrap();
    tensors.iter().map(Tensor::result).collect()
}

#[test]
fn every_operation_asks_for_each_link_that_it_uses_at_both_ends() {
    for world in WORLDS {
        let size: usize = world.iter().sum();
        for algorithms in ALGORITHMS {
            let harness = Harness::on_hosts(world).ring(16 << 10).algorithms(algorithms);
            let body = |rank, mut communicator| results(rank, &mut communicator, size);
            let mut register = Register::default();
            let asked = harness.run_changed(|own, link| register.on_demand(own, link), body);
            assert!(asked == harness.run(body), "{algorithms} on {world:?}");
        }
    }
}

#[test]
fn operations_over_connections_that_open_at_their_first_use_have_the_same_results() {
    for world in [&[2, 2][..], &[1, 1, 1], &[3, 1, 2], &[2; 6]] {
        let size: usize = world.iter().sum();
        for algorithms in ["auto", "doubling", "hierarchy", "halving"] {
            let run = |links: Links| {
                let harness =
                    Harness::on_hosts(world).over(links).ring(64 << 10).algorithms(algorithms);
                harness.run(|rank, mut communicator| results(rank, &mut communicator, size))
            };
            assert!(run(Links::OnDemand) == run(Links::Loopback), "{algorithms} on {world:?}");
        }
    }
}

/// The number of ranks of other hosts that each rank asks for a link in one operation.
fn asked(
    hosts: &[usize],
    algorithms: &str,
    operation: impl Fn(usize) -> (Tensor, CollectiveOperation) + Sync,
) -> Vec<usize> {
    let mut register = Register::default();
    let harness = Harness::on_hosts(hosts).ring(64 << 10).algorithms(algorithms);
    let ranks = harness.run_changed(
        |own, link| register.on_demand(own, link),
        |rank, mut communicator| {
            let (_kept, operation) = operation(rank.index());
            complete(&mut communicator, operation).unwrap();
            rank
        },
    );
    ranks.into_iter().map(|rank| register.asked(rank).len()).collect()
}

fn reduced(rank: usize) -> (Tensor, CollectiveOperation) {
    let tensor = Tensor::new(&floats(50_000, rank), false);
    let operation = allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(&tensor));
    (tensor, operation)
}

#[test]
fn an_operation_asks_for_few_links_where_its_algorithm_needs_few() {
    let hosts = [2; 8];
    assert_eq!(asked(&hosts, "direct", reduced), [14; 16]);
    assert_eq!(asked(&hosts, "hierarchy", reduced), [7; 16]);
    assert_eq!(asked(&hosts, "halving", reduced), [3; 16]);
    // The first rank of each host doubles.
    assert_eq!(asked(&hosts, "doubling", reduced), [[3, 0]; 8].concat());
    let nothing = |_: usize| (Tensor::new(&[], true), CollectiveOperation::Barrier);
    assert_eq!(asked(&hosts, "auto", nothing), [6; 16]);
    let sent = |_: usize| {
        let tensor = Tensor::new(&[1], true);
        let segments = vec![tensor.segment()];
        (tensor, CollectiveOperation::Broadcast { root: 0, segments })
    };
    assert_eq!(asked(&hosts, "auto", sent), [3, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0]);
    // Everybody sends to the rank with the next number alone.
    let passed = |rank: usize| {
        let block = |from: usize| (0..16).map(|to| usize::from(to == (from + 1) % 16)).collect();
        let receives = (0..16).map(|from| usize::from((from + 1) % 16 == rank)).collect();
        let tensor = Tensor::with_output(&[1], 1);
        let segment = tensor.segment();
        (tensor, CollectiveOperation::Alltoall { segment, sends: block(rank), receives })
    };
    assert_eq!(asked(&hosts, "auto", passed), [1; 16]);
}

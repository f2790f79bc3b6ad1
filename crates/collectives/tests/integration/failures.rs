// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A link that breaks (CO-4), and operations that are refused (CO-5).

use farandole_collectives::{
    CollectiveOperation, Communicator, Device, Error, HostCommunicator, OperationToken,
    TensorSegment,
};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{Harness, HostDevice, Tensor, allreduce, complete, elements, run_world};
use farandole_transport::{Error as LinkError, loopback};
use farandole_world::Rank;

#[test]
fn a_cut_link_is_an_error_on_every_rank_and_none_hangs() {
    for size in [2, 3, 4, 5] {
        // Within the greeting, between messages, inside a chunk, late.
        for bytes in [0, 10, 64, 1000, 30_000] {
            for kind in 0..5 {
                let outcomes = Harness::new(size).ring(16 << 10).cut(0, 1, bytes).run(
                    |rank, mut communicator| {
                        let input = elements(DataType::F32, 50_000, rank.index() as u64);
                        let tensor = Tensor::new(&input, true);
                        let gathered = Tensor::with_output(&input, input.len() * size);
                        let operation = match kind {
                            0 => allreduce(
                                DataType::F32,
                                ReduceOp::Sum,
                                std::slice::from_ref(&tensor),
                            ),
                            1 => CollectiveOperation::Broadcast {
                                root: 0,
                                segments: vec![tensor.segment()],
                            },
                            2 => {
                                let bytes = vec![vec![input.len(); size]];
                                CollectiveOperation::Allgather {
                                    segments: vec![gathered.segment()],
                                    bytes,
                                }
                            }
                            3 => {
                                let blocks = vec![input.len() / size; size];
                                let segment = TensorSegment {
                                    input: tensor.segment().input.slice(0, blocks.iter().sum()),
                                    output: gathered.segment().output.slice(0, blocks.iter().sum()),
                                };
                                CollectiveOperation::Alltoall {
                                    segment,
                                    sends: blocks.clone(),
                                    receives: blocks,
                                }
                            }
                            _ => {
                                let mut bytes = vec![0; size];
                                bytes[1] = input.len();
                                let own = tensor.segment();
                                let output = own.output.slice(0, bytes[rank.index()]);
                                CollectiveOperation::Reducescatter {
                                    dtype: DataType::F32,
                                    op: ReduceOp::Sum,
                                    prescale: 1.0,
                                    postscale: 1.0,
                                    segments: vec![TensorSegment { input: own.input, output }],
                                    bytes: vec![bytes],
                                }
                            }
                        };
                        // A barrier reports the loss to members that do not use the link.
                        let outcome = complete(&mut communicator, operation).and_then(|()| {
                            complete(&mut communicator, CollectiveOperation::Barrier)
                        });
                        let again = communicator
                            .submit_operation(OperationToken(9), CollectiveOperation::Barrier);
                        assert_eq!(outcome.is_err(), again.is_err());
                        outcome
                    },
                );
                for (rank, outcome) in outcomes.iter().enumerate() {
                    let lost = Err(Error::Transport(LinkError::PeerLost {
                        rank: Rank(0),
                        host: String::new(),
                        reason: String::new(),
                    }));
                    assert_eq!(
                        std::mem::discriminant(outcome),
                        std::mem::discriminant(&lost),
                        "rank {rank} of {size}, cut after {bytes}, kind {kind}"
                    );
                    assert!(
                        matches!(outcome, Err(Error::Transport(LinkError::PeerLost { .. }))),
                        "rank {rank} of {size}, cut after {bytes}, kind {kind}: {outcome:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_cut_between_or_within_hosts_ends_every_algorithm_everywhere() {
    for world in [&[2, 2][..], &[2, 1], &[1, 1, 1]] {
        for algorithm in ["direct", "doubling", "pipeline", "hierarchy", "halving", "adasum"] {
            let op = if algorithm == "adasum" { ReduceOp::Adasum } else { ReduceOp::Average };
            let rules = if algorithm == "adasum" { "auto" } else { algorithm };
            for (from, to) in [(0, 1), (0, 2), (2, 0)] {
                for bytes in [0, 64, 1000, 30_000] {
                    let world = Harness::on_hosts(world)
                        .ring(16 << 10)
                        .algorithms(rules)
                        .cut(from, to, bytes);
                    let outcomes = world.run(|rank, mut communicator| {
                        let input = elements(DataType::F16, 50_000, rank.index() as u64);
                        let tensor = Tensor::new(&input, true);
                        let mut outcome = Ok(());
                        // Members that do not use the link learn of it in the barrier.
                        for _ in 0..3 {
                            let sum = allreduce(DataType::F16, op, std::slice::from_ref(&tensor));
                            outcome = outcome.and_then(|()| complete(&mut communicator, sum));
                        }
                        outcome.and_then(|()| {
                            complete(&mut communicator, CollectiveOperation::Barrier)
                        })
                    });
                    // No member sends much over a link that an algorithm does not use.
                    let cut = outcomes.iter().any(Result::is_err);
                    for (rank, outcome) in outcomes.iter().enumerate() {
                        let lost =
                            matches!(outcome, Err(Error::Transport(LinkError::PeerLost { .. })));
                        let told = if cut { lost } else { outcome.is_ok() && bytes > 0 };
                        assert!(
                            told,
                            "{algorithm}, {from} to {to} after {bytes}, rank {rank}: {outcome:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_peer_that_finished_and_left_spoils_nothing() {
    for size in [2, 4] {
        for _ in 0..50 {
            run_world(size, |rank, mut communicator| {
                let tensor =
                    Tensor::new(&elements(DataType::F32, 20_000, rank.index() as u64), true);
                let operation =
                    allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(&tensor));
                complete(&mut communicator, operation).unwrap();
                complete(&mut communicator, CollectiveOperation::Barrier).unwrap();
            });
        }
    }
}

#[test]
fn members_that_disagree_about_the_world_get_an_error() {
    let mut mesh = loopback::link_mesh(3, 16 << 10).unwrap();
    // Rank 2 says nothing, and rank 1 does not know of it.
    let _silent = mesh.pop();
    let _forgotten = mesh[1].pop();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(mesh)
            .map(|(rank, links)| {
                scope.spawn(move || {
                    let mut communicator = HostCommunicator::new(Rank(rank), links).unwrap();
                    complete(&mut communicator, CollectiveOperation::Barrier)
                        .unwrap_err()
                        .to_string()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let told = |rank: u32, theirs: u32, own: u32| {
        format!(
            "bad frame from rank {rank}: its communicator says members {theirs} where this one \
             says {own}"
        )
    };
    assert_eq!(outcomes, [told(1, 2, 3), told(0, 3, 2)]);
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_anything_moves() {
    run_world(2, |rank, mut communicator| {
        let four = Tensor::new(&[0; 4], true);
        let uneven = Tensor::with_output(&[0; 4], 8);
        let sum =
            |tensor: &Tensor| allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(tensor));
        let mut refuse = |operation: CollectiveOperation| {
            communicator.submit_operation(OperationToken(1), operation).unwrap_err().to_string()
        };
        let says = "buffers do not fit the operation: ";
        assert_eq!(
            refuse(sum(&uneven)),
            format!("{says}an allreduce of 4 bytes writes to 8 bytes")
        );
        assert_eq!(
            refuse(sum(&Tensor::new(&[0; 5], true))),
            format!("{says}5 bytes are no whole number of float32 elements")
        );
        assert_eq!(
            refuse(allreduce(DataType::Bool, ReduceOp::Average, &[])),
            "Average is not defined for bool"
        );
        let segments = vec![four.segment()];
        assert_eq!(
            refuse(CollectiveOperation::Broadcast { root: 2, segments: segments.clone() }),
            format!("{says}the root of a broadcast among 2 members is 2")
        );
        assert_eq!(
            refuse(CollectiveOperation::Allgather {
                segments: segments.clone(),
                bytes: vec![vec![4]]
            }),
            format!("{says}an allgather among 2 members has sizes for 1")
        );
        assert_eq!(
            refuse(CollectiveOperation::Allgather { segments, bytes: vec![vec![4, 4]] }),
            format!("{says}an allgather of 4 of 8 bytes has an input of 4 and an output of 4")
        );
        let device = HostDevice::new(3, 1);
        let (_memory, buffer) = device.upload(&[0; 4]);
        let on_device = TensorSegment { input: buffer.clone(), output: buffer };
        let operation = CollectiveOperation::Broadcast { root: 0, segments: vec![on_device] };
        assert!(
            refuse(operation)
                .starts_with("device 3 failed: its memory was given to the host communicator")
        );
        assert_eq!(device.device_ordinal(), 3);
        // The communicator is as good as new.
        assert_eq!(communicator.pending_count(), 0);
        complete(&mut communicator, sum(&four))
            .unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    });
}

#[test]
fn links_that_make_no_world_are_refused() {
    let links = |rank: usize| loopback::link_mesh(3, 16 << 10).unwrap().swap_remove(rank);
    let refused = |rank, links| HostCommunicator::new(Rank(rank), links).err().unwrap().to_string();
    let says = "buffers do not fit the operation: ";
    assert_eq!(refused(1, links(0)), format!("{says}rank 1 has a link to itself"));
    let mut twice = links(0);
    twice.extend(links(0));
    assert_eq!(refused(0, twice), format!("{says}two links lead to rank 1"));
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Fusion and kinds of links (CO-1), order (CO-2), rings smaller than tensors (CO-3), and every
//! other operation.

use std::sync::atomic::{AtomicUsize, Ordering};

use farandole_collectives::{CollectiveOperation, Communicator, OperationToken};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    ALGORITHMS, Harness, Links, Tensor, allreduce, complete, complete_all, elements, oracle,
    run_world,
};

/// Boundaries everywhere: empty, one element, odd, over a chunk.
const TENSORS: [usize; 9] = [1, 0, 700, 64, 5000, 3, 12_345, 16, 1];

#[test]
fn a_tensor_has_the_same_bits_alone_and_fused_and_on_every_rank() {
    for (size, ring) in [(2, 16 << 10), (3, 16 << 10), (4, 1 << 20), (5, 32 << 10), (9, 16 << 10)] {
        for dtype in [DataType::F32, DataType::F16, DataType::F64, DataType::I8] {
            let results = Harness::new(size).ring(ring).run(|rank, mut communicator| {
                let make = |k: usize| {
                    let bytes = elements(dtype, TENSORS[k], (rank.index() * 100 + k) as u64);
                    Tensor::new(&bytes, k.is_multiple_of(2))
                };
                let fused: Vec<Tensor> = (0..TENSORS.len()).map(make).collect();
                complete(&mut communicator, allreduce(dtype, ReduceOp::Average, &fused)).unwrap();
                let alone: Vec<Tensor> = (0..TENSORS.len()).map(make).collect();
                for tensor in &alone {
                    let operation =
                        allreduce(dtype, ReduceOp::Average, std::slice::from_ref(tensor));
                    complete(&mut communicator, operation).unwrap();
                }
                let bytes =
                    |tensors: &[Tensor]| tensors.iter().map(Tensor::result).collect::<Vec<_>>();
                assert!(bytes(&fused) == bytes(&alone), "{dtype} of {size}");
                bytes(&fused)
            });
            assert!(results.iter().all(|result| *result == results[0]), "{dtype} of {size}");
        }
    }
}

#[test]
fn a_tensor_larger_than_any_ring_is_reduced() {
    for size in [2, 4] {
        let count = 700_001;
        let inputs: Vec<Vec<u8>> =
            (0..size).map(|rank| elements(DataType::F32, count, rank as u64)).collect();
        let call = oracle::Allreduce::new(DataType::F32, ReduceOp::Sum);
        let expected = oracle::allreduce(call, &inputs);
        Harness::new(size).ring(64 << 10).run(|rank, mut communicator| {
            let tensor = Tensor::new(&inputs[rank.index()], true);
            let operation = allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(&tensor));
            complete(&mut communicator, operation).unwrap();
            oracle::compare(DataType::F32, &tensor.result(), &expected).unwrap();
        });
    }
}

#[test]
fn every_kind_of_link_gives_the_same_bits() {
    for size in [2, 3, 5] {
        let run = |links: Links| {
            Harness::new(size).over(links).ring(64 << 10).run(|rank, mut communicator| {
                let mut results = Vec::new();
                for count in [1, 1000, 60_000] {
                    let input = elements(DataType::F32, count, rank.index() as u64);
                    let summed = Tensor::new(&input, false);
                    let sum =
                        allreduce(DataType::F32, ReduceOp::Average, std::slice::from_ref(&summed));
                    let sent = Tensor::new(&input, true);
                    let broadcast = CollectiveOperation::Broadcast {
                        root: size - 1,
                        segments: vec![sent.segment()],
                    };
                    let gathered = Tensor::with_output(&input, input.len() * size);
                    let bytes = vec![vec![input.len(); size]];
                    let gather = CollectiveOperation::Allgather {
                        segments: vec![gathered.segment()],
                        bytes,
                    };
                    let operations = vec![sum, broadcast, CollectiveOperation::Barrier, gather];
                    complete_all(&mut communicator, operations).unwrap();
                    results.extend([summed, sent, gathered].map(|tensor| tensor.result()));
                }
                results
            })
        };
        let expected = run(Links::Loopback);
        assert!(expected.iter().all(|results| *results == expected[0]));
        for links in [Links::SharedMemory, Links::Tcp, Links::TwoHosts] {
            assert!(run(links) == expected, "{links:?} of {size}");
        }
    }
}

#[test]
fn an_operation_completes_only_when_its_bytes_are_on_their_way() {
    // More than sockets take, in a ring that takes it all.
    let bytes = 48 << 20;
    let reading = std::sync::Barrier::new(2);
    Harness::new(2).over(Links::Tcp).ring(64 << 20).run(|rank, mut communicator| {
        let tensor = Tensor::new(&vec![u8::from(rank.0 == 0); bytes], true);
        complete(&mut communicator, CollectiveOperation::Barrier).unwrap();
        let broadcast =
            CollectiveOperation::Broadcast { root: 0, segments: vec![tensor.segment()] };
        if rank.0 == 0 {
            communicator.submit_operation(OperationToken(1), broadcast).unwrap();
            let mut completed = Vec::new();
            let mut quiet = 0;
            while quiet < 100 {
                quiet =
                    if communicator.make_progress(&mut completed).unwrap() { 0 } else { quiet + 1 };
            }
            let pending = communicator.pending_count();
            reading.wait();
            assert_eq!(pending, 1);
            while communicator.pending_count() > 0 {
                communicator.make_progress(&mut completed).unwrap();
            }
            assert_eq!(completed, [OperationToken(1)]);
        } else {
            reading.wait();
            complete(&mut communicator, broadcast).unwrap();
            assert!(tensor.result().iter().all(|byte| *byte == 1));
        }
    });
}

#[test]
fn bytes_that_sockets_did_not_take_at_once_are_sent_while_all_wait() {
    // More than sockets take, in rings that take it all.
    let count = 12 << 20;
    for algorithm in &ALGORITHMS[1..] {
        let world =
            Harness::on_hosts(&[1, 1]).over(Links::TwoHosts).ring(64 << 20).algorithms(algorithm);
        world.run(|rank, mut communicator| {
            let input: Vec<u8> = (1.5_f32 + rank.0 as f32).to_ne_bytes().repeat(count);
            let tensor = Tensor::new(&input, true);
            let sum = allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(&tensor));
            complete(&mut communicator, sum).unwrap();
            assert!(
                tensor.result() == 4_f32.to_ne_bytes().repeat(count),
                "{algorithm}, rank {rank}"
            );
        });
    }
}

#[test]
fn broadcast_gives_every_member_the_roots_bytes_from_any_root() {
    for size in [1, 2, 3, 4, 5, 8, 11] {
        Harness::new(size).ring(16 << 10).run(|rank, mut communicator| {
            for root in [0, size / 2, size - 1] {
                for lengths in [vec![], vec![0], vec![1], vec![3, 0, 61, 5000], vec![100_003, 9]] {
                    let bytes = |rank: usize| -> Vec<Vec<u8>> {
                        let make = |(k, length): (usize, &usize)| {
                            elements(DataType::U8, *length, (rank * 10 + k) as u64)
                        };
                        lengths.iter().enumerate().map(make).collect()
                    };
                    let tensors: Vec<Tensor> = bytes(rank.index())
                        .iter()
                        .enumerate()
                        .map(|(k, bytes)| Tensor::new(bytes, k.is_multiple_of(2)))
                        .collect();
                    let segments = tensors.iter().map(Tensor::segment).collect();
                    complete(&mut communicator, CollectiveOperation::Broadcast { root, segments })
                        .unwrap();
                    for (tensor, expected) in tensors.iter().zip(bytes(root)) {
                        assert!(
                            tensor.result() == expected,
                            "rank {rank} of {size} from {root}: {lengths:?}"
                        );
                    }
                }
            }
        });
    }
}

#[test]
fn allgather_joins_uneven_parts_in_rank_order() {
    for size in [1, 2, 3, 4, 7, 8] {
        Harness::new(size).ring(16 << 10).run(|rank, mut communicator| {
            // Bytes of member m in tensor k: some have none, some more than a ring.
            let count = |k: usize, m: usize| {
                [(m * 37 + 11) % 100, if m == 1 { 0 } else { m * 20_000 }, 0, 1][k]
            };
            let input =
                |k: usize, m: usize| elements(DataType::U8, count(k, m), (m * 10 + k) as u64);
            for tensors in [vec![0], vec![1], vec![2], vec![0, 1, 2, 3]] {
                let bytes: Vec<Vec<usize>> =
                    tensors.iter().map(|k| (0..size).map(|m| count(*k, m)).collect()).collect();
                let memory: Vec<Tensor> = tensors
                    .iter()
                    .zip(&bytes)
                    .map(|(k, counts)| {
                        Tensor::with_output(&input(*k, rank.index()), counts.iter().sum())
                    })
                    .collect();
                let segments = memory.iter().map(Tensor::segment).collect();
                complete(&mut communicator, CollectiveOperation::Allgather { segments, bytes })
                    .unwrap();
                for (k, tensor) in tensors.iter().zip(&memory) {
                    let inputs: Vec<Vec<u8>> = (0..size).map(|m| input(*k, m)).collect();
                    assert!(
                        tensor.result() == oracle::allgather(&inputs),
                        "rank {rank} of {size}, tensor {k}"
                    );
                }
            }
        });
    }
}

#[test]
fn all_members_leave_a_barrier_after_the_last_one_reached_it() {
    for size in [1, 2, 3, 8, 9, 13] {
        let reached = AtomicUsize::new(0);
        run_world(size, |_, mut communicator| {
            for round in 1..=20 {
                reached.fetch_add(1, Ordering::SeqCst);
                complete(&mut communicator, CollectiveOperation::Barrier).unwrap();
                assert!(reached.load(Ordering::SeqCst) >= round * size);
            }
        });
    }
}

#[test]
fn operations_queued_together_complete_in_order() {
    for size in [2, 3] {
        Harness::new(size).ring(32 << 10).run(|rank, mut communicator| {
            let mut tensors = Vec::new();
            let mut operations = Vec::new();
            for k in 0..60_usize {
                let bytes =
                    elements(DataType::I64, (k * k * 7) % 9000, (rank.index() * 1000 + k) as u64);
                let tensor = Tensor::new(&bytes, true);
                operations.push(match k % 3 {
                    0 => allreduce(DataType::I64, ReduceOp::Max, std::slice::from_ref(&tensor)),
                    1 => CollectiveOperation::Broadcast {
                        root: k % size,
                        segments: vec![tensor.segment()],
                    },
                    _ => CollectiveOperation::Barrier,
                });
                tensors.push(tensor);
            }
            complete_all(&mut communicator, operations).unwrap();
            let call = oracle::Allreduce::new(DataType::I64, ReduceOp::Max);
            for (k, tensor) in tensors.iter().enumerate() {
                let of = |rank: usize| {
                    elements(DataType::I64, (k * k * 7) % 9000, (rank * 1000 + k) as u64)
                };
                let expected = match k % 3 {
                    0 => oracle::allreduce(call, &(0..size).map(of).collect::<Vec<_>>()),
                    1 => of(k % size),
                    _ => of(rank.index()),
                };
                assert!(tensor.result() == expected, "operation {k} on rank {rank} of {size}");
            }
        });
    }
}

#[test]
fn a_world_of_one_completes_at_the_next_progress() {
    run_world(1, |_, mut communicator| {
        let tensor = Tensor::new(&elements(DataType::F32, 100_000, 1), false);
        let operation = allreduce(DataType::F32, ReduceOp::Average, std::slice::from_ref(&tensor));
        communicator.submit_operation(OperationToken(5), operation).unwrap();
        assert_eq!(communicator.pending_count(), 1);
        let mut completed = Vec::new();
        communicator.make_progress(&mut completed).unwrap();
        assert_eq!((completed, communicator.pending_count()), (vec![OperationToken(5)], 0));
        assert_eq!(tensor.result(), elements(DataType::F32, 100_000, 1));
    });
}

#[test]
fn a_set_of_some_ranks_numbers_its_members_in_rank_order() {
    let mut mesh = farandole_transport::loopback::link_mesh(4, 64 << 10).unwrap();
    // Ranks 1 and 3, each with its link to the other alone.
    let links = |mesh: &mut Vec<Vec<_>>, rank: usize, peer: usize| {
        let own: Vec<farandole_transport::Link> = std::mem::take(&mut mesh[rank]);
        own.into_iter().filter(|link| link.peer.index() == peer).collect::<Vec<_>>()
    };
    let ends = [(1_u32, links(&mut mesh, 1, 3)), (3, links(&mut mesh, 3, 1))];
    std::thread::scope(|scope| {
        for (rank, links) in ends {
            scope.spawn(move || {
                let rank = farandole_world::Rank(rank);
                let mut set = farandole_collectives::HostCommunicator::new(rank, links).unwrap();
                assert_eq!((set.member_count(), set.member_index()), (2, usize::from(rank.0 == 3)));
                let tensor = Tensor::new(&[u8::try_from(rank.0).unwrap(); 10], true);
                let operation =
                    allreduce(DataType::U8, ReduceOp::Sum, std::slice::from_ref(&tensor));
                complete(&mut set, operation).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(tensor.result(), [4; 10]);
            });
        }
    });
}

#[test]
fn seventy_members_on_a_host_and_on_several_complete_everything() {
    let size = 70;
    for world in [vec![size], vec![24, 24, 22]] {
        Harness::on_hosts(&world).ring(16 << 10).run(|rank, mut communicator| {
            let me = rank.index();
            let input = |rank: usize, count: usize| vec![u8::try_from(rank % 3).unwrap(); count];
            let sums: Vec<Tensor> =
                [1, 20_000].map(|count| Tensor::new(&input(me, count), true)).into();
            let mut operations: Vec<CollectiveOperation> = sums
                .iter()
                .map(|tensor| allreduce(DataType::U8, ReduceOp::Sum, std::slice::from_ref(tensor)))
                .collect();
            let sent = Tensor::new(&input(me, 5000), true);
            operations
                .push(CollectiveOperation::Broadcast { root: 37, segments: vec![sent.segment()] });
            operations.push(CollectiveOperation::Barrier);
            let swapped = Tensor::with_output(&input(me, 3 * size), 3 * size);
            let blocks = vec![3; size];
            let segment = swapped.segment();
            operations.push(CollectiveOperation::Alltoall {
                segment,
                sends: blocks.clone(),
                receives: blocks.clone(),
            });
            let gathered = Tensor::with_output(&input(me, 3), 3 * size);
            let segments = vec![gathered.segment()];
            operations.push(CollectiveOperation::Allgather { segments, bytes: vec![blocks] });
            complete_all(&mut communicator, operations).unwrap();
            let total = (0..size).map(|rank| u8::try_from(rank % 3).unwrap()).sum::<u8>();
            assert!(
                sums.iter().all(|sum| sum.result().iter().all(|byte| *byte == total)),
                "rank {rank}"
            );
            assert!(sent.result() == input(37, 5000), "rank {rank}");
            let everybody: Vec<u8> = (0..size).flat_map(|rank| input(rank, 3)).collect();
            assert!(swapped.result() == everybody && gathered.result() == everybody, "rank {rank}");
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Worlds of several hosts: every algorithm has the bits of the oracle (CO-1), over every kind of
//! link.

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    ALGORITHMS, Harness, Links, Tensor, allreduce, complete, complete_all, elements, oracle,
    reducescatter,
};

const WORLDS: [&[usize]; 9] = [
    &[2, 2],
    &[2, 1],
    &[1, 3],
    &[1, 1, 1],
    &[1, 1, 1, 1, 1],
    &[3, 1, 2],
    &[2, 2, 2, 2],
    &[1, 4],
    &[4],
];
const OPS: [ReduceOp; 7] = [
    ReduceOp::Average,
    ReduceOp::Sum,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::RoundedAverage,
    ReduceOp::RoundedSum,
];

/// None, few, odd, over a unit, several chunks.
const COUNTS: [usize; 7] = [1, 0, 700, 64, 5001, 3, 40_003];

fn input(dtype: DataType, count: usize, rank: usize) -> Vec<u8> {
    elements(dtype, count, (rank * 7919 + count) as u64)
}

fn inputs(dtype: DataType, count: usize, size: usize) -> Vec<Vec<u8>> {
    (0..size).map(|rank| input(dtype, count, rank)).collect()
}

#[test]
fn every_algorithm_has_the_bits_of_the_oracle_alone_and_fused() {
    for world in WORLDS {
        let size: usize = world.iter().sum();
        for (dtype, op) in [
            (DataType::F32, ReduceOp::Average),
            (DataType::F16, ReduceOp::Average),
            (DataType::Bf16, ReduceOp::RoundedAverage),
        ] {
            let expected: Vec<Vec<u8>> = COUNTS
                .iter()
                .map(|count| {
                    let inputs = inputs(dtype, *count, size);
                    oracle::allreduce_on(world, oracle::Allreduce::new(dtype, op), &inputs)
                })
                .collect();
            for algorithms in ALGORITHMS {
                Harness::on_hosts(world).ring(32 << 10).algorithms(algorithms).run(
                    |rank, mut communicator| {
                        let make = |count: &usize| {
                            let bytes = &inputs(dtype, *count, size)[rank.index()];
                            Tensor::new(bytes, count.is_multiple_of(2))
                        };
                        let fused: Vec<Tensor> = COUNTS.iter().map(make).collect();
                        let alone: Vec<Tensor> = COUNTS.iter().map(make).collect();
                        let mut operations = vec![allreduce(dtype, op, &fused)];
                        operations.extend(
                            alone.iter().map(|tensor| allreduce(dtype, op, std::slice::from_ref(tensor))),
                        );
                        complete_all(&mut communicator, operations).unwrap();
                        for (k, expected) in expected.iter().enumerate() {
                            for (how, tensor) in [("fused", &fused[k]), ("alone", &alone[k])] {
                                oracle::compare(dtype, &tensor.result(), expected).unwrap_or_else(|differs| {
                                panic!("{algorithms} on {world:?}, rank {rank}, {dtype} {k} {how}: \
                                        {differs}")
                            });
                            }
                        }
                    },
                );
            }
        }
    }
}

/// CO-1, for hosts beyond a power of two, too.
#[test]
fn halves_that_are_swapped_have_the_bits_of_the_oracle_on_any_number_of_hosts() {
    let even = (1..=17).flat_map(|hosts| [vec![1; hosts], vec![2; hosts]]);
    let uneven = [vec![5, 2, 2, 1, 1, 3, 2], vec![2, 3, 2, 3, 2], vec![1, 4, 1], vec![3; 6]];
    for world in even.chain(uneven) {
        let size: usize = world.iter().sum();
        for (dtype, op) in [
            (DataType::F32, ReduceOp::Average),
            (DataType::F16, ReduceOp::Sum),
            (DataType::Bf16, ReduceOp::RoundedAverage),
            (DataType::I8, ReduceOp::Average),
            (DataType::F64, ReduceOp::Sum),
            (DataType::F8E4M3, ReduceOp::Sum),
        ] {
            // Several chunks for each member, the last one of an odd length.
            let counts =
                [0, 1, 33, 5001, 150_001 / dtype.element_size() * if size > 8 { 1 } else { 3 }];
            let inputs = counts.map(|count| inputs(dtype, count, size));
            let expected = inputs.each_ref().map(|inputs| {
                oracle::allreduce_on(&world, oracle::Allreduce::new(dtype, op), inputs)
            });
            let harness = Harness::on_hosts(&world).ring(16 << 10).algorithms("halving");
            harness.run(|rank, mut communicator| {
                let make = |inputs: &Vec<Vec<u8>>| Tensor::new(&inputs[rank.index()], false);
                let tensors = inputs.each_ref().map(make);
                let one = |tensor| allreduce(dtype, op, std::slice::from_ref(tensor));
                complete_all(&mut communicator, tensors.iter().map(one).collect()).unwrap();
                for (tensor, (count, expected)) in tensors.iter().zip(counts.iter().zip(&expected))
                {
                    oracle::compare(dtype, &tensor.result(), expected).unwrap_or_else(|differs| {
                        panic!("{world:?}, rank {rank}, {dtype} {count}: {differs}")
                    });
                }
            });
        }
    }
}

#[test]
fn every_type_and_operation_goes_by_hosts() {
    for world in [&[2, 2][..], &[3, 1, 2]] {
        let size: usize = world.iter().sum();
        for algorithms in &ALGORITHMS[1..] {
            Harness::on_hosts(world).ring(32 << 10).algorithms(algorithms).run(
                |rank, mut communicator| {
                    for dtype in DataType::ALL {
                        for op in OPS.into_iter().filter(|op| oracle::is_defined(dtype, *op)) {
                            for (prescale, postscale) in [(1.0, 1.0), (0.5, 3.0)] {
                                if dtype == DataType::Bool && prescale != 1.0 {
                                    continue;
                                }
                                let call = oracle::Allreduce { dtype, op, prescale, postscale };
                                let inputs = inputs(dtype, 1003, size);
                                let tensor = Tensor::new(&inputs[rank.index()], false);
                                let segments = vec![tensor.segment()];
                                let operation = CollectiveOperation::Allreduce {
                                    dtype,
                                    op,
                                    prescale,
                                    postscale,
                                    segments,
                                };
                                complete(&mut communicator, operation).unwrap();
                                let expected = oracle::allreduce_on(world, call, &inputs);
                                oracle::compare(dtype, &tensor.result(), &expected).unwrap_or_else(
                                    |differs| {
                                        panic!(
                                            "{algorithms} on {world:?}, rank {rank}, {call:?}: \
                                        {differs}"
                                        )
                                    },
                                );
                            }
                        }
                    }
                },
            );
        }
    }
}

#[test]
fn all_operations_work_over_shared_memory_and_tcp_together() {
    for world in [&[2, 2][..], &[2, 1], &[1, 1, 1], &[3, 1, 2]] {
        let size: usize = world.iter().sum();
        let run = |links: Links| {
            Harness::on_hosts(world).over(links).ring(64 << 10).run(|rank, mut communicator| {
                let me = rank.index();
                let mut results = Vec::new();
                for count in [1, 1000, 120_000] {
                    let input = elements(DataType::F32, count, me as u64);
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
                    let swapped = Tensor::with_output(&input, input.len() / size * size);
                    let mut segment = swapped.segment();
                    segment.input = segment.input.slice(0, input.len() / size * size);
                    let blocks = vec![input.len() / size; size];
                    let swap = CollectiveOperation::Alltoall {
                        segment,
                        sends: blocks.clone(),
                        receives: blocks,
                    };
                    let parts: Vec<usize> = (0..size)
                        .map(|k| count * (k + 1) / size * 4 - count * k / size * 4)
                        .collect();
                    let scattered = Tensor::with_output(&input, parts[me]);
                    let call = oracle::Allreduce::new(DataType::F32, ReduceOp::Average);
                    let one = std::slice::from_ref(&scattered);
                    let scatter = reducescatter(call, one, vec![parts.clone()]);
                    let operations =
                        vec![sum, broadcast, swap, CollectiveOperation::Barrier, gather, scatter];
                    complete_all(&mut communicator, operations).unwrap();
                    let start: usize = parts[..me].iter().sum();
                    assert!(scattered.result() == summed.result()[start..start + parts[me]]);
                    results.push([summed, sent, gathered].map(|tensor| tensor.result()));
                }
                results
            })
        };
        let expected = run(Links::Loopback);
        assert!(expected.iter().all(|results| *results == expected[0]), "{world:?}");
        for links in [Links::SharedMemory, Links::Tcp, Links::TwoHosts] {
            assert!(run(links) == expected, "{links:?} on {world:?}");
        }
    }
}

#[test]
fn broadcast_reaches_every_host_from_any_root() {
    for world in WORLDS {
        let size: usize = world.iter().sum();
        Harness::on_hosts(world).ring(16 << 10).run(|rank, mut communicator| {
            for root in 0..size {
                for length in [0, 1, 61, 200_003] {
                    let bytes =
                        |rank: usize| elements(DataType::U8, length, (rank * 10 + length) as u64);
                    let tensor = Tensor::new(&bytes(rank.index()), root % 2 == 0);
                    let segments = vec![tensor.segment()];
                    complete(&mut communicator, CollectiveOperation::Broadcast { root, segments })
                        .unwrap();
                    assert!(
                        tensor.result() == bytes(root),
                        "rank {rank} from {root} on {world:?}: {length}"
                    );
                }
            }
        });
    }
}

#[test]
fn allgather_joins_uneven_parts_of_every_host() {
    for world in WORLDS {
        let size: usize = world.iter().sum();
        Harness::on_hosts(world).ring(16 << 10).run(|rank, mut communicator| {
            // Bytes of member m in tensor k: some have none, some more than a ring.
            let count = |k: usize, m: usize| {
                [(m * 37 + 11) % 100, if m == 1 { 0 } else { m * 20_000 }, 0, 1][k]
            };
            let input =
                |k: usize, m: usize| elements(DataType::U8, count(k, m), (m * 10 + k) as u64);
            let bytes: Vec<Vec<usize>> =
                (0..4).map(|k| (0..size).map(|m| count(k, m)).collect()).collect();
            let tensors: Vec<Tensor> = bytes
                .iter()
                .enumerate()
                .map(|(k, counts)| {
                    Tensor::with_output(&input(k, rank.index()), counts.iter().sum())
                })
                .collect();
            let segments = tensors.iter().map(Tensor::segment).collect();
            complete(&mut communicator, CollectiveOperation::Allgather { segments, bytes })
                .unwrap();
            for (k, tensor) in tensors.iter().enumerate() {
                let inputs: Vec<Vec<u8>> = (0..size).map(|m| input(k, m)).collect();
                assert!(
                    tensor.result() == oracle::allgather(&inputs),
                    "rank {rank} on {world:?}, tensor {k}"
                );
            }
        });
    }
}

/// Elements of member m in tensor k: none, few, more than a ring, what fits no unit.
fn part(k: usize, m: usize) -> usize {
    [(m * 37 + 11) % 100, if m == 1 { 0 } else { 3_001 + m }, m % 2, 7_000][k]
}

#[test]
fn reducescatter_joins_on_every_host_before_it_crosses_with_the_bits_of_an_allreduce() {
    for world in WORLDS {
        let size: usize = world.iter().sum();
        for (dtype, op, algorithms) in [
            (DataType::F32, ReduceOp::Average, "auto"),
            (DataType::F16, ReduceOp::Sum, "hierarchy"),
            (DataType::I8, ReduceOp::Average, "hierarchy"),
            (DataType::Bf16, ReduceOp::RoundedSum, "hierarchy"),
            (DataType::F16, ReduceOp::RoundedAverage, "halving"),
        ] {
            let count = |k: usize| (0..size).map(|m| part(k, m)).sum();
            let inputs: Vec<Vec<Vec<u8>>> = (0..4).map(|k| inputs(dtype, count(k), size)).collect();
            let whole: Vec<Vec<u8>> = inputs
                .iter()
                .map(|inputs| {
                    oracle::allreduce_on(world, oracle::Allreduce::new(dtype, op), inputs)
                })
                .collect();
            Harness::on_hosts(world).ring(16 << 10).algorithms(algorithms).run(
                |rank, mut communicator| {
                    let me = rank.index();
                    for tensors in [&[0][..], &[1], &[3], &[0, 1, 2, 3]] {
                        let bytes: Vec<Vec<usize>> = tensors
                            .iter()
                            .map(|k| {
                                (0..size).map(|m| part(*k, m) * dtype.element_size()).collect()
                            })
                            .collect();
                        let made: Vec<Tensor> = tensors
                            .iter()
                            .zip(&bytes)
                            .map(|(k, bytes)| Tensor::with_output(&inputs[*k][me], bytes[me]))
                            .collect();
                        let call = oracle::Allreduce::new(dtype, op);
                        let operation = reducescatter(call, &made, bytes.clone());
                        complete_all(
                            &mut communicator,
                            vec![operation, CollectiveOperation::Barrier],
                        )
                        .unwrap();
                        for ((k, tensor), bytes) in tensors.iter().zip(&made).zip(&bytes) {
                            let start: usize = bytes[..me].iter().sum();
                            oracle::compare(
                                dtype,
                                &tensor.result(),
                                &whole[*k][start..start + bytes[me]],
                            )
                            .unwrap_or_else(|differs| {
                                panic!(
                                    "rank {rank} on {world:?}, {dtype} {k} of {tensors:?}: \
                                        {differs}"
                                )
                            });
                            assert!(tensor.source() == inputs[*k][me], "CO-6");
                        }
                    }
                },
            );
        }
    }
}

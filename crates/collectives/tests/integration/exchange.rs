// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Alltoall and reduce-scatter against the oracle, over every kind of link, with parts uneven and
//! empty.

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    Harness, Links, Tensor, allreduce, complete, complete_all, elements, oracle, reducescatter,
    run_world,
};

const KINDS: [Links; 4] = [Links::Loopback, Links::SharedMemory, Links::Tcp, Links::TwoHosts];

/// Bytes from one member to another: none, few, more than a ring.
fn block_bytes(round: usize, from: usize, to: usize) -> usize {
    match round {
        0 => 0,
        1 => (from * 7 + to * 3) % 5,
        2 if from == 1 => 0,
        2 => (from * 31 + to * 17) % 300 * 100,
        _ => 40_000 + from * 100 + to,
    }
}

fn blocks(round: usize, size: usize) -> Vec<Vec<Vec<u8>>> {
    let block =
        |from, to| elements(DataType::U8, block_bytes(round, from, to), (from * 100 + to) as u64);
    (0..size).map(|from| (0..size).map(|to| block(from, to)).collect()).collect()
}

#[test]
fn alltoall_gives_each_member_its_block_of_each_member() {
    for links in KINDS {
        for size in [1, 2, 3, 5] {
            Harness::new(size).over(links).ring(16 << 10).run(|rank, mut communicator| {
                let me = rank.index();
                for round in 0..4 {
                    let blocks = blocks(round, size);
                    let sends: Vec<usize> = blocks[me].iter().map(Vec::len).collect();
                    let receives: Vec<usize> = blocks.iter().map(|sent| sent[me].len()).collect();
                    let tensor = Tensor::with_output(&blocks[me].concat(), receives.iter().sum());
                    let operation = CollectiveOperation::Alltoall {
                        segment: tensor.segment(),
                        sends,
                        receives,
                    };
                    complete(&mut communicator, operation).unwrap();
                    assert!(
                        tensor.result() == oracle::alltoall(&blocks, me),
                        "rank {rank} of {size} over {links:?}, round {round}"
                    );
                    assert_eq!(tensor.source(), blocks[me].concat());
                }
            });
        }
    }
}

/// Elements of each member's part: even as torch cuts, uneven, with members that have none, all at
/// one.
fn parts(size: usize, shape: usize) -> Vec<usize> {
    (0..size)
        .map(|member| match shape {
            0 => 1000 + usize::from(member < 2),
            1 => member * 37 % 100,
            2 if member.is_multiple_of(2) => 0,
            2 => 5000 * member,
            3 if member + 1 == size => 6000,
            _ => 0,
        })
        .collect()
}

#[test]
fn reducescatter_matches_the_oracle_for_every_type() {
    for size in [1, 2, 3, 4, 7] {
        Harness::new(size).ring(8 << 10).run(|rank, mut communicator| {
            for dtype in DataType::ALL {
                for op in [ReduceOp::Average, ReduceOp::Sum, ReduceOp::Max] {
                    for (prescale, postscale) in [(1.0, 1.0), (0.5, 3.0)] {
                        let scaled_truth = dtype == DataType::Bool && prescale != 1.0;
                        if !oracle::is_defined(dtype, op) || scaled_truth {
                            continue;
                        }
                        let call = oracle::Allreduce { dtype, op, prescale, postscale };
                        let bytes: Vec<usize> = parts(size, 1)
                            .iter()
                            .map(|count| count * dtype.element_size())
                            .collect();
                        let inputs: Vec<Vec<u8>> = (0..size)
                            .map(|k| elements(dtype, parts(size, 1).iter().sum(), k as u64))
                            .collect();
                        let tensor =
                            Tensor::with_output(&inputs[rank.index()], bytes[rank.index()]);
                        let operation =
                            reducescatter(call, std::slice::from_ref(&tensor), vec![bytes.clone()]);
                        complete(&mut communicator, operation).unwrap();
                        let expected = oracle::reducescatter(call, &inputs, &bytes, rank.index());
                        oracle::compare(dtype, &tensor.result(), &expected)
                            .unwrap_or_else(|how| panic!("rank {rank} of {size}, {call:?}: {how}"));
                    }
                }
            }
        });
    }
}

#[test]
fn a_fused_reducescatter_has_the_bits_of_an_allreduce_of_each_tensor() {
    let call = oracle::Allreduce::new(DataType::F16, ReduceOp::Average);
    for links in KINDS {
        for size in [2, 3, 5] {
            Harness::new(size).over(links).ring(16 << 10).run(|rank, mut communicator| {
                let me = rank.index();
                let counts: Vec<Vec<usize>> = (0..4).map(|shape| parts(size, shape)).collect();
                let bytes: Vec<Vec<usize>> = counts
                    .iter()
                    .map(|counts| counts.iter().map(|count| count * 2).collect())
                    .collect();
                let input = |k: usize| {
                    let count = counts[k].iter().sum();
                    elements(DataType::F16, count, (me * 10 + k) as u64)
                };
                let whole: Vec<Tensor> = (0..4).map(|k| Tensor::new(&input(k), false)).collect();
                let cut: Vec<Tensor> =
                    (0..4).map(|k| Tensor::with_output(&input(k), bytes[k][me])).collect();
                let operations = vec![
                    reducescatter(call, &cut, bytes.clone()),
                    allreduce(DataType::F16, ReduceOp::Average, &whole),
                ];
                complete_all(&mut communicator, operations).unwrap();
                for (k, (cut, whole)) in cut.iter().zip(&whole).enumerate() {
                    let start: usize = bytes[k][..me].iter().sum();
                    assert!(
                        cut.result() == whole.result()[start..start + bytes[k][me]],
                        "rank {rank} of {size} over {links:?}, tensor {k}"
                    );
                }
            });
        }
    }
}

#[test]
fn a_reducescatter_may_write_the_own_part_of_its_input() {
    run_world(3, |rank, mut communicator| {
        let bytes = vec![40_000, 8, 20_000];
        let call = oracle::Allreduce::new(DataType::I32, ReduceOp::Sum);
        let inputs: Vec<Vec<u8>> = (0..3).map(|k| elements(DataType::I32, 60_008 / 4, k)).collect();
        let tensor = Tensor::new(&inputs[rank.index()], true);
        let mut segment = tensor.segment();
        segment.output =
            segment.output.slice(bytes[..rank.index()].iter().sum(), bytes[rank.index()]);
        let operation = CollectiveOperation::Reducescatter {
            dtype: call.dtype,
            op: call.op,
            prescale: 1.0,
            postscale: 1.0,
            segments: vec![segment],
            bytes: vec![bytes.clone()],
        };
        complete(&mut communicator, operation).unwrap();
        let start: usize = bytes[..rank.index()].iter().sum();
        let expected = oracle::reducescatter(call, &inputs, &bytes, rank.index());
        let mut all = inputs[rank.index()].clone();
        all[start..start + expected.len()].copy_from_slice(&expected);
        assert!(tensor.result() == all, "rank {rank}");
    });
}

#[test]
fn a_buffer_that_does_not_fit_is_refused_before_a_byte_moves() {
    run_world(2, |rank, mut communicator| {
        use farandole_collectives::{Communicator, OperationToken};
        let says = "buffers do not fit the operation: ";
        let mut refuse = |operation: CollectiveOperation| {
            communicator.submit_operation(OperationToken(1), operation).unwrap_err().to_string()
        };
        let alltoall =
            |tensor: &Tensor, sends: &[usize], receives: &[usize]| CollectiveOperation::Alltoall {
                segment: tensor.segment(),
                sends: sends.to_vec(),
                receives: receives.to_vec(),
            };
        let tensor = Tensor::with_output(&[0; 8], 4);
        assert_eq!(
            refuse(alltoall(&tensor, &[8], &[2, 2])),
            format!("{says}an alltoall among 2 members has sizes for 1 and 2")
        );
        assert_eq!(
            refuse(alltoall(&tensor, &[4, 4], &[4, 4])),
            format!("{says}an alltoall of 8 bytes for 8 has an input of 8 and an output of 4")
        );
        let (sends, receives) = if rank.0 == 0 { ([5, 3], [4, 0]) } else { ([3, 5], [0, 4]) };
        assert_eq!(
            refuse(alltoall(&tensor, &sends, &receives)),
            format!("{says}a member sends itself 5 bytes and receives 4")
        );
        let aliased = Tensor::new(&[0; 8], true);
        assert_eq!(
            refuse(alltoall(&aliased, &[4, 4], &[4, 4])),
            format!("{says}the output of an alltoall overlaps its input")
        );
        let call = oracle::Allreduce::new(DataType::F32, ReduceOp::Sum);
        let mut scatter =
            |tensor: Tensor, bytes: Vec<Vec<usize>>| refuse(reducescatter(call, &[tensor], bytes));
        assert_eq!(
            scatter(Tensor::with_output(&[0; 8], 4), vec![]),
            format!("{says}a reducescatter of 1 tensors has sizes for 0")
        );
        assert_eq!(
            scatter(Tensor::with_output(&[0; 8], 4), vec![vec![8]]),
            format!("{says}a reducescatter among 2 members has sizes for 1")
        );
        assert_eq!(
            scatter(Tensor::with_output(&[0; 8], 4), vec![vec![6, 2]]),
            format!("{says}6 bytes are no whole number of float32 elements")
        );
        assert_eq!(
            scatter(Tensor::with_output(&[0; 8], 8), vec![vec![4, 4]]),
            format!("{says}a reducescatter of 4 of 8 bytes has an input of 8 and an output of 8")
        );
        let aliased = Tensor::new(&[0; 8], true);
        let mut segment = aliased.segment();
        segment.output = segment.output.slice(4 * usize::from(rank.0 == 0), 4);
        let operation = CollectiveOperation::Reducescatter {
            dtype: DataType::F32,
            op: ReduceOp::Sum,
            prescale: 1.0,
            postscale: 1.0,
            segments: vec![segment],
            bytes: vec![vec![4, 4]],
        };
        assert_eq!(
            refuse(operation),
            format!("{says}the output of a reducescatter overlaps the part of another member")
        );
        assert_eq!(communicator.pending_count(), 0);
    });
}

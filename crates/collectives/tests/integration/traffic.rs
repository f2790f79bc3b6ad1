// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Bytes that go between hosts, and the error of those that are saved.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{
    BlockReducer, DataType, HierarchicalOrder, InstructionSet, ReduceOp, ReductionSpec,
};
use farandole_testkit::{
    Harness, Tensor, allreduce, complete, counted, elements, oracle, reducescatter,
};

const COUNT: usize = 300_000;

/// Bytes that all members send to other hosts in one operation, and in the greeting before it.
fn between_hosts(
    hosts: &[usize],
    operation: impl Fn(usize) -> (Tensor, CollectiveOperation) + Sync,
) -> usize {
    let sent = Arc::new(AtomicUsize::new(0));
    Harness::on_hosts(hosts).run_changed(
        |_, link| counted(link, &sent),
        |rank, mut communicator| {
            let (_kept, operation) = operation(rank.index());
            complete(&mut communicator, operation).unwrap();
        },
    );
    sent.load(Ordering::Relaxed)
}

fn reduced(hosts: &[usize], dtype: DataType, op: ReduceOp) -> f64 {
    let sent = between_hosts(hosts, |rank| {
        let tensor = Tensor::new(&elements(dtype, COUNT, rank as u64), true);
        let operation = allreduce(dtype, op, std::slice::from_ref(&tensor));
        (tensor, operation)
    });
    sent as f64
}

#[test]
fn rounded_sums_of_halves_send_half_the_bytes_of_floats_to_other_hosts() {
    for hosts in [&[2, 2][..], &[4, 4], &[2, 1, 3]] {
        let floats = reduced(hosts, DataType::F32, ReduceOp::Sum);
        for dtype in [DataType::F16, DataType::Bf16] {
            let exact = reduced(hosts, dtype, ReduceOp::Sum) / floats;
            let rounded = reduced(hosts, dtype, ReduceOp::RoundedSum) / floats;
            assert!((exact - 0.75).abs() < 0.01, "{dtype} on {hosts:?}: {exact}");
            assert!((rounded - 0.5).abs() < 0.01, "{dtype} on {hosts:?}: {rounded}");
        }
    }
}

#[test]
fn rounded_reduce_scatters_of_halves_send_half_the_bytes_of_floats_to_other_hosts() {
    let hosts = [3, 3];
    let scattered = |dtype: DataType, op| {
        between_hosts(&hosts, |rank| {
            let part = COUNT / 6 * dtype.element_size();
            let tensor = Tensor::with_output(&elements(dtype, COUNT, rank as u64), part);
            let call = oracle::Allreduce::new(dtype, op);
            let operation = reducescatter(call, std::slice::from_ref(&tensor), vec![vec![part; 6]]);
            (tensor, operation)
        }) as f64
    };
    let floats = scattered(DataType::F32, ReduceOp::Sum);
    assert!((scattered(DataType::Bf16, ReduceOp::Sum) / floats - 1.0).abs() < 0.01);
    assert!((scattered(DataType::Bf16, ReduceOp::RoundedSum) / floats - 0.5).abs() < 0.01);
}

fn error(dtype: DataType, op: ReduceOp, hosts: &[usize], inputs: &[Vec<u8>]) -> f64 {
    let members = inputs.len();
    let reduction = ReductionSpec { dtype, op, members, prescale: 1.0, postscale: 1.0 };
    let reducer = BlockReducer::with_order(
        reduction,
        InstructionSet::best_available(),
        Some(Arc::new(HierarchicalOrder::new(hosts))),
    )
    .unwrap();
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut out = vec![0; inputs[0].len()];
    reducer.reduce_blocks(&slices, &mut out);
    oracle::relative_error(dtype, &out, inputs)
}

/// Sums are rounded once on each host besides the result, however many members it has: for numbers
/// without a common sign, where most is lost, both roundings weigh the same.
#[test]
fn rounding_between_hosts_adds_less_than_half_to_the_error_of_the_result() {
    for (hosts, dtype) in [(2, DataType::Bf16), (8, DataType::F16), (64, DataType::Bf16)] {
        let sizes = vec![8; hosts];
        let inputs: Vec<Vec<u8>> =
            (0..hosts * 8).map(|rank| elements(dtype, 2000, rank as u64)).collect();
        let exact = error(dtype, ReduceOp::Sum, &sizes, &inputs);
        let rounded = error(dtype, ReduceOp::RoundedSum, &sizes, &inputs);
        assert!(
            rounded > exact && rounded < 1.5 * exact,
            "{hosts} hosts, {dtype}: {rounded} and {exact}"
        );
    }
}

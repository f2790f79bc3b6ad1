// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Kernels against the oracle, and every instruction path against the plain one (KE-1).
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use farandole_kernels::{
    BlockReducer, DataType, Error, HierarchicalOrder, InstructionSet, ReduceOp, ReductionSpec,
    neutral_element,
};
use farandole_testkit::{elements, oracle, reduce_member_blocks, special_elements};

const OPS: [ReduceOp; 5] =
    [ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
const SCALES: [(f64, f64); 3] = [(1.0, 1.0), (0.5, 3.0), (1.0 / 3.0, -0.25)];

fn reductions(members: usize) -> Vec<ReductionSpec> {
    let mut all = Vec::new();
    for dtype in DataType::ALL {
        for op in OPS.into_iter().filter(|op| oracle::is_defined(dtype, *op)) {
            for (prescale, postscale) in SCALES {
                if dtype != DataType::Bool || prescale == 1.0 {
                    all.push(ReductionSpec { dtype, op, members, prescale, postscale });
                }
            }
        }
    }
    all
}

fn inputs(reduction: &ReductionSpec, count: usize, special: bool) -> Vec<Vec<u8>> {
    let make = if special { special_elements } else { elements };
    (0..reduction.members as u64)
        .map(|member| make(reduction.dtype, count, member * 1000 + 1))
        .collect()
}

fn run(reduction: ReductionSpec, path: InstructionSet, inputs: &[Vec<u8>], skew: usize) -> Vec<u8> {
    // Skewed so that nothing is aligned to more than a byte.
    let skewed: Vec<Vec<u8>> =
        inputs.iter().map(|input| [&vec![0; skew][..], input].concat()).collect();
    let slices: Vec<&[u8]> = skewed.iter().map(|input| &input[skew..]).collect();
    let mut out = vec![0; skew + inputs[0].len()];
    BlockReducer::for_instruction_set(reduction, path)
        .unwrap()
        .reduce_blocks(&slices, &mut out[skew..]);
    out.split_off(skew)
}

#[test]
fn the_baseline_computes_what_the_oracle_does() {
    for members in [1, 2, 3, 4, 5, 9] {
        for reduction in reductions(members) {
            let ReductionSpec { dtype, op, prescale, postscale, .. } = reduction;
            for special in [false, true] {
                let inputs = inputs(&reduction, 1100, special);
                let call = oracle::Allreduce { dtype, op, prescale, postscale };
                let expected = oracle::allreduce(call, &inputs);
                let got = run(reduction, InstructionSet::Baseline, &inputs, 0);
                oracle::compare(dtype, &got, &expected)
                    .unwrap_or_else(|how| panic!("{reduction:?}: {how}"));
            }
        }
    }
}

#[test]
fn every_path_computes_the_bits_of_the_baseline() {
    for path in InstructionSet::ALL.into_iter().filter(|path| path.is_available()) {
        for members in [1, 2, 3, 4, 5] {
            for reduction in reductions(members) {
                for (count, skew) in [(0, 0), (1, 1), (7, 0), (33, 3), (1031, 0), (5000, 1)] {
                    let inputs = inputs(&reduction, count, true);
                    let expected = run(reduction, InstructionSet::Baseline, &inputs, 0);
                    let got = run(reduction, path, &inputs, skew);
                    oracle::compare(reduction.dtype, &got, &expected)
                        .unwrap_or_else(|how| panic!("{path:?} {reduction:?} of {count}: {how}"));
                }
            }
        }
    }
}

#[test]
fn in_place_every_member_gets_the_bits_of_the_baseline() {
    for path in InstructionSet::ALL.into_iter().filter(|path| path.is_available()) {
        for members in [1, 2, 3, 4, 5] {
            for reduction in reductions(members) {
                for (count, skew) in [(0, 0), (7, 1), (1031, 0), (5000, 3)] {
                    let inputs = inputs(&reduction, count, false);
                    let expected = run(reduction, InstructionSet::Baseline, &inputs, 0);
                    let mut skewed: Vec<Vec<u8>> =
                        inputs.iter().map(|input| [&vec![9; skew][..], input].concat()).collect();
                    let mut all: Vec<&mut [u8]> =
                        skewed.iter_mut().map(|input| &mut input[skew..]).collect();
                    BlockReducer::for_instruction_set(reduction, path)
                        .unwrap()
                        .reduce_in_place(&mut all, &mut [0; 4096]);
                    for got in &skewed {
                        assert!(got[skew..] == expected, "{path:?} {reduction:?} of {count}");
                        assert!(got[..skew].iter().all(|byte| *byte == 9));
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_how_a_tensor_is_cut() {
    for reduction in reductions(4) {
        let inputs = inputs(&reduction, 3000, false);
        let size = reduction.dtype.element_size();
        let reducer = BlockReducer::new(reduction).unwrap();
        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let mut whole = vec![0; 3000 * size];
        reducer.reduce_blocks(&slices, &mut whole);
        let mut pieces = vec![0; 3000 * size];
        let mut start = 0;
        for count in [1, 2, 3, 5, 64, 900, 1000, 1025] {
            let range = start * size..(start + count) * size;
            let cut: Vec<&[u8]> = slices.iter().map(|input| &input[range.clone()]).collect();
            reducer.reduce_blocks(&cut, &mut pieces[range]);
            start += count;
        }
        assert_eq!(start, 3000);
        assert!(whole == pieces, "{reduction:?}");
    }
}

/// The partials of hosts, each joined from its members' inputs, and what becomes of them.
fn by_hosts(reducer: &BlockReducer, hosts: &[usize], inputs: &[&[u8]]) -> Vec<u8> {
    let mut rest = inputs;
    let partials: Vec<Vec<u8>> = hosts
        .iter()
        .map(|members| {
            let (own, others) = rest.split_at(*members);
            rest = others;
            let mut partial = vec![0; own[0].len() * reducer.partial_expansion()];
            reducer.reduce_to_partial(own, &mut partial);
            partial
        })
        .collect();
    let partials: Vec<&[u8]> = partials.iter().map(Vec::as_slice).collect();
    let mut out = vec![0; inputs[0].len()];
    reducer.finish_partials(&partials, &mut out);
    out
}

#[test]
fn sums_by_hosts_have_the_bits_of_the_sum_in_one_place() {
    for path in InstructionSet::ALL.into_iter().filter(|path| path.is_available()) {
        for hosts in [&[2, 2][..], &[2, 1], &[1, 2, 2], &[1; 4], &[1; 7], &[3, 1, 2, 2, 1, 1], &[4]]
        {
            let orders = Arc::new(HierarchicalOrder::new(hosts));
            for reduction in reductions(hosts.iter().sum()) {
                let inputs = inputs(&reduction, 1100, true);
                let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                let reducer =
                    BlockReducer::with_order(reduction, path, Some(Arc::clone(&orders))).unwrap();
                let mut whole = vec![0; inputs[0].len()];
                reducer.reduce_blocks(&slices, &mut whole);
                oracle::compare(reduction.dtype, &by_hosts(&reducer, hosts, &slices), &whole)
                    .unwrap_or_else(|how| panic!("{path:?} {reduction:?} on {hosts:?}: {how}"));
                let ReductionSpec { dtype, op, prescale, postscale, .. } = reduction;
                let call = oracle::Allreduce { dtype, op, prescale, postscale };
                oracle::compare(dtype, &whole, &oracle::allreduce_on(hosts, call, &inputs))
                    .unwrap_or_else(|how| panic!("{path:?} {reduction:?} on {hosts:?}: {how}"));
            }
        }
    }
}

#[test]
fn every_half_survives_the_way_through_single_precision() {
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for dtype in [DataType::F16, DataType::Bf16] {
        let reduction =
            ReductionSpec { dtype, op: ReduceOp::Sum, members: 1, prescale: 1.0, postscale: 1.0 };
        for path in InstructionSet::ALL.into_iter().filter(|path| path.is_available()) {
            let got = run(reduction, path, std::slice::from_ref(&halves), 0);
            oracle::compare(dtype, &got, &halves).unwrap();
        }
    }
}

#[test]
fn sums_of_all_pairs_of_eight_bits_are_rounded_as_the_oracle_rounds_them() {
    let pair = |which: u32| {
        (0..=u16::MAX).map(|pair| (pair >> which).to_le_bytes()[0]).collect::<Vec<u8>>()
    };
    let inputs = [pair(0), pair(8)];
    for dtype in [DataType::F8E4M3, DataType::F8E5M2] {
        for op in OPS {
            // Factors that leave few sums on the grid, some subnormal and some beyond it.
            for (prescale, postscale) in
                [(1.0, 1.0), (1.0, 0.3), (0.7, 1e-3), (900.0, 1.0), (-1e30, 1e30)]
            {
                let reduction = ReductionSpec { dtype, op, members: 2, prescale, postscale };
                let call = oracle::Allreduce { dtype, op, prescale, postscale };
                let expected = oracle::allreduce(call, &inputs);
                for path in InstructionSet::ALL.into_iter().filter(|path| path.is_available()) {
                    oracle::compare(dtype, &run(reduction, path, &inputs, 0), &expected)
                        .unwrap_or_else(|how| panic!("{path:?} {reduction:?}: {how}"));
                }
            }
        }
    }
}

#[test]
fn halves_are_rounded_once_after_all_members() {
    // In halves 2048 + 1 is 2048 again; rounded once, 2048 + 1 + 1 is 2050.
    let inputs = [0x6800_u16, 0x3c00, 0x3c00].map(|half| half.to_ne_bytes().to_vec());
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut out = [0; 2];
    reduce_member_blocks(DataType::F16, ReduceOp::Sum, &slices, &mut out, 1.0, 1.0).unwrap();
    assert_eq!(u16::from_ne_bytes(out), 0x6801);
    // In eight bits 16 + 1 is 16 again; rounded once, 16 + 1 + 1 is 18.
    let mut out = [0];
    reduce_member_blocks(
        DataType::F8E4M3,
        ReduceOp::Sum,
        &[&[0x58], &[0x38], &[0x38]],
        &mut out,
        1.0,
        1.0,
    )
    .unwrap();
    assert_eq!(out, [0x59]);
}

#[test]
fn integer_averages_neither_overflow_nor_round() {
    let average = |values: [i64; 3]| {
        let inputs = values.map(|value| value.to_ne_bytes().to_vec());
        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let mut out = [0; 8];
        reduce_member_blocks(DataType::I64, ReduceOp::Average, &slices, &mut out, 1.0, 1.0)
            .unwrap();
        i64::from_ne_bytes(out)
    };
    assert_eq!(average([i64::MAX, i64::MAX, i64::MAX]), i64::MAX);
    assert_eq!(average([-1, -1, 0]), 0);
    assert_eq!(average([(1 << 60) + 1, (1 << 60) + 1, (1 << 60) + 1]), (1 << 60) + 1);
}

#[test]
fn neutral_elements_change_nothing() {
    for dtype in DataType::ALL {
        for op in OPS {
            let Ok(element) = neutral_element(dtype, op) else {
                assert!(!oracle::is_defined(dtype, op), "{op:?} {dtype}");
                continue;
            };
            if op == ReduceOp::Average {
                continue;
            }
            let input = special_elements(dtype, 500, 3);
            let neutral = element[..dtype.element_size()].repeat(500);
            for inputs in [[&input[..], &neutral], [&neutral[..], &input]] {
                let mut out = vec![0; input.len()];
                reduce_member_blocks(dtype, op, &inputs, &mut out, 1.0, 1.0).unwrap();
                oracle::compare(dtype, &out, &input)
                    .unwrap_or_else(|how| panic!("{op:?} {dtype}: {how}"));
            }
        }
    }
}

#[test]
fn undefined_operations_are_refused_by_name() {
    let mut out = [0; 16];
    let input = [0; 16];
    let mut refused = |dtype, op, scale| {
        reduce_member_blocks(dtype, op, &[&input[..]], &mut out, scale, 1.0).unwrap_err()
    };
    assert_eq!(
        refused(DataType::Bool, ReduceOp::Average, 1.0).to_string(),
        "Average is not defined for bool"
    );
    assert!(matches!(refused(DataType::C64, ReduceOp::Min, 1.0), Error::Unsupported { .. }));
    assert!(matches!(refused(DataType::F32, ReduceOp::Adasum, 1.0), Error::Unsupported { .. }));
    assert!(matches!(refused(DataType::F8E5M2, ReduceOp::Adasum, 1.0), Error::Unsupported { .. }));
    assert!(neutral_element(DataType::F8E4M3, ReduceOp::Adasum).is_err());
    assert!(matches!(refused(DataType::Bool, ReduceOp::Sum, 2.0), Error::Shape { .. }));
}

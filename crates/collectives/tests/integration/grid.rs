// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce over every type, operation, size and factor, against the oracle (CO-1, CO-6).
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::OnceLock;

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{Harness, Tensor, complete, elements, oracle};

const OPS: [ReduceOp; 5] =
    [ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
const SCALES: [(f64, f64); 3] = [(1.0, 1.0), (0.5, 3.0), (1.0, -0.25)];
/// Small, so that chunks are of 2 KiB and wrap around often.
const RING: usize = 16 << 10;

struct Case {
    call: oracle::Allreduce,
    count: usize,
    expected: OnceLock<Vec<u8>>,
}

impl Case {
    fn input(&self, rank: usize) -> Vec<u8> {
        elements(self.call.dtype, self.count, (rank * 7919 + self.count) as u64)
    }
}

/// None, one, two, odd, just over what goes in one hop, several chunks.
fn counts(size: usize, dtype: DataType) -> [usize; 6] {
    [0, 1, 2, 17, RING / dtype.element_size() + 3, (5 * 1024 * size + 100) / dtype.element_size()]
}

fn cases(size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DataType::ALL {
        for op in OPS.into_iter().filter(|op| oracle::is_defined(dtype, *op)) {
            for (prescale, postscale) in SCALES {
                for count in counts(size, dtype) {
                    let scaled = prescale != 1.0 || postscale != 1.0;
                    // Sizes and factors do not meet: the larger sizes go without.
                    if scaled && (dtype == DataType::Bool || count > 17) {
                        continue;
                    }
                    let call = oracle::Allreduce { dtype, op, prescale, postscale };
                    cases.push(Case { call, count, expected: OnceLock::new() });
                }
            }
        }
    }
    cases
}

fn allreduce_grid(size: usize) {
    let cases = cases(size);
    Harness::new(size).ring(RING).run(|rank, mut communicator| {
        for (k, case) in cases.iter().enumerate() {
            let oracle::Allreduce { dtype, op, prescale, postscale } = case.call;
            let (input, in_place) = (case.input(rank.index()), k.is_multiple_of(2));
            let tensor = Tensor::new(&input, in_place);
            let segments = vec![tensor.segment()];
            let operation =
                CollectiveOperation::Allreduce { dtype, op, prescale, postscale, segments };
            complete(&mut communicator, operation).unwrap();
            let expected = case.expected.get_or_init(|| {
                let inputs: Vec<Vec<u8>> = (0..size).map(|rank| case.input(rank)).collect();
                oracle::allreduce(case.call, &inputs)
            });
            oracle::compare(dtype, &tensor.result(), expected).unwrap_or_else(|how| {
                panic!("rank {rank} of {size}, {:?} of {}: {how}", case.call, case.count)
            });
        }
    });
}

#[test]
fn allreduce_alone_matches_the_oracle() {
    allreduce_grid(1);
}

#[test]
fn allreduce_of_2_matches_the_oracle() {
    allreduce_grid(2);
}

#[test]
fn allreduce_of_3_matches_the_oracle() {
    allreduce_grid(3);
}

#[test]
fn allreduce_of_4_matches_the_oracle() {
    allreduce_grid(4);
}

#[test]
fn allreduce_of_7_matches_the_oracle() {
    allreduce_grid(7);
}

#[test]
fn allreduce_of_8_matches_the_oracle() {
    allreduce_grid(8);
}

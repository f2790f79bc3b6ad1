// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Error of sums of 16-bit floats: exact sums against partial sums that are rounded between hosts.
//!
//! `cargo run --release -p farandole-kernels --example rounding` prints the root mean square of
//! the error, relative to the root mean square of the sum: for inputs of both signs, and for inputs
//! of one sign.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "prints a table or stops")]

use std::sync::Arc;

use farandole_kernels::{
    BlockReducer, DataType, HierarchicalOrder, InstructionSet, ReduceOp, ReductionSpec,
};
use farandole_testkit::{elements, oracle};

const ELEMENT_COUNT: usize = 4000;

fn main() {
    println!(
        "{:>6} {:>6} {:>9} {:>6} {:>10} {:>10} {:>6}",
        "hosts", "ranks", "type", "signs", "exact", "rounded", "ratio"
    );
    for (hosts, each) in [(2, 2), (2, 8), (8, 8), (64, 8)] {
        for dtype in [DataType::F16, DataType::Bf16] {
            for signs in [2, 1] {
                let mut inputs: Vec<Vec<u8>> = (0..hosts * each)
                    .map(|rank| elements(dtype, ELEMENT_COUNT, rank as u64))
                    .collect();
                if signs == 1 {
                    // The sign is the first bit of the second byte.
                    inputs
                        .iter_mut()
                        .flat_map(|input| input.iter_mut().skip(1).step_by(2))
                        .for_each(|byte| *byte &= 0x7f);
                }
                let error = |op| rms_error(dtype, op, &vec![each; hosts], &inputs);
                let (exact, rounded) = (error(ReduceOp::Sum), error(ReduceOp::RoundedSum));
                let (ranks, ratio) = (hosts * each, rounded / exact);
                println!(
                    "{hosts:>6} {ranks:>6} {:>9} {signs:>6} {exact:>10.2e} {rounded:>10.2e} \
                     {ratio:>6.2}",
                    dtype.name()
                );
            }
        }
    }
}

fn rms_error(dtype: DataType, op: ReduceOp, hosts: &[usize], inputs: &[Vec<u8>]) -> f64 {
    let reduction =
        ReductionSpec { dtype, op, members: inputs.len(), prescale: 1.0, postscale: 1.0 };
    let reducer = BlockReducer::with_order(
        reduction,
        InstructionSet::best_available(),
        Some(Arc::new(HierarchicalOrder::new(hosts))),
    )
    .unwrap();
    let mut out = vec![0; inputs[0].len()];
    reducer.reduce_blocks(&inputs.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut out);
    oracle::relative_error(dtype, &out, inputs)
}

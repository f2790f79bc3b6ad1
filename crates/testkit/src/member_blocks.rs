// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A reduction in one call.

use farandole_kernels::{BlockReducer, DataType, ReduceOp, ReductionSpec};

/// Reduces one block per member into `out`.
///
/// # Errors
/// Like [`BlockReducer::new`].
///
/// # Panics
/// When lengths differ.
pub fn reduce_member_blocks(
    dtype: DataType,
    op: ReduceOp,
    inputs: &[&[u8]],
    out: &mut [u8],
    prescale: f64,
    postscale: f64,
) -> farandole_kernels::Result<()> {
    let reducer =
        BlockReducer::new(ReductionSpec { dtype, op, members: inputs.len(), prescale, postscale })?;
    assert!(inputs.iter().all(|input| input.len() == out.len()), "blocks of one length");
    reducer.reduce_blocks(inputs, out);
    Ok(())
}

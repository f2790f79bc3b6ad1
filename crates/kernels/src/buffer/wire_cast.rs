// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Casts between the `float32` of tensors and the 16-bit floats of links, block by block.

use crate::{BlockReducer, DataType, Error, ReduceOp, ReductionSpec, Result};

/// Cast of `float32` in memory to a 16-bit float on links, and back.
///
/// Casts to 16 bits round to nearest even, so that a finite value beyond the range of the wire type
/// becomes infinite. Infinities stay as they are, and a NaN stays a NaN. Casts back are exact.
pub(super) struct WireCast {
    /// The reduction of one input: its elements have the wire type, its accumulators are `float32`.
    single_input: BlockReducer,
}

impl WireCast {
    /// # Errors
    /// `Unsupported` when `wire` is neither `Bf16` nor `F16`.
    pub(super) fn new(wire: DataType) -> Result<Self> {
        if !matches!(wire, DataType::Bf16 | DataType::F16) {
            return Err(Error::Unsupported { op: ReduceOp::Sum, dtype: wire });
        }
        let (op, members, prescale, postscale) = (ReduceOp::Sum, 1, 1.0, 1.0);
        let reduction = ReductionSpec { dtype: wire, op, members, prescale, postscale };
        Ok(Self { single_input: BlockReducer::new(reduction)? })
    }

    /// Casts `float32` to the wire type.
    pub(super) fn narrow(&self, floats: &[u8], wire: &mut [u8]) {
        self.single_input.finish_accumulators(floats, wire);
    }

    /// Casts the wire type to `float32`.
    pub(super) fn widen(&self, wire: &[u8], floats: &mut [u8]) {
        self.single_input.accumulate_inputs(&[wire], floats);
    }
}

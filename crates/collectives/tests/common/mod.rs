// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors of tests.

use farandole_collectives::{DataType, Memory, Operation, ReduceOp, Segment};
use farandole_testkit::{contents, filled};

/// A tensor's memory: where it is read and, elsewhere unless in place, where it is written.
pub(crate) struct Tensor {
    input: Memory,
    output: Memory,
}

impl Tensor {
    /// Reads these bytes and writes as many.
    pub(crate) fn new(bytes: &[u8], in_place: bool) -> Self {
        let input = filled(bytes);
        let output = if in_place { input.clone() } else { filled(&vec![0xa5; bytes.len()]) };
        Self { input, output }
    }

    /// Reads these bytes and writes `output` bytes.
    pub(crate) fn into_size(bytes: &[u8], output: usize) -> Self {
        Self { input: filled(bytes), output: filled(&vec![0xa5; output]) }
    }

    pub(crate) fn segment(&self) -> Segment {
        Segment { input: self.input.buffer(), output: self.output.buffer() }
    }

    pub(crate) fn result(&self) -> Vec<u8> {
        contents(&self.output)
    }
}

/// An allreduce without factors.
pub(crate) fn allreduce(dtype: DataType, op: ReduceOp, tensors: &[Tensor]) -> Operation {
    let segments = tensors.iter().map(Tensor::segment).collect();
    Operation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments }
}

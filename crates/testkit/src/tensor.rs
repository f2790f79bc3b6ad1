// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors of tests.

use farandole_collectives::{CollectiveOperation, TensorSegment};
use farandole_kernels::{DataType, HostMemory, ReduceOp};

use crate::{contents, filled, oracle};

/// The content of an output before anything is written to it.
const UNTOUCHED: u8 = 0xa5;

/// A tensor's memory: where it is read and, elsewhere unless in place, where it is written.
#[derive(Debug)]
pub struct Tensor {
    input: HostMemory,
    output: HostMemory,
}

impl Tensor {
    /// Reads these bytes and writes as many.
    pub fn new(bytes: &[u8], in_place: bool) -> Self {
        let input = filled(bytes);
        let output = if in_place { input.clone() } else { filled(&vec![UNTOUCHED; bytes.len()]) };
        Self { input, output }
    }

    /// Reads these bytes and writes `output` bytes.
    pub fn with_output(bytes: &[u8], output: usize) -> Self {
        Self { input: filled(bytes), output: filled(&vec![UNTOUCHED; output]) }
    }

    /// Its part in an operation.
    pub fn segment(&self) -> TensorSegment {
        TensorSegment { input: self.input.as_buffer(), output: self.output.as_buffer() }
    }

    /// The present content of its input.
    pub fn source(&self) -> Vec<u8> {
        contents(&self.input)
    }

    /// The present content of its output.
    pub fn result(&self) -> Vec<u8> {
        contents(&self.output)
    }
}

/// An allreduce of these tensors, fused, without factors.
pub fn allreduce(dtype: DataType, op: ReduceOp, tensors: &[Tensor]) -> CollectiveOperation {
    let segments = tensors.iter().map(Tensor::segment).collect();
    CollectiveOperation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments }
}

/// A reduce-scatter of these tensors, fused. `bytes` has each member's part of each tensor.
pub fn reducescatter(
    call: oracle::Allreduce,
    tensors: &[Tensor],
    bytes: Vec<Vec<usize>>,
) -> CollectiveOperation {
    let oracle::Allreduce { dtype, op, prescale, postscale } = call;
    let segments = tensors.iter().map(Tensor::segment).collect();
    CollectiveOperation::Reducescatter { dtype, op, prescale, postscale, segments, bytes }
}

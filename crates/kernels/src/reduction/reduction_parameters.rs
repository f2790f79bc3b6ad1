// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parameters of a reduction, and the instructions of its kernel.

use std::sync::OnceLock;

use crate::{DataType, ReduceOp};

/// Instruction set of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InstructionSet {
    /// Instructions that every processor of the architecture has.
    Baseline,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, in addition to AVX2 and F16C.
    Avx512,
}

impl InstructionSet {
    /// All instruction sets.
    pub const ALL: [Self; 3] = [Self::Baseline, Self::Avx2, Self::Avx512];

    /// Returns whether this processor has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Returns the widest instruction set of this processor.
    pub fn best_available() -> Self {
        static BEST_AVAILABLE: OnceLock<InstructionSet> = OnceLock::new();
        *BEST_AVAILABLE.get_or_init(|| {
            Self::ALL.into_iter().rev().find(|path| path.is_available()).unwrap_or(Self::Baseline)
        })
    }
}

/// Parameters of a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReductionSpec {
    /// Element type.
    pub dtype: DataType,
    /// The operation that combines elements.
    pub op: ReduceOp,
    /// Number of inputs.
    pub members: usize,
    /// Factor of every input.
    pub prescale: f64,
    /// Factor of the result.
    pub postscale: f64,
}

/// Content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockForm {
    /// Elements, as in tensors.
    Element,
    /// Accumulators: the inputs are scaled and combined, the result is not scaled.
    Partial,
    /// Accumulators that are rounded to elements.
    Rounded,
}

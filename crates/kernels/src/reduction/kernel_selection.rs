// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Selection of the kernel of a reduction.

use super::native_elements::{
    DirectReduction, FloatElement, LogicalAnd, LogicalOr, Max, Mean, Min, NativeElement, Product,
    ReductionOperator, Sum,
};
use super::reduction_order::ReductionOrder;
use super::reduction_parameters::{BlockForm, InstructionSet, ReductionSpec};
use super::staged::{
    ElementFormat, NativeFormat, ScaleFactors, StagedKernel, StagedReduction, WideIntegerFormat,
};
use super::{float8, half};
use crate::{DataType, ReduceOp};

type KernelFunction = unsafe fn(&[&[u8]], &mut [u8], f64);
type TreeKernelFunction = unsafe fn(&ReductionOrder, &[&[u8]], &mut [u8], f64);
type InPlaceKernelFunction = unsafe fn(&mut [&mut [u8]], f64) -> bool;

/// Kernel of a reduction.
pub(super) enum ReductionKernel {
    /// One loop over the inputs in sequential order, or a tree of such loops. Accumulators are
    /// elements. The factor is applied to the result of a Sum or a mean of floats.
    Direct {
        run: KernelFunction,
        tree: TreeKernelFunction,
        in_place: InPlaceKernelFunction,
        factor: f64,
    },
    /// Kernel with accumulators of another type, or with scale factors.
    Staged(Box<dyn StagedReduction>),
}

impl ReductionKernel {
    /// Returns the size of an accumulator as a multiple of the size of an element.
    pub(super) fn accumulator_expansion(&self) -> usize {
        match self {
            Self::Direct { .. } => 1,
            Self::Staged(stages) => stages.accumulator_expansion(),
        }
    }

    /// Combines `inputs` into `out`, in `order` or sequentially.
    ///
    /// # Safety
    /// This processor has the instruction set for which the kernel was chosen.
    pub(super) unsafe fn reduce_blocks(
        &self,
        from: BlockForm,
        to: BlockForm,
        order: Option<&ReductionOrder>,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        match self {
            Self::Direct { run, tree, factor, .. } => {
                // A partial is combined further, so it must not be scaled yet.
                let factor = if to == BlockForm::Element { *factor } else { 1.0 };
                // SAFETY: the caller's promise.
                unsafe {
                    match order {
                        Some(order) if !order.is_sequential() => tree(order, inputs, out, factor),
                        _ => run(inputs, out, factor),
                    }
                }
            }
            // SAFETY: the caller's promise.
            Self::Staged(stages) => unsafe { stages.reduce_blocks(from, to, order, inputs, out) },
        }
    }

    /// Combines the elements sequentially and writes the result into all inputs. Returns false, and
    /// changes nothing, if this kernel cannot do that in one pass.
    ///
    /// # Safety
    /// Like [`reduce_blocks`](Self::reduce_blocks).
    pub(super) unsafe fn reduce_in_place(&self, all: &mut [&mut [u8]]) -> bool {
        match self {
            // SAFETY: the caller's promise.
            Self::Direct { in_place, factor, .. } => unsafe { in_place(all, *factor) },
            // Stages need separate blocks for their accumulators.
            Self::Staged(_) => false,
        }
    }
}

macro_rules! compiled_for {
    ($name:ident, $($features:literal)?) => {
        mod $name {
            use super::{DirectReduction, ReductionOperator, NativeElement, ReductionOrder};

            $(#[target_feature(enable = $features)])?
            pub(super) fn run<T: NativeElement, J: ReductionOperator<T>>(inputs: &[&[u8]], out: &mut [u8], factor: f64) {
                DirectReduction::<T, J>::run(inputs, out, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn tree<T: NativeElement, J: ReductionOperator<T>>(
                order: &ReductionOrder,
                inputs: &[&[u8]],
                out: &mut [u8],
                factor: f64,
            ) {
                DirectReduction::<T, J>::run_in_tree_order(order, inputs, out, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn in_place<T: NativeElement, J: ReductionOperator<T>>(all: &mut [&mut [u8]], factor: f64) -> bool {
                DirectReduction::<T, J>::run_in_place(all, factor)
            }
        }
    };
}

compiled_for!(baseline,);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2");
// BW has the operations on 8 and 16 bits, DQ the product of 64-bit integers, VL the short vectors
// at the end of a loop.
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx2,avx512f,avx512bw,avx512dq,avx512vl");

fn direct_kernel<T: NativeElement, J: ReductionOperator<T>>(
    path: InstructionSet,
    factor: f64,
) -> ReductionKernel {
    let (run, tree, in_place): (KernelFunction, TreeKernelFunction, InPlaceKernelFunction) =
        match path {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => (avx2::run::<T, J>, avx2::tree::<T, J>, avx2::in_place::<T, J>),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                (avx512::run::<T, J>, avx512::tree::<T, J>, avx512::in_place::<T, J>)
            }
            _ => (baseline::run::<T, J>, baseline::tree::<T, J>, baseline::in_place::<T, J>),
        };
    ReductionKernel::Direct { run, tree, in_place, factor }
}

fn staged_kernel<F: ElementFormat, J: ReductionOperator<F::Acc>>(
    path: InstructionSet,
    factors: ScaleFactors,
) -> ReductionKernel {
    ReductionKernel::Staged(Box::new(StagedKernel::new::<F, J>(path, factors)))
}

/// Returns the kernel of a reduction without rounding between hosts; `None` if the reduction is not
/// defined.
pub(super) fn choose_kernel(
    reduction: &ReductionSpec,
    path: InstructionSet,
) -> Option<ReductionKernel> {
    let kind = KernelVariant {
        is_unscaled: reduction.prescale == 1.0 && reduction.postscale == 1.0,
        path,
    };
    match reduction.dtype {
        DataType::U8 => integer_kernel::<u8, u8, i64>(reduction, kind),
        DataType::I8 => integer_kernel::<i8, u8, i64>(reduction, kind),
        DataType::U16 => integer_kernel::<u16, u16, i64>(reduction, kind),
        DataType::I16 => integer_kernel::<i16, u16, i64>(reduction, kind),
        DataType::U32 => integer_kernel::<u32, u32, i64>(reduction, kind),
        DataType::I32 => integer_kernel::<i32, u32, i64>(reduction, kind),
        DataType::U64 => integer_kernel::<u64, u64, i128>(reduction, kind),
        DataType::I64 => integer_kernel::<i64, u64, i128>(reduction, kind),
        DataType::F16 => f16_kernel(reduction, kind),
        DataType::Bf16 => float_kernel::<half::Bf16Format>(reduction, kind),
        DataType::F8E4M3 => float_kernel::<float8::E4M3>(reduction, kind),
        DataType::F8E5M2 => float_kernel::<float8::E5M2>(reduction, kind),
        DataType::F32 => native_float_kernel::<f32>(reduction, kind),
        DataType::F64 => native_float_kernel::<f64>(reduction, kind),
        DataType::Bool => match reduction.op {
            ReduceOp::Sum | ReduceOp::Max => Some(direct_kernel::<u8, LogicalOr>(path, 1.0)),
            ReduceOp::Product | ReduceOp::Min => Some(direct_kernel::<u8, LogicalAnd>(path, 1.0)),
            ReduceOp::Average
            | ReduceOp::Adasum
            | ReduceOp::RoundedAverage
            | ReduceOp::RoundedSum => None,
        },
        // A complex sum is the sum of the parts, so the kernel of floats serves with two numbers an
        // element.
        DataType::C64 => {
            require_complex_op(reduction).and_then(|()| native_float_kernel::<f32>(reduction, kind))
        }
        DataType::C128 => {
            require_complex_op(reduction).and_then(|()| native_float_kernel::<f64>(reduction, kind))
        }
    }
}

/// Properties by which a kernel is chosen.
#[derive(Clone, Copy)]
struct KernelVariant {
    /// Whether there are no scale factors, so that one loop is enough.
    is_unscaled: bool,
    path: InstructionSet,
}

/// Returns `Some` if the reduction treats real and imaginary parts separately, as complex types
/// require.
fn require_complex_op(reduction: &ReductionSpec) -> Option<()> {
    matches!(reduction.op, ReduceOp::Sum | ReduceOp::Average).then_some(())
}

fn scale_factors(reduction: &ReductionSpec) -> ScaleFactors {
    let mean = (reduction.op == ReduceOp::Average).then_some(reduction.members);
    ScaleFactors { prescale: reduction.prescale, postscale: reduction.postscale, mean }
}

/// Returns the kernel of an integer reduction. Wrapping Sum and Product have the same bits for both
/// signs, so both use the unsigned type `U`.
fn integer_kernel<T, U, A>(
    reduction: &ReductionSpec,
    kind: KernelVariant,
) -> Option<ReductionKernel>
where
    T: NativeElement,
    U: NativeElement,
    A: NativeElement,
    NativeFormat<T>: ElementFormat<Acc = T>,
    WideIntegerFormat<T, A>: ElementFormat<Acc = A>,
{
    let (factors, path) = (scale_factors(reduction), kind.path);
    Some(match (reduction.op, kind.is_unscaled) {
        (ReduceOp::Sum, true) => direct_kernel::<U, Sum>(path, 1.0),
        (ReduceOp::Product, true) => direct_kernel::<U, Product>(path, 1.0),
        (ReduceOp::Min, true) => direct_kernel::<T, Min>(path, 1.0),
        (ReduceOp::Max, true) => direct_kernel::<T, Max>(path, 1.0),
        (ReduceOp::Average, _) => staged_kernel::<WideIntegerFormat<T, A>, Sum>(path, factors),
        (ReduceOp::Sum, false) => staged_kernel::<NativeFormat<T>, Sum>(path, factors),
        (ReduceOp::Product, false) => staged_kernel::<NativeFormat<T>, Product>(path, factors),
        (ReduceOp::Min, false) => staged_kernel::<NativeFormat<T>, Min>(path, factors),
        (ReduceOp::Max, false) => staged_kernel::<NativeFormat<T>, Max>(path, factors),
        (ReduceOp::Adasum | ReduceOp::RoundedAverage | ReduceOp::RoundedSum, _) => return None,
    })
}

fn native_float_kernel<T: FloatElement>(
    reduction: &ReductionSpec,
    kind: KernelVariant,
) -> Option<ReductionKernel>
where
    NativeFormat<T>: ElementFormat<Acc = T>,
{
    // Dividing by a power of two gives the same bits as multiplying by its inverse.
    let (inverse, path) = (1.0 / reduction.members as f64, kind.path);
    Some(match reduction.op {
        ReduceOp::Sum if kind.is_unscaled => direct_kernel::<T, Sum>(path, 1.0),
        ReduceOp::Average if kind.is_unscaled && reduction.members.is_power_of_two() => {
            // A multiplication is faster than a division.
            direct_kernel::<T, Sum>(path, inverse)
        }
        ReduceOp::Average if kind.is_unscaled => {
            direct_kernel::<T, Mean>(path, reduction.members as f64)
        }
        ReduceOp::Product if kind.is_unscaled => direct_kernel::<T, Product>(path, 1.0),
        ReduceOp::Min if kind.is_unscaled => direct_kernel::<T, Min>(path, 1.0),
        ReduceOp::Max if kind.is_unscaled => direct_kernel::<T, Max>(path, 1.0),
        _ => return float_kernel::<NativeFormat<T>>(reduction, kind),
    })
}

fn float_kernel<F: ElementFormat>(
    reduction: &ReductionSpec,
    kind: KernelVariant,
) -> Option<ReductionKernel> {
    let (factors, path) = (scale_factors(reduction), kind.path);
    Some(match reduction.op {
        ReduceOp::Sum | ReduceOp::Average => staged_kernel::<F, Sum>(path, factors),
        ReduceOp::Product => staged_kernel::<F, Product>(path, factors),
        ReduceOp::Min => staged_kernel::<F, Min>(path, factors),
        ReduceOp::Max => staged_kernel::<F, Max>(path, factors),
        ReduceOp::Adasum | ReduceOp::RoundedAverage | ReduceOp::RoundedSum => return None,
    })
}

fn f16_kernel(reduction: &ReductionSpec, kind: KernelVariant) -> Option<ReductionKernel> {
    match kind.path {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 | InstructionSet::Avx512 => {
            float_kernel::<half::HardwareF16>(reduction, kind)
        }
        _ => float_kernel::<half::SoftwareF16>(reduction, kind),
    }
}

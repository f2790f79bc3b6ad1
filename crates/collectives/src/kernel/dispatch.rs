// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Selects the function of a reduction.

use super::native::{And, Direct, Join, Max, Mean, Min, Native, Or, Product, Sum};
use super::wide::{Factors, Float, Format, Same, Staged, Stages, Wider};
use super::{Form, Order, Path, Reduction, float8, half};
use crate::{DataType, ReduceOp};

type Run = unsafe fn(&[&[u8]], &mut [u8], f64);
type RunTree = unsafe fn(&Order, &[&[u8]], &mut [u8], f64);
type RunInPlace = unsafe fn(&mut [&mut [u8]], f64) -> bool;

/// A chosen kernel.
pub(super) enum Kernel {
    /// One loop over inputs in a line, or a tree of such loops; accumulators are elements. The
    /// factor finishes the result of a Sum or a mean of floats.
    Direct { run: Run, tree: RunTree, in_place: RunInPlace, factor: f64 },
    /// Through accumulators.
    Staged(Box<dyn Staged>),
}

impl Kernel {
    /// Returns the ratio of an accumulator's bytes to those of an element.
    pub(super) fn expansion(&self) -> usize {
        match self {
            Self::Direct { .. } => 1,
            Self::Staged(stages) => stages.expansion(),
        }
    }

    /// Joins `inputs` in `order`, or one after the other, into `out`.
    ///
    /// # Safety
    /// This processor has the instructions of the path the kernel was chosen for.
    pub(super) unsafe fn run(
        &self,
        from: Form,
        to: Form,
        order: Option<&Order>,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        match self {
            Self::Direct { run, tree, factor, .. } => {
                let factor = if to == Form::Element { *factor } else { 1.0 };
                // SAFETY: the caller's promise.
                unsafe {
                    match order {
                        Some(order) if !order.is_line() => tree(order, inputs, out, factor),
                        _ => run(inputs, out, factor),
                    }
                }
            }
            // SAFETY: the caller's promise.
            Self::Staged(stages) => unsafe { stages.run(from, to, order, inputs, out) },
        }
    }

    /// Joins elements one after the other into all inputs, if this kernel does that in one pass.
    ///
    /// # Safety
    /// That of [`run`](Self::run).
    pub(super) unsafe fn run_in_place(&self, all: &mut [&mut [u8]]) -> bool {
        match self {
            // SAFETY: the caller's promise.
            Self::Direct { in_place, factor, .. } => unsafe { in_place(all, *factor) },
            Self::Staged(_) => false,
        }
    }
}

macro_rules! compiled_for {
    ($name:ident, $($features:literal)?) => {
        mod $name {
            use super::{Direct, Join, Native, Order};

            $(#[target_feature(enable = $features)])?
            pub(super) fn run<T: Native, J: Join<T>>(inputs: &[&[u8]], out: &mut [u8], factor: f64) {
                Direct::<T, J>::run(inputs, out, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn tree<T: Native, J: Join<T>>(
                order: &Order,
                inputs: &[&[u8]],
                out: &mut [u8],
                factor: f64,
            ) {
                Direct::<T, J>::run_tree(order, inputs, out, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn in_place<T: Native, J: Join<T>>(all: &mut [&mut [u8]], factor: f64) -> bool {
                Direct::<T, J>::run_in_place(all, factor)
            }
        }
    };
}

compiled_for!(baseline,);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx2,avx512f,avx512bw,avx512dq,avx512vl");

fn direct<T: Native, J: Join<T>>(path: Path, factor: f64) -> Kernel {
    let (run, tree, in_place): (Run, RunTree, RunInPlace) = match path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => (avx2::run::<T, J>, avx2::tree::<T, J>, avx2::in_place::<T, J>),
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => (avx512::run::<T, J>, avx512::tree::<T, J>, avx512::in_place::<T, J>),
        _ => (baseline::run::<T, J>, baseline::tree::<T, J>, baseline::in_place::<T, J>),
    };
    Kernel::Direct { run, tree, in_place, factor }
}

fn staged<F: Format, J: Join<F::Acc>>(path: Path, factors: Factors) -> Kernel {
    Kernel::Staged(Box::new(Stages::new::<F, J>(path, factors)))
}

/// Returns the kernel of a reduction without rounding between hosts, or nothing where it is not
/// defined.
pub(super) fn choose(reduction: &Reduction, path: Path) -> Option<Kernel> {
    let kind = Kind { plain: reduction.prescale == 1.0 && reduction.postscale == 1.0, path };
    match reduction.dtype {
        DataType::U8 => integer::<u8, u8, i64>(reduction, kind),
        DataType::I8 => integer::<i8, u8, i64>(reduction, kind),
        DataType::U16 => integer::<u16, u16, i64>(reduction, kind),
        DataType::I16 => integer::<i16, u16, i64>(reduction, kind),
        DataType::U32 => integer::<u32, u32, i64>(reduction, kind),
        DataType::I32 => integer::<i32, u32, i64>(reduction, kind),
        DataType::U64 => integer::<u64, u64, i128>(reduction, kind),
        DataType::I64 => integer::<i64, u64, i128>(reduction, kind),
        DataType::F16 => f16(reduction, kind),
        DataType::Bf16 => float::<half::Bf16>(reduction, kind),
        DataType::F8E4M3 => float::<float8::E4M3>(reduction, kind),
        DataType::F8E5M2 => float::<float8::E5M2>(reduction, kind),
        DataType::F32 => native_float::<f32>(reduction, kind),
        DataType::F64 => native_float::<f64>(reduction, kind),
        DataType::Bool => match reduction.op {
            ReduceOp::Sum | ReduceOp::Max => Some(direct::<u8, Or>(path, 1.0)),
            ReduceOp::Product | ReduceOp::Min => Some(direct::<u8, And>(path, 1.0)),
            ReduceOp::Average
            | ReduceOp::Adasum
            | ReduceOp::RoundedAverage
            | ReduceOp::RoundedSum => None,
        },
        DataType::C64 => complex(reduction).and_then(|()| native_float::<f32>(reduction, kind)),
        DataType::C128 => complex(reduction).and_then(|()| native_float::<f64>(reduction, kind)),
    }
}

/// The description of a kernel.
#[derive(Clone, Copy)]
struct Kind {
    /// One loop will do.
    plain: bool,
    path: Path,
}

/// Accepts reductions that act on real and imaginary parts alike.
fn complex(reduction: &Reduction) -> Option<()> {
    matches!(reduction.op, ReduceOp::Sum | ReduceOp::Average).then_some(())
}

fn factors(reduction: &Reduction) -> Factors {
    let mean = (reduction.op == ReduceOp::Average).then_some(reduction.members);
    Factors { prescale: reduction.prescale, postscale: reduction.postscale, mean }
}

/// Sum and Product wrap, which for both signs is the unsigned `U`.
fn integer<T, U, A>(reduction: &Reduction, kind: Kind) -> Option<Kernel>
where
    T: Native,
    U: Native,
    A: Native,
    Same<T>: Format<Acc = T>,
    Wider<T, A>: Format<Acc = A>,
{
    let (factors, path) = (factors(reduction), kind.path);
    Some(match (reduction.op, kind.plain) {
        (ReduceOp::Sum, true) => direct::<U, Sum>(path, 1.0),
        (ReduceOp::Product, true) => direct::<U, Product>(path, 1.0),
        (ReduceOp::Min, true) => direct::<T, Min>(path, 1.0),
        (ReduceOp::Max, true) => direct::<T, Max>(path, 1.0),
        (ReduceOp::Average, _) => staged::<Wider<T, A>, Sum>(path, factors),
        (ReduceOp::Sum, false) => staged::<Same<T>, Sum>(path, factors),
        (ReduceOp::Product, false) => staged::<Same<T>, Product>(path, factors),
        (ReduceOp::Min, false) => staged::<Same<T>, Min>(path, factors),
        (ReduceOp::Max, false) => staged::<Same<T>, Max>(path, factors),
        (ReduceOp::Adasum | ReduceOp::RoundedAverage | ReduceOp::RoundedSum, _) => return None,
    })
}

fn native_float<T: Float>(reduction: &Reduction, kind: Kind) -> Option<Kernel>
where
    Same<T>: Format<Acc = T>,
{
    // Dividing by a power of two and multiplying by its inverse round alike.
    let (inverse, path) = (1.0 / reduction.members as f64, kind.path);
    Some(match reduction.op {
        ReduceOp::Sum if kind.plain => direct::<T, Sum>(path, 1.0),
        ReduceOp::Average if kind.plain && reduction.members.is_power_of_two() => {
            direct::<T, Sum>(path, inverse)
        }
        ReduceOp::Average if kind.plain => direct::<T, Mean>(path, reduction.members as f64),
        ReduceOp::Product if kind.plain => direct::<T, Product>(path, 1.0),
        ReduceOp::Min if kind.plain => direct::<T, Min>(path, 1.0),
        ReduceOp::Max if kind.plain => direct::<T, Max>(path, 1.0),
        _ => return float::<Same<T>>(reduction, kind),
    })
}

fn float<F: Format>(reduction: &Reduction, kind: Kind) -> Option<Kernel> {
    let (factors, path) = (factors(reduction), kind.path);
    Some(match reduction.op {
        ReduceOp::Sum | ReduceOp::Average => staged::<F, Sum>(path, factors),
        ReduceOp::Product => staged::<F, Product>(path, factors),
        ReduceOp::Min => staged::<F, Min>(path, factors),
        ReduceOp::Max => staged::<F, Max>(path, factors),
        ReduceOp::Adasum | ReduceOp::RoundedAverage | ReduceOp::RoundedSum => return None,
    })
}

fn f16(reduction: &Reduction, kind: Kind) -> Option<Kernel> {
    match kind.path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 | Path::Avx512 => float::<half::HardF16>(reduction, kind),
        _ => float::<half::SoftF16>(reduction, kind),
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reductions with accumulators of another type, or with scale factors. A sequence of stages works
//! on one block at a time, in the first-level cache.

use std::marker::PhantomData;

use super::native_elements::{FloatElement, NativeElement, ReductionOperator};
use super::reduction_order::ReductionOrder;
use super::reduction_parameters::{BlockForm, InstructionSet};

/// Format of elements: conversion to accumulators and back.
pub(super) trait ElementFormat: 'static {
    /// Bytes of one element.
    const ELEMENT_BYTES: usize;
    /// Type of the accumulator.
    type Acc: NativeElement + Send + Sync;

    fn widen_to_accumulators(bytes: &[u8], acc: &mut [Self::Acc]);
    fn narrow_from_accumulators(acc: &[Self::Acc], bytes: &mut [u8]);
    /// Multiplies by a factor. A value beyond the range of the element saturates.
    fn scale_accumulators(acc: &mut [Self::Acc], factor: f64);
    /// Divides by the number of members.
    fn divide_by_member_count(acc: &mut [Self::Acc], members: usize);
}

/// Format of elements whose accumulators have the type of the elements.
pub(super) struct NativeFormat<T>(PhantomData<T>);

/// Format of integers with wider accumulators, so that a sum over members cannot overflow before it
/// is divided.
pub(super) struct WideIntegerFormat<T, A>(PhantomData<(T, A)>);

/// The functions of a format whose accumulators are `f32`.
macro_rules! f32_accumulators {
    () => {
        #[inline(always)]
        fn scale_accumulators(acc: &mut [f32], factor: f64) {
            <f32 as FloatElement>::scale_accumulators(acc, factor);
        }

        #[inline(always)]
        fn divide_by_member_count(acc: &mut [f32], members: usize) {
            <f32 as FloatElement>::divide_by_member_count(acc, members);
        }
    };
}
pub(super) use f32_accumulators;

macro_rules! float {
    ($($type:ty, $size:literal;)+) => { $(
        impl ElementFormat for NativeFormat<$type> {
            const ELEMENT_BYTES: usize = $size;
            type Acc = $type;

            #[inline(always)]
            fn widen_to_accumulators(form_bytes: &[u8], acc: &mut [$type]) {
                for (a, b) in acc.iter_mut().zip(<$type as NativeElement>::value_chunks(form_bytes)) {
                    *a = <$type>::load_value(*b);
                }
            }

            #[inline(always)]
            fn narrow_from_accumulators(acc: &[$type], form_bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(<$type as NativeElement>::value_chunks_mut(form_bytes)) {
                    *b = a.store_value();
                }
            }

            #[inline(always)]
            fn scale_accumulators(acc: &mut [$type], factor: f64) {
                <$type as FloatElement>::scale_accumulators(acc, factor);
            }

            #[inline(always)]
            fn divide_by_member_count(acc: &mut [$type], members: usize) {
                <$type as FloatElement>::divide_by_member_count(acc, members);
            }
        }
    )+ };
}

float! { f32, 4; f64, 8; }

macro_rules! narrowed {
    (same, $type:ty, $value:expr) => {
        $value
    };
    (cut, $type:ty, $value:expr) => {{
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a mean fits the type of what it is of"
        )]
        let value = $value as $type;
        value
    }};
}

macro_rules! integer {
    ($($format:ty, $type:ty, $acc:ty, $size:literal, $narrow:ident;)+) => { $(
        impl ElementFormat for $format {
            const ELEMENT_BYTES: usize = $size;
            type Acc = $acc;

            #[inline(always)]
            fn widen_to_accumulators(form_bytes: &[u8], acc: &mut [$acc]) {
                for (a, b) in acc.iter_mut().zip(<$type as NativeElement>::value_chunks(form_bytes)) {
                    *a = <$acc>::from(<$type>::load_value(*b));
                }
            }

            #[inline(always)]
            fn narrow_from_accumulators(acc: &[$acc], form_bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(<$type as NativeElement>::value_chunks_mut(form_bytes)) {
                    *b = narrowed!($narrow, $type, *a).store_value();
                }
            }

            #[inline(always)]
            #[expect(clippy::cast_possible_truncation, reason = "truncates toward zero and \
                                                                 saturates")]
            fn scale_accumulators(acc: &mut [$acc], factor: f64) {
                for a in acc {
                    *a = <$acc>::from((*a as f64 * factor) as $type);
                }
            }

            #[inline(always)]
            fn divide_by_member_count(acc: &mut [$acc], members: usize) {
                // Cannot fail: only an Average divides, and its accumulators have 64 bits or more.
                let Ok(members) = <$acc>::try_from(members) else { return };
                for a in acc {
                    *a /= members;
                }
            }
        }
    )+ };
}

integer! {
    NativeFormat<u8>, u8, u8, 1, same;
    NativeFormat<i8>, i8, i8, 1, same;
    NativeFormat<u16>, u16, u16, 2, same;
    NativeFormat<i16>, i16, i16, 2, same;
    NativeFormat<u32>, u32, u32, 4, same;
    NativeFormat<i32>, i32, i32, 4, same;
    NativeFormat<u64>, u64, u64, 8, same;
    NativeFormat<i64>, i64, i64, 8, same;
    WideIntegerFormat<u8, i64>, u8, i64, 1, cut;
    WideIntegerFormat<i8, i64>, i8, i64, 1, cut;
    WideIntegerFormat<u16, i64>, u16, i64, 2, cut;
    WideIntegerFormat<i16, i64>, i16, i64, 2, cut;
    WideIntegerFormat<u32, i64>, u32, i64, 4, cut;
    WideIntegerFormat<i32, i64>, i32, i64, 4, cut;
    WideIntegerFormat<u64, i128>, u64, i128, 8, cut;
    WideIntegerFormat<i64, i128>, i64, i128, 8, cut;
}

/// Elements per block: accumulators and inputs of the widest type stay in the first-level cache.
const STAGED_BLOCK_ELEMENTS: usize = 512;

type WidenBlock<A> = unsafe fn(&[u8], &mut [A]);
type MergeBlocks<A> = unsafe fn(&mut [A], &[A]);
type NarrowBlock<A> = unsafe fn(&[A], &mut [u8]);
type ScaleBlock<A> = unsafe fn(&mut [A], f64);
type MeanByMemberCount<A> = unsafe fn(&mut [A], usize);

/// Stages of a reduction, each compiled for one instruction set.
pub(super) struct StagedKernel<A> {
    size: usize,
    widen: WidenBlock<A>,
    load: WidenBlock<A>,
    merge: MergeBlocks<A>,
    narrow: NarrowBlock<A>,
    store: NarrowBlock<A>,
    scale: ScaleBlock<A>,
    mean: Option<(MeanByMemberCount<A>, usize)>,
    prescale: f64,
    postscale: f64,
}

/// Factors and divisor of a reduction.
#[derive(Clone, Copy)]
pub(super) struct ScaleFactors {
    pub(super) prescale: f64,
    pub(super) postscale: f64,
    /// Number of members, if the operation is an Average.
    pub(super) mean: Option<usize>,
}

macro_rules! stages {
    ($name:ident, $($features:literal)?) => {
        mod $name {
            use super::{ElementFormat, ReductionOperator, NativeElement};

            $(#[target_feature(enable = $features)])?
            pub(super) fn widen_to_accumulators<F: ElementFormat>(form_bytes: &[u8], acc: &mut [F::Acc]) {
                F::widen_to_accumulators(form_bytes, acc);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn merge_accumulator_blocks<A: Copy, J: ReductionOperator<A>>(acc: &mut [A], other: &[A]) {
                for (a, b) in acc.iter_mut().zip(other) {
                    *a = J::combine_values(*a, *b);
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn load_accumulators<A: NativeElement>(form_bytes: &[u8], acc: &mut [A]) {
                for (a, b) in acc.iter_mut().zip(A::value_chunks(form_bytes)) {
                    *a = A::load_value(*b);
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn store_accumulators<A: NativeElement>(acc: &[A], form_bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(A::value_chunks_mut(form_bytes)) {
                    *b = a.store_value();
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow_from_accumulators<F: ElementFormat>(acc: &[F::Acc], form_bytes: &mut [u8]) {
                F::narrow_from_accumulators(acc, form_bytes);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn scale_accumulators<F: ElementFormat>(acc: &mut [F::Acc], factor: f64) {
                F::scale_accumulators(acc, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn divide_by_member_count<F: ElementFormat>(acc: &mut [F::Acc], members: usize) {
                F::divide_by_member_count(acc, members);
            }
        }
    };
}

stages!(baseline,);
#[cfg(target_arch = "x86_64")]
stages!(avx2, "avx2,f16c");

impl<A: NativeElement> StagedKernel<A> {
    /// Returns the stages of a format. AVX-512 uses the stages of AVX2: the conversions are no
    /// wider, so it would gain nothing.
    pub(super) fn new<F: ElementFormat<Acc = A>, J: ReductionOperator<A>>(
        path: InstructionSet,
        factors: ScaleFactors,
    ) -> Self {
        let ScaleFactors { prescale, postscale, mean } = factors;
        let size = F::ELEMENT_BYTES;
        match path {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::Avx512 => Self {
                size,
                widen: avx2::widen_to_accumulators::<F>,
                load: avx2::load_accumulators::<A>,
                merge: avx2::merge_accumulator_blocks::<A, J>,
                narrow: avx2::narrow_from_accumulators::<F>,
                store: avx2::store_accumulators::<A>,
                scale: avx2::scale_accumulators::<F>,
                mean: mean.map(|members| {
                    (avx2::divide_by_member_count::<F> as MeanByMemberCount<A>, members)
                }),
                prescale,
                postscale,
            },
            _ => Self {
                size,
                widen: baseline::widen_to_accumulators::<F>,
                load: baseline::load_accumulators::<A>,
                merge: baseline::merge_accumulator_blocks::<A, J>,
                narrow: baseline::narrow_from_accumulators::<F>,
                store: baseline::store_accumulators::<A>,
                scale: baseline::scale_accumulators::<F>,
                mean: mean.map(|members| {
                    (baseline::divide_by_member_count::<F> as MeanByMemberCount<A>, members)
                }),
                prescale,
                postscale,
            },
        }
    }
}

/// Reduction in stages, with any type of accumulator.
pub(super) trait StagedReduction: Send + Sync {
    /// Returns the size of an accumulator as a multiple of the size of an element.
    fn accumulator_expansion(&self) -> usize;

    /// Combines `inputs` into `out`, in `order` or sequentially.
    ///
    /// # Safety
    /// This processor has the instruction set for which the stages were compiled.
    unsafe fn reduce_blocks(
        &self,
        from: BlockForm,
        to: BlockForm,
        order: Option<&ReductionOrder>,
        inputs: &[&[u8]],
        out: &mut [u8],
    );
}

impl<A: NativeElement + Send + Sync> StagedKernel<A> {
    fn element_bytes_in_form(&self, form: BlockForm) -> usize {
        match form {
            BlockForm::Element | BlockForm::Rounded => self.size,
            BlockForm::Partial => size_of::<A>(),
        }
    }

    /// # Safety
    /// Like [`StagedReduction::reduce_blocks`].
    unsafe fn read_block(&self, from: BlockForm, bytes: &[u8], into: &mut [A]) {
        // SAFETY: the caller's promise about this processor covers every stage.
        unsafe {
            match from {
                // Partials were scaled when they were computed, so a second prescale would be
                // wrong.
                BlockForm::Partial => (self.load)(bytes, into),
                BlockForm::Rounded => (self.widen)(bytes, into),
                BlockForm::Element => {
                    (self.widen)(bytes, into);
                    if self.prescale != 1.0 {
                        (self.scale)(into, self.prescale);
                    }
                }
            }
        }
    }

    /// # Safety
    /// Like [`StagedReduction::reduce_blocks`].
    unsafe fn write_block(&self, to: BlockForm, acc: &mut [A], bytes: &mut [u8]) {
        // SAFETY: the caller's promise about this processor covers every stage.
        unsafe {
            match to {
                BlockForm::Partial => (self.store)(acc, bytes),
                BlockForm::Rounded => (self.narrow)(acc, bytes),
                BlockForm::Element => {
                    if let Some((mean, members)) = self.mean {
                        // The division comes before the scaling: their order decides the roundings,
                        // and so the bits (KE-1).
                        mean(acc, members);
                    }
                    if self.postscale != 1.0 {
                        (self.scale)(acc, self.postscale);
                    }
                    (self.narrow)(acc, bytes);
                }
            }
        }
    }

    /// Like [`StagedReduction::reduce_blocks`], in an order that is not sequential, with a stack of
    /// blocks.
    ///
    /// # Safety
    /// Like [`StagedReduction::reduce_blocks`].
    unsafe fn reduce_tree(
        &self,
        from: BlockForm,
        to: BlockForm,
        order: &ReductionOrder,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        let (read, written) = (self.element_bytes_in_form(from), self.element_bytes_in_form(to));
        let elements = inputs.iter().map(|input| input.len()).min().unwrap_or(0) / read;
        let elements = elements.min(out.len() / written);
        // A small tensor gets a small stack, which is allocated for each call.
        let block = STAGED_BLOCK_ELEMENTS.min(elements);
        let mut stack = vec![A::default(); order.stack_depth() * block];
        for start in (0..elements).step_by(STAGED_BLOCK_ELEMENTS) {
            let count = STAGED_BLOCK_ELEMENTS.min(elements - start);
            let mut height = 0;
            for (k, input) in inputs.iter().enumerate() {
                let top = &mut stack[height * block..height * block + count];
                // SAFETY: the caller's promise.
                unsafe { self.read_block(from, &input[start * read..(start + count) * read], top) };
                height += 1;
                for _ in 0..order.merges_after_input(k) {
                    height -= 1;
                    let (below, top) = stack.split_at_mut(height * block);
                    let into = &mut below[(height - 1) * block..(height - 1) * block + count];
                    // SAFETY: the caller's promise.
                    unsafe { (self.merge)(into, &top[..count]) };
                }
            }
            let range = start * written..(start + count) * written;
            // SAFETY: the caller's promise.
            unsafe { self.write_block(to, &mut stack[..count], &mut out[range]) };
        }
    }
}

impl<A: NativeElement + Send + Sync> StagedReduction for StagedKernel<A> {
    fn accumulator_expansion(&self) -> usize {
        size_of::<A>() / self.size
    }

    unsafe fn reduce_blocks(
        &self,
        from: BlockForm,
        to: BlockForm,
        order: Option<&ReductionOrder>,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        if let Some(order) = order {
            // SAFETY: the caller's promise.
            return unsafe { self.reduce_tree(from, to, order, inputs, out) };
        }
        // On the stack, because an allocation in each call would cost as much as a small block.
        let (mut acc, mut next) =
            ([A::default(); STAGED_BLOCK_ELEMENTS], [A::default(); STAGED_BLOCK_ELEMENTS]);
        let (read, written) = (self.element_bytes_in_form(from), self.element_bytes_in_form(to));
        let elements = inputs.iter().map(|input| input.len()).min().unwrap_or(0) / read;
        let elements = elements.min(out.len() / written);
        for start in (0..elements).step_by(STAGED_BLOCK_ELEMENTS) {
            let count = STAGED_BLOCK_ELEMENTS.min(elements - start);
            let range = start * read..(start + count) * read;
            // SAFETY: the caller's promise about this processor covers every stage.
            unsafe {
                for (k, input) in inputs.iter().enumerate() {
                    // The first input starts the accumulator. A start from 0.0 would turn a sum of
                    // -0.0 into 0.0.
                    if k == 0 {
                        self.read_block(from, &input[range.clone()], &mut acc[..count]);
                    } else {
                        self.read_block(from, &input[range.clone()], &mut next[..count]);
                        (self.merge)(&mut acc[..count], &next[..count]);
                    }
                }
                self.write_block(
                    to,
                    &mut acc[..count],
                    &mut out[start * written..(start + count) * written],
                );
            }
        }
    }
}

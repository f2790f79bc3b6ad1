// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Types that are their own accumulators, and the loops over them.
//!
//! The loops are plain Rust over byte chunks. The compiler vectorises them for the instructions of
//! the function into which they are inlined. Unaligned bytes cost nothing.

use std::marker::PhantomData;

use super::reduction_order::ReductionOrder;

/// Type with which the processor computes.
pub(super) trait NativeElement: Copy + Default + 'static {
    /// Bytes of a value in memory.
    type Bytes: Copy + 'static;

    fn load_value(bytes: Self::Bytes) -> Self;
    fn store_value(self) -> Self::Bytes;
    fn value_chunks(bytes: &[u8]) -> &[Self::Bytes];
    fn value_chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// Returns the result times a factor. Only floats multiply, because the factor of an integer
    /// kernel is always 1.
    fn multiply_by_factor(self, factor: Self) -> Self;
    fn factor_from_f64(value: f64) -> Self;
}

/// Float type with scaling and averaging.
pub(super) trait FloatElement: NativeElement {
    /// Divides by `divisor`.
    fn divide_by(self, divisor: Self) -> Self;
    fn scale_accumulators(acc: &mut [Self], factor: f64);
    fn divide_by_member_count(acc: &mut [Self], members: usize);
}

macro_rules! bytes_of {
    ($type:ty, $size:literal) => {
        type Bytes = [u8; $size];

        #[inline(always)]
        fn load_value(bytes: Self::Bytes) -> Self {
            <$type>::from_ne_bytes(bytes)
        }

        #[inline(always)]
        fn store_value(self) -> Self::Bytes {
            self.to_ne_bytes()
        }

        #[inline(always)]
        fn value_chunks(bytes: &[u8]) -> &[Self::Bytes] {
            bytes.as_chunks().0
        }

        #[inline(always)]
        fn value_chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
            bytes.as_chunks_mut().0
        }
    };
}

macro_rules! integer {
    ($($type:ty, $size:literal;)+) => { $(
        impl NativeElement for $type {
            bytes_of!($type, $size);

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other { self } else { other }
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other { self } else { other }
            }

            #[inline(always)]
            fn multiply_by_factor(self, _factor: Self) -> Self {
                self
            }

            #[inline(always)]
            fn factor_from_f64(_value: f64) -> Self {
                1
            }
        }
    )+ };
}

integer! { u8, 1; i8, 1; u16, 2; i16, 2; u32, 4; i32, 4; u64, 8; i64, 8; i128, 16; }

macro_rules! float {
    ($($type:ty, $size:literal, $factor:path;)+) => { $(
        impl NativeElement for $type {
            bytes_of!($type, $size);

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                // Not `f32::min`, which drops a NaN. Of equal values the later one is taken, also
                // for zeros of different signs.
                if self < other || self.is_nan() { self } else { other }
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }

            #[inline(always)]
            fn multiply_by_factor(self, factor: Self) -> Self {
                self * factor
            }

            #[inline(always)]
            fn factor_from_f64(value: f64) -> Self {
                $factor(value)
            }
        }

        impl FloatElement for $type {
            #[inline(always)]
            fn divide_by(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn scale_accumulators(acc: &mut [Self], factor: f64) {
                let factor = <$type as NativeElement>::factor_from_f64(factor);
                for a in acc {
                    *a *= factor;
                }
            }

            #[inline(always)]
            fn divide_by_member_count(acc: &mut [Self], members: usize) {
                let members = members as $type;
                for a in acc {
                    *a /= members;
                }
            }
        }
    )+ };
}

float! { f32, 4, f32_factor; f64, 8, std::convert::identity; }

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "a factor takes the type of the tensor it scales"
)]
fn f32_factor(value: f64) -> f32 {
    value as f32
}

/// Operator that combines two values into one.
pub(super) trait ReductionOperator<T>: 'static {
    fn combine_values(a: T, b: T) -> T;

    /// Computes the result from the combined value. A Sum is multiplied by the factor, so that a
    /// scaled Sum can compute an Average over a power of two.
    #[inline(always)]
    fn multiply_by_factor(value: T, _factor: T) -> T {
        value
    }

    /// Returns the result for a single input.
    #[inline(always)]
    fn finish_single(value: T) -> T {
        value
    }
}

macro_rules! join {
    ($($(#[$doc:meta])* $name:ident, $bound:ident, $method:ident $(, $finish:ident)?;)+) => { $(
        $(#[$doc])*
        pub(super) struct $name;

        impl<T: $bound> ReductionOperator<T> for $name {
            #[inline(always)]
            fn combine_values(a: T, b: T) -> T {
                a.$method(b)
            }

            $(
                #[inline(always)]
                fn multiply_by_factor(value: T, factor: T) -> T {
                    value.$finish(factor)
                }
            )?
        }
    )+ };
}

join! {
    Sum, NativeElement, sum, multiply_by_factor;
    /// Sum that is divided by the factor.
    Mean, FloatElement, sum, divide_by;
    Product, NativeElement, product;
    Min, NativeElement, min;
    Max, NativeElement, max;
}

/// Logical or of bytes. 0 is false, all other bytes are true, and the result is 0 or 1.
pub(super) struct LogicalOr;

impl ReductionOperator<u8> for LogicalOr {
    #[inline(always)]
    fn combine_values(a: u8, b: u8) -> u8 {
        u8::from((a | b) != 0)
    }

    #[inline(always)]
    fn finish_single(value: u8) -> u8 {
        u8::from(value != 0)
    }
}

/// Logical and of bytes. 0 is false, all other bytes are true, and the result is 0 or 1.
pub(super) struct LogicalAnd;

impl ReductionOperator<u8> for LogicalAnd {
    #[inline(always)]
    fn combine_values(a: u8, b: u8) -> u8 {
        u8::from(a != 0) & u8::from(b != 0)
    }

    #[inline(always)]
    fn finish_single(value: u8) -> u8 {
        u8::from(value != 0)
    }
}

/// Bytes of output that are computed before the next inputs are read: they stay in the first-level
/// cache.
const DIRECT_BLOCK_BYTES: usize = 4096;

/// Reduction for types that need no separate accumulator: the output block is the accumulator.
pub(super) struct DirectReduction<T, J>(PhantomData<(T, J)>);

impl<T: NativeElement, J: ReductionOperator<T>> DirectReduction<T, J> {
    #[inline(always)]
    pub(super) fn run(inputs: &[&[u8]], out: &mut [u8], factor: f64) {
        let factor = T::factor_from_f64(factor);
        match *inputs {
            [] => {}
            [a] => {
                for (o, a) in T::value_chunks_mut(out).iter_mut().zip(T::value_chunks(a)) {
                    *o = J::multiply_by_factor(J::finish_single(T::load_value(*a)), factor)
                        .store_value();
                }
            }
            // One pass for two and for four inputs: the value stays in a register until it is
            // complete.
            [a, b] => {
                for ((o, a), b) in T::value_chunks_mut(out)
                    .iter_mut()
                    .zip(T::value_chunks(a))
                    .zip(T::value_chunks(b))
                {
                    *o = J::multiply_by_factor(
                        J::combine_values(T::load_value(*a), T::load_value(*b)),
                        factor,
                    )
                    .store_value();
                }
            }
            [a, b, c, d] => {
                let inputs = T::value_chunks(a)
                    .iter()
                    .zip(T::value_chunks(b))
                    .zip(T::value_chunks(c))
                    .zip(T::value_chunks(d));
                for (o, (((a, b), c), d)) in T::value_chunks_mut(out).iter_mut().zip(inputs) {
                    let joined = J::combine_values(
                        J::combine_values(
                            J::combine_values(T::load_value(*a), T::load_value(*b)),
                            T::load_value(*c),
                        ),
                        T::load_value(*d),
                    );
                    *o = J::multiply_by_factor(joined, factor).store_value();
                }
            }
            [a, b, ref others @ ..] => {
                let one = T::factor_from_f64(1.0);
                let mut at = 0_usize;
                for block in out.chunks_mut(DIRECT_BLOCK_BYTES) {
                    let end = at + block.len();
                    let here = |input: &[u8]| at.min(input.len())..end.min(input.len());
                    // The first two inputs are joined in one pass, so that `out` needs no copy of
                    // the first.
                    let pair =
                        T::value_chunks(&a[here(a)]).iter().zip(T::value_chunks(&b[here(b)]));
                    for (o, (a, b)) in T::value_chunks_mut(block).iter_mut().zip(pair) {
                        *o = J::combine_values(T::load_value(*a), T::load_value(*b)).store_value();
                    }
                    for (k, x) in others.iter().enumerate() {
                        // Only the complete value is scaled. The factor 1 changes no bits.
                        let factor = if k + 1 == others.len() { factor } else { one };
                        let range = here(x);
                        for (o, x) in
                            T::value_chunks_mut(block).iter_mut().zip(T::value_chunks(&x[range]))
                        {
                            *o = J::multiply_by_factor(
                                J::combine_values(T::load_value(*o), T::load_value(*x)),
                                factor,
                            )
                            .store_value();
                        }
                    }
                    at = end;
                }
            }
        }
    }

    /// Like [`run`](Self::run), in an order that is not sequential. The stack holds inputs, and
    /// blocks with combined values.
    #[inline(always)]
    pub(super) fn run_in_tree_order(
        order: &ReductionOrder,
        inputs: &[&[u8]],
        out: &mut [u8],
        factor: f64,
    ) {
        let (factor, one) = (T::factor_from_f64(factor), T::factor_from_f64(1.0));
        let bytes = inputs.iter().map(|input| input.len()).min().unwrap_or(0).min(out.len());
        let mut blocks = vec![[0; DIRECT_BLOCK_BYTES]; order.stack_depth()];
        // Inputs on the stack, by stack position. At the other positions, the value is in the
        // block.
        let mut held: Vec<Option<&[u8]>> = vec![None; order.stack_depth()];
        for start in (0..bytes).step_by(DIRECT_BLOCK_BYTES) {
            let here = start..bytes.min(start + DIRECT_BLOCK_BYTES);
            let out = &mut out[here.clone()];
            let mut height = 0;
            for (k, input) in inputs.iter().enumerate() {
                held[height] = Some(&input[here.clone()]);
                height += 1;
                for left in (0..order.merges_after_input(k)).rev() {
                    height -= 1;
                    let (below, above) = blocks.split_at_mut(height);
                    // An input stays where it is until its first merge, which saves a copy of it.
                    let (first, second) = (held[height - 1].take(), held[height].take());
                    let second = second.unwrap_or(&above[0][..out.len()]);
                    let block = &mut below[height - 1][..out.len()];
                    // The last merge writes to `out`, so the result is not copied.
                    if k + 1 == inputs.len() && left == 0 {
                        Self::combine_block_pair(Some(first.unwrap_or(block)), second, out, factor);
                    } else {
                        Self::combine_block_pair(first, second, block, one);
                    }
                }
            }
        }
    }

    /// Combines `first` with `second` into `out`. If `first` is `None`, the first value is in
    /// `out`.
    #[inline(always)]
    fn combine_block_pair(first: Option<&[u8]>, second: &[u8], out: &mut [u8], factor: T) {
        let second = T::value_chunks(second).iter();
        let finish = |a, b: &T::Bytes| {
            J::multiply_by_factor(J::combine_values(T::load_value(a), T::load_value(*b)), factor)
                .store_value()
        };
        match first {
            Some(first) => {
                for ((o, a), b) in
                    T::value_chunks_mut(out).iter_mut().zip(T::value_chunks(first)).zip(second)
                {
                    *o = finish(*a, b);
                }
            }
            None => {
                for (o, b) in T::value_chunks_mut(out).iter_mut().zip(second) {
                    *o = finish(*o, b);
                }
            }
        }
    }

    /// Like [`run`](Self::run), but writes the result into all inputs in one pass. Returns false,
    /// and changes nothing, unless there are two or four inputs: with more inputs the processor
    /// prefetches less well.
    #[inline(always)]
    pub(super) fn run_in_place(all: &mut [&mut [u8]], factor: f64) -> bool {
        let factor = T::factor_from_f64(factor);
        match all {
            [a, b] => {
                for (a, b) in T::value_chunks_mut(a).iter_mut().zip(T::value_chunks_mut(b)) {
                    let result = J::multiply_by_factor(
                        J::combine_values(T::load_value(*a), T::load_value(*b)),
                        factor,
                    )
                    .store_value();
                    (*a, *b) = (result, result);
                }
            }
            [a, b, c, d] => {
                let first = T::value_chunks_mut(a).iter_mut().zip(T::value_chunks_mut(b));
                let second = T::value_chunks_mut(c).iter_mut().zip(T::value_chunks_mut(d));
                for ((a, b), (c, d)) in first.zip(second) {
                    let joined = J::combine_values(
                        J::combine_values(
                            J::combine_values(T::load_value(*a), T::load_value(*b)),
                            T::load_value(*c),
                        ),
                        T::load_value(*d),
                    );
                    let result = J::multiply_by_factor(joined, factor).store_value();
                    (*a, *b, *c, *d) = (result, result, result, result);
                }
            }
            _ => return false,
        }
        true
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Types that are their own accumulators, and the loops over them.
//!
//! The loops are plain Rust over byte chunks. The compiler vectorises them for the instructions of
//! the function into which they are inlined. Unaligned bytes cost nothing.

use std::marker::PhantomData;

use super::order::ReductionOrder;

/// Type with which the processor computes.
pub(super) trait NativeElement: Copy + Default + 'static {
    /// Bytes of a value in memory.
    type Bytes: Copy + 'static;

    fn get(bytes: Self::Bytes) -> Self;
    fn put(self) -> Self::Bytes;
    fn cells(bytes: &[u8]) -> &[Self::Bytes];
    fn cells_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// Returns the result times a factor. Only floats multiply, because the factor of an integer
    /// kernel is always 1.
    fn finish(self, factor: Self) -> Self;
    fn factor(value: f64) -> Self;
}

/// Float type with scaling and averaging.
pub(super) trait FloatElement: NativeElement {
    /// Divides by `divisor`.
    fn divide_by(self, divisor: Self) -> Self;
    fn scale(acc: &mut [Self], factor: f64);
    fn mean(acc: &mut [Self], members: usize);
}

macro_rules! bytes_of {
    ($type:ty, $size:literal) => {
        type Bytes = [u8; $size];

        #[inline(always)]
        fn get(bytes: Self::Bytes) -> Self {
            <$type>::from_ne_bytes(bytes)
        }

        #[inline(always)]
        fn put(self) -> Self::Bytes {
            self.to_ne_bytes()
        }

        #[inline(always)]
        fn cells(bytes: &[u8]) -> &[Self::Bytes] {
            bytes.as_chunks().0
        }

        #[inline(always)]
        fn cells_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
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
            fn finish(self, _factor: Self) -> Self {
                self
            }

            #[inline(always)]
            fn factor(_value: f64) -> Self {
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
            fn finish(self, factor: Self) -> Self {
                self * factor
            }

            #[inline(always)]
            fn factor(value: f64) -> Self {
                $factor(value)
            }
        }

        impl FloatElement for $type {
            #[inline(always)]
            fn divide_by(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn scale(acc: &mut [Self], factor: f64) {
                let factor = <$type as NativeElement>::factor(factor);
                for a in acc {
                    *a *= factor;
                }
            }

            #[inline(always)]
            fn mean(acc: &mut [Self], members: usize) {
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
    fn join(a: T, b: T) -> T;

    /// Computes the result from the combined value. A Sum is multiplied by the factor, so that a
    /// scaled Sum can compute an Average over a power of two.
    #[inline(always)]
    fn finish(value: T, _factor: T) -> T {
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
            fn join(a: T, b: T) -> T {
                a.$method(b)
            }

            $(
                #[inline(always)]
                fn finish(value: T, factor: T) -> T {
                    value.$finish(factor)
                }
            )?
        }
    )+ };
}

join! {
    Sum, NativeElement, sum, finish;
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
    fn join(a: u8, b: u8) -> u8 {
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
    fn join(a: u8, b: u8) -> u8 {
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
        let factor = T::factor(factor);
        match *inputs {
            [] => {}
            [a] => {
                for (o, a) in T::cells_mut(out).iter_mut().zip(T::cells(a)) {
                    *o = J::finish(J::finish_single(T::get(*a)), factor).put();
                }
            }
            // One pass for two and for four inputs: the value stays in a register until it is
            // complete.
            [a, b] => {
                for ((o, a), b) in T::cells_mut(out).iter_mut().zip(T::cells(a)).zip(T::cells(b)) {
                    *o = J::finish(J::join(T::get(*a), T::get(*b)), factor).put();
                }
            }
            [a, b, c, d] => {
                let inputs = T::cells(a).iter().zip(T::cells(b)).zip(T::cells(c)).zip(T::cells(d));
                for (o, (((a, b), c), d)) in T::cells_mut(out).iter_mut().zip(inputs) {
                    let joined =
                        J::join(J::join(J::join(T::get(*a), T::get(*b)), T::get(*c)), T::get(*d));
                    *o = J::finish(joined, factor).put();
                }
            }
            [a, b, ref others @ ..] => {
                let one = T::factor(1.0);
                let mut at = 0_usize;
                for block in out.chunks_mut(DIRECT_BLOCK_BYTES) {
                    let end = at + block.len();
                    let here = |input: &[u8]| at.min(input.len())..end.min(input.len());
                    // The first two inputs are joined in one pass, so that `out` needs no copy of
                    // the first.
                    let pair = T::cells(&a[here(a)]).iter().zip(T::cells(&b[here(b)]));
                    for (o, (a, b)) in T::cells_mut(block).iter_mut().zip(pair) {
                        *o = J::join(T::get(*a), T::get(*b)).put();
                    }
                    for (k, x) in others.iter().enumerate() {
                        // Only the complete value is scaled. The factor 1 changes no bits.
                        let factor = if k + 1 == others.len() { factor } else { one };
                        let range = here(x);
                        for (o, x) in T::cells_mut(block).iter_mut().zip(T::cells(&x[range])) {
                            *o = J::finish(J::join(T::get(*o), T::get(*x)), factor).put();
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
        let (factor, one) = (T::factor(factor), T::factor(1.0));
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
                for left in (0..order.merges_after(k)).rev() {
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
        let second = T::cells(second).iter();
        let finish = |a, b: &T::Bytes| J::finish(J::join(T::get(a), T::get(*b)), factor).put();
        match first {
            Some(first) => {
                for ((o, a), b) in T::cells_mut(out).iter_mut().zip(T::cells(first)).zip(second) {
                    *o = finish(*a, b);
                }
            }
            None => {
                for (o, b) in T::cells_mut(out).iter_mut().zip(second) {
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
        let factor = T::factor(factor);
        match all {
            [a, b] => {
                for (a, b) in T::cells_mut(a).iter_mut().zip(T::cells_mut(b)) {
                    let result = J::finish(J::join(T::get(*a), T::get(*b)), factor).put();
                    (*a, *b) = (result, result);
                }
            }
            [a, b, c, d] => {
                let first = T::cells_mut(a).iter_mut().zip(T::cells_mut(b));
                let second = T::cells_mut(c).iter_mut().zip(T::cells_mut(d));
                for ((a, b), (c, d)) in first.zip(second) {
                    let joined =
                        J::join(J::join(J::join(T::get(*a), T::get(*b)), T::get(*c)), T::get(*d));
                    let result = J::finish(joined, factor).put();
                    (*a, *b, *c, *d) = (result, result, result, result);
                }
            }
            _ => return false,
        }
        true
    }
}

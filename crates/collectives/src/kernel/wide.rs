// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reductions through an accumulator of another type, or with scale factors: a block at a time, in
//! the first-level cache, as a sequence of stages.

use std::marker::PhantomData;

use super::native::{Join, Native};
use super::{Form, Order, Path};

/// Reads elements into accumulators, and writes them from accumulators.
pub(super) trait Format: 'static {
    /// Bytes of one element.
    const SIZE: usize;
    /// The accumulator.
    type Acc: Native + Send + Sync;

    fn widen(bytes: &[u8], acc: &mut [Self::Acc]);
    fn narrow(acc: &[Self::Acc], bytes: &mut [u8]);
    /// Multiplies; what leaves the element's range saturates.
    fn scale(acc: &mut [Self::Acc], factor: f64);
    /// Divides by the number of members.
    fn mean(acc: &mut [Self::Acc], members: usize);
}

/// Scaling and averaging of floats.
pub(super) trait Float: Native {
    /// Divides.
    fn over(self, divisor: Self) -> Self;
    fn scale(acc: &mut [Self], factor: f64);
    fn mean(acc: &mut [Self], members: usize);
}

/// Elements that accumulate as themselves.
pub(super) struct Same<T>(PhantomData<T>);

/// Integers that accumulate in a wider one, so that a sum of members cannot overflow before it is
/// divided.
pub(super) struct Wider<T, A>(PhantomData<(T, A)>);

macro_rules! float {
    ($($type:ty, $size:literal;)+) => { $(
        impl Float for $type {
            #[inline(always)]
            fn over(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn scale(acc: &mut [Self], factor: f64) {
                let factor = <$type as Native>::factor(factor);
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

        impl Format for Same<$type> {
            const SIZE: usize = $size;
            type Acc = $type;

            #[inline(always)]
            fn widen(bytes: &[u8], acc: &mut [$type]) {
                for (a, b) in acc.iter_mut().zip(<$type as Native>::cells(bytes)) {
                    *a = <$type>::get(*b);
                }
            }

            #[inline(always)]
            fn narrow(acc: &[$type], bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(<$type as Native>::cells_mut(bytes)) {
                    *b = a.put();
                }
            }

            #[inline(always)]
            fn scale(acc: &mut [$type], factor: f64) {
                <$type as Float>::scale(acc, factor);
            }

            #[inline(always)]
            fn mean(acc: &mut [$type], members: usize) {
                <$type as Float>::mean(acc, members);
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
        impl Format for $format {
            const SIZE: usize = $size;
            type Acc = $acc;

            #[inline(always)]
            fn widen(bytes: &[u8], acc: &mut [$acc]) {
                for (a, b) in acc.iter_mut().zip(<$type as Native>::cells(bytes)) {
                    *a = <$acc>::from(<$type>::get(*b));
                }
            }

            #[inline(always)]
            fn narrow(acc: &[$acc], bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(<$type as Native>::cells_mut(bytes)) {
                    *b = narrowed!($narrow, $type, *a).put();
                }
            }

            #[inline(always)]
            #[expect(clippy::cast_possible_truncation, reason = "truncates toward zero and \
                                                                 saturates")]
            fn scale(acc: &mut [$acc], factor: f64) {
                for a in acc {
                    *a = <$acc>::from((*a as f64 * factor) as $type);
                }
            }

            #[inline(always)]
            fn mean(acc: &mut [$acc], members: usize) {
                let Ok(members) = <$acc>::try_from(members) else { return };
                for a in acc {
                    *a /= members;
                }
            }
        }
    )+ };
}

integer! {
    Same<u8>, u8, u8, 1, same;
    Same<i8>, i8, i8, 1, same;
    Same<u16>, u16, u16, 2, same;
    Same<i16>, i16, i16, 2, same;
    Same<u32>, u32, u32, 4, same;
    Same<i32>, i32, i32, 4, same;
    Same<u64>, u64, u64, 8, same;
    Same<i64>, i64, i64, 8, same;
    Wider<u8, i64>, u8, i64, 1, cut;
    Wider<i8, i64>, i8, i64, 1, cut;
    Wider<u16, i64>, u16, i64, 2, cut;
    Wider<i16, i64>, i16, i64, 2, cut;
    Wider<u32, i64>, u32, i64, 4, cut;
    Wider<i32, i64>, i32, i64, 4, cut;
    Wider<u64, i128>, u64, i128, 8, cut;
    Wider<i64, i128>, i64, i128, 8, cut;
}

/// Elements per block: accumulators and inputs of the widest type stay in the first-level cache.
const BLOCK: usize = 512;

type Widen<A> = unsafe fn(&[u8], &mut [A]);
type Merge<A> = unsafe fn(&mut [A], &[A]);
type Narrow<A> = unsafe fn(&[A], &mut [u8]);
type Scale<A> = unsafe fn(&mut [A], f64);
type Mean<A> = unsafe fn(&mut [A], usize);

/// The stages, each compiled for one path.
pub(super) struct Stages<A> {
    size: usize,
    widen: Widen<A>,
    load: Widen<A>,
    merge: Merge<A>,
    narrow: Narrow<A>,
    store: Narrow<A>,
    scale: Scale<A>,
    mean: Option<(Mean<A>, usize)>,
    prescale: f64,
    postscale: f64,
}

/// The factors and the divisor of a reduction.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) prescale: f64,
    pub(super) postscale: f64,
    /// The number of members, for an Average.
    pub(super) mean: Option<usize>,
}

macro_rules! stages {
    ($name:ident, $($features:literal)?) => {
        mod $name {
            use super::{Format, Join, Native};

            $(#[target_feature(enable = $features)])?
            pub(super) fn widen<F: Format>(bytes: &[u8], acc: &mut [F::Acc]) {
                F::widen(bytes, acc);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn merge<A: Copy, J: Join<A>>(acc: &mut [A], other: &[A]) {
                for (a, b) in acc.iter_mut().zip(other) {
                    *a = J::join(*a, *b);
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn load<A: Native>(bytes: &[u8], acc: &mut [A]) {
                for (a, b) in acc.iter_mut().zip(A::cells(bytes)) {
                    *a = A::get(*b);
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn store<A: Native>(acc: &[A], bytes: &mut [u8]) {
                for (a, b) in acc.iter().zip(A::cells_mut(bytes)) {
                    *b = a.put();
                }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow<F: Format>(acc: &[F::Acc], bytes: &mut [u8]) {
                F::narrow(acc, bytes);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn scale<F: Format>(acc: &mut [F::Acc], factor: f64) {
                F::scale(acc, factor);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn mean<F: Format>(acc: &mut [F::Acc], members: usize) {
                F::mean(acc, members);
            }
        }
    };
}

stages!(baseline,);
#[cfg(target_arch = "x86_64")]
stages!(avx2, "avx2,f16c");

impl<A: Native> Stages<A> {
    /// Stages of a format. AVX-512 gains nothing here: the conversions are no wider, so it shares
    /// AVX2's.
    pub(super) fn new<F: Format<Acc = A>, J: Join<A>>(path: Path, factors: Factors) -> Self {
        let Factors { prescale, postscale, mean } = factors;
        let size = F::SIZE;
        match path {
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 | Path::Avx512 => Self {
                size,
                widen: avx2::widen::<F>,
                load: avx2::load::<A>,
                merge: avx2::merge::<A, J>,
                narrow: avx2::narrow::<F>,
                store: avx2::store::<A>,
                scale: avx2::scale::<F>,
                mean: mean.map(|members| (avx2::mean::<F> as Mean<A>, members)),
                prescale,
                postscale,
            },
            _ => Self {
                size,
                widen: baseline::widen::<F>,
                load: baseline::load::<A>,
                merge: baseline::merge::<A, J>,
                narrow: baseline::narrow::<F>,
                store: baseline::store::<A>,
                scale: baseline::scale::<F>,
                mean: mean.map(|members| (baseline::mean::<F> as Mean<A>, members)),
                prescale,
                postscale,
            },
        }
    }
}

/// A reduction in stages, whatever it accumulates in.
pub(super) trait Staged: Send + Sync {
    /// Returns the ratio of an accumulator's bytes to those of an element.
    fn expansion(&self) -> usize;

    /// Joins `inputs` in `order`, or one after the other, into `out`.
    ///
    /// # Safety
    /// This processor has the instructions of the path the stages were made for.
    unsafe fn run(
        &self,
        from: Form,
        to: Form,
        order: Option<&Order>,
        inputs: &[&[u8]],
        out: &mut [u8],
    );
}

impl<A: Native + Send + Sync> Stages<A> {
    fn bytes(&self, form: Form) -> usize {
        match form {
            Form::Element | Form::Rounded => self.size,
            Form::Partial => size_of::<A>(),
        }
    }

    /// # Safety
    /// That of [`Staged::run`].
    unsafe fn read(&self, from: Form, bytes: &[u8], into: &mut [A]) {
        // SAFETY: the caller's promise about this processor covers every stage.
        unsafe {
            match from {
                Form::Partial => (self.load)(bytes, into),
                Form::Rounded => (self.widen)(bytes, into),
                Form::Element => {
                    (self.widen)(bytes, into);
                    if self.prescale != 1.0 {
                        (self.scale)(into, self.prescale);
                    }
                }
            }
        }
    }

    /// # Safety
    /// That of [`Staged::run`].
    unsafe fn write(&self, to: Form, acc: &mut [A], bytes: &mut [u8]) {
        // SAFETY: the caller's promise about this processor covers every stage.
        unsafe {
            match to {
                Form::Partial => (self.store)(acc, bytes),
                Form::Rounded => (self.narrow)(acc, bytes),
                Form::Element => {
                    if let Some((mean, members)) = self.mean {
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

    /// Like [`Staged::run`] in an order that is no line: a stack of blocks.
    ///
    /// # Safety
    /// That of [`Staged::run`].
    unsafe fn run_tree(
        &self,
        from: Form,
        to: Form,
        order: &Order,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        let (read, written) = (self.bytes(from), self.bytes(to));
        let elements = inputs.iter().map(|input| input.len()).min().unwrap_or(0) / read;
        let elements = elements.min(out.len() / written);
        let block = BLOCK.min(elements);
        let mut stack = vec![A::default(); order.depth() * block];
        for start in (0..elements).step_by(BLOCK) {
            let count = BLOCK.min(elements - start);
            let mut height = 0;
            for (k, input) in inputs.iter().enumerate() {
                let top = &mut stack[height * block..height * block + count];
                // SAFETY: the caller's promise.
                unsafe { self.read(from, &input[start * read..(start + count) * read], top) };
                height += 1;
                for _ in 0..order.merges(k) {
                    height -= 1;
                    let (below, top) = stack.split_at_mut(height * block);
                    let into = &mut below[(height - 1) * block..(height - 1) * block + count];
                    // SAFETY: the caller's promise.
                    unsafe { (self.merge)(into, &top[..count]) };
                }
            }
            let range = start * written..(start + count) * written;
            // SAFETY: the caller's promise.
            unsafe { self.write(to, &mut stack[..count], &mut out[range]) };
        }
    }
}

impl<A: Native + Send + Sync> Staged for Stages<A> {
    fn expansion(&self) -> usize {
        size_of::<A>() / self.size
    }

    unsafe fn run(
        &self,
        from: Form,
        to: Form,
        order: Option<&Order>,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        if let Some(order) = order {
            // SAFETY: the caller's promise.
            return unsafe { self.run_tree(from, to, order, inputs, out) };
        }
        let (mut acc, mut next) = ([A::default(); BLOCK], [A::default(); BLOCK]);
        let (read, written) = (self.bytes(from), self.bytes(to));
        let elements = inputs.iter().map(|input| input.len()).min().unwrap_or(0) / read;
        let elements = elements.min(out.len() / written);
        for start in (0..elements).step_by(BLOCK) {
            let count = BLOCK.min(elements - start);
            let range = start * read..(start + count) * read;
            // SAFETY: the caller's promise about this processor covers every stage.
            unsafe {
                for (k, input) in inputs.iter().enumerate() {
                    if k == 0 {
                        self.read(from, &input[range.clone()], &mut acc[..count]);
                    } else {
                        self.read(from, &input[range.clone()], &mut next[..count]);
                        (self.merge)(&mut acc[..count], &next[..count]);
                    }
                }
                self.write(
                    to,
                    &mut acc[..count],
                    &mut out[start * written..(start + count) * written],
                );
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reductions of equally long byte blocks, one per member, in member order.
//!
//! `out = post * (((pre * x0) op (pre * x1)) op (pre * x2) ...)` for every element by itself, so
//! the bits do not depend on how a tensor was cut into blocks; or with the parentheses of an
//! [`Order`]. The joined value of some members can leave as a partial, an accumulator that is
//! neither scaled nor rounded, and be joined with others elsewhere: the bits are those of doing it
//! all in one place. What each type does:
//!
//! - `float32`, `float64`: IEEE arithmetic in the type; an Average divides by the number of
//!   members, then scales.
//! - `float16`, `bfloat16`: as `float32` from the first input to the last scaling, rounded once, to
//!   nearest even.
//! - `float8_e4m3fn`, `float8_e5m2`: the same. For values that are too large, also infinities, the
//!   first has its largest number, 448, and the second an infinity, as in torch.
//! - integers: Sum and Product wrap. An Average sums in 64 bits (128 for the 64-bit types), so it
//!   never overflows, and truncates toward zero. A scale factor other than 1 goes through
//!   `float64`, truncates toward zero and saturates; the factor 1 is exact.
//! - `bool`: Sum and Max are or, Product and Min are and; any byte but 0 is true; no Average, no
//!   scale factors.
//! - `complex64`, `complex128`: Sum and Average, by parts.
//! - A rounded Sum or Average of `float16` and `bfloat16` rounds the partial of each host to the
//!   type, unless there is only one host; it does so wherever it is made, so that its bits do not
//!   depend on the algorithm. A sum within a host that leaves the range of the type becomes
//!   infinite. Of other types nothing is rounded.
//! - Min and Max give NaN when any input is NaN; of equal values (`-0.0` and `0.0`) the later
//!   member's. Which NaN a reduction gives is not defined, only that it is one.
//!
//! Every path of [`Path`] gives the same bits; [`Path::best`] is chosen once per process.
#![expect(
    unsafe_code,
    reason = "functions compiled for instructions that only some processors have"
)]

mod adasum;
mod dispatch;
mod float8;
mod half;
mod native;
mod neutral;
mod order;
mod wide;

use std::sync::{Arc, OnceLock};

use crate::{DataType, Error, ReduceOp, Result};

pub(crate) use adasum::{Carrier, Measures};
pub use neutral::{fill_neutral, neutral};
pub use order::Order;

/// The instruction sets of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// The instructions of every processor of the architecture.
    Baseline,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL besides.
    Avx512,
}

impl Path {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Baseline, Self::Avx2, Self::Avx512];

    /// Returns whether this processor can run it.
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

    /// Returns the widest one this processor can run.
    pub fn best() -> Self {
        static BEST: OnceLock<Path> = OnceLock::new();
        *BEST.get_or_init(|| {
            Self::ALL.into_iter().rev().find(|path| path.is_available()).unwrap_or(Self::Baseline)
        })
    }
}

/// The parameters of a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// Element type.
    pub dtype: DataType,
    /// The operation that combines elements.
    pub op: ReduceOp,
    /// Number of inputs.
    pub members: usize,
    /// Multiplies every input.
    pub prescale: f64,
    /// Multiplies the result.
    pub postscale: f64,
}

/// The content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Elements as tensors have them.
    Element,
    /// Accumulators: inputs are scaled and joined, results not yet.
    Partial,
    /// The same, rounded to elements.
    Rounded,
}

/// The parentheses of a sum over the members of several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders {
    /// Over all members.
    members: Order,
    /// Over the partials of hosts.
    hosts: Order,
    /// Members on each host.
    sizes: Vec<usize>,
}

impl Orders {
    /// For hosts of these many members, which follow each other.
    pub fn new(hosts: &[usize]) -> Self {
        Self {
            members: Order::groups(hosts),
            hosts: Order::pairs(hosts.len()),
            sizes: hosts.to_vec(),
        }
    }
}

/// A reduction with its kernel chosen: made once per operation, run once per block.
pub struct Reducer {
    reduction: Reduction,
    kernel: dispatch::Kernel,
    /// Nothing for a line.
    orders: Option<Arc<Orders>>,
    /// The order of partial sums that are rounded between hosts.
    rounding: Option<Arc<Orders>>,
}

/// Bytes of elements that are joined host by host at a time.
const BLOCK: usize = 4 << 10;

impl Reducer {
    /// Chooses the kernel for this processor.
    ///
    /// # Errors
    /// `Unsupported` when the operation is not defined for the type, `Shape` for no members or
    /// scaled booleans.
    pub fn new(reduction: Reduction) -> Result<Self> {
        Self::on(reduction, Path::best())
    }

    /// Chooses the kernel of `path`.
    ///
    /// # Errors
    /// Like [`Reducer::new`], and `Shape` when this processor cannot run the path.
    pub fn on(reduction: Reduction, path: Path) -> Result<Self> {
        Self::ordered(reduction, path, None)
    }

    /// Chooses the kernel of `path` for these parentheses, or those of a line.
    ///
    /// # Errors
    /// Like [`Reducer::on`].
    pub fn ordered(reduction: Reduction, path: Path, orders: Option<Arc<Orders>>) -> Result<Self> {
        let halves = matches!(reduction.dtype, DataType::F16 | DataType::Bf16);
        let rounding = orders
            .clone()
            .filter(|orders| reduction.op.is_rounded() && halves && orders.sizes.len() > 1);
        let reduction = Reduction { op: reduction.op.exact(), ..reduction };
        let orders = orders.filter(|orders| !orders.members.is_line());
        let refuse = |reason: &str| Error::Shape { reason: reason.to_owned() };
        if !path.is_available() {
            return Err(refuse("this processor lacks the instructions asked for"));
        }
        if reduction.members == 0 {
            return Err(refuse("a reduction needs at least one member"));
        }
        let scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
        if scaled && reduction.dtype == DataType::Bool {
            return Err(refuse("booleans take no scale factors"));
        }
        let kernel = dispatch::choose(&reduction, path)
            .ok_or(Error::Unsupported { op: reduction.op, dtype: reduction.dtype })?;
        Ok(Self { reduction, kernel, orders, rounding })
    }

    /// Returns the parameters it was made for.
    pub fn reduction(&self) -> &Reduction {
        &self.reduction
    }

    /// Reduces the `inputs` of all members, which are in member order, into `out`. Elements beyond
    /// the shortest of them are left alone.
    pub fn run(&self, inputs: &[&[u8]], out: &mut [u8]) {
        if let Some(orders) = &self.rounding
            && (self.reduction.prescale != 1.0 || orders.sizes.iter().any(|size| *size > 1))
        {
            return self.run_by_hosts(&orders.sizes, inputs, out);
        }
        self.join(
            Form::Element,
            Form::Element,
            self.orders.as_ref().map(|orders| &orders.members),
            inputs,
            out,
        );
    }

    /// Like [`run`](Self::run), by way of the hosts' partials.
    fn run_by_hosts(&self, sizes: &[usize], inputs: &[&[u8]], out: &mut [u8]) {
        let bytes = inputs.iter().map(|input| input.len()).min().unwrap_or(0).min(out.len());
        let mut partials = vec![[0; BLOCK]; sizes.len()];
        for start in (0..bytes).step_by(BLOCK) {
            let here = start..bytes.min(start + BLOCK);
            let mut rest = inputs;
            for (size, partial) in sizes.iter().zip(&mut partials) {
                let (members, others) = rest.split_at((*size).min(rest.len()));
                let members: Vec<&[u8]> =
                    members.iter().map(|input| &input[here.clone()]).collect();
                self.begin(&members, &mut partial[..here.len()]);
                rest = others;
            }
            let partials: Vec<&[u8]> =
                partials.iter().map(|partial| &partial[..here.len()]).collect();
            self.finish(&partials, &mut out[here]);
        }
    }

    /// Like [`run`](Self::run), into all inputs, which are as long as each other: in one pass where
    /// that can be, else by way of `block`, as many bytes at a time as it has; it has some.
    pub fn run_in_place(&self, all: &mut [&mut [u8]], block: &mut [u8]) {
        // SAFETY: `ordered` made sure that this processor has the instructions the kernel was
        // compiled for.
        if self.orders.is_none() && unsafe { self.kernel.run_in_place(all) } {
            return;
        }
        let bytes = all.iter().map(|one| one.len()).min().unwrap_or(0);
        for start in (0..bytes).step_by(block.len()) {
            let here = start..bytes.min(start + block.len());
            let result = &mut block[..here.len()];
            let inputs: Vec<&[u8]> = all.iter().map(|one| &one[here.clone()]).collect();
            self.run(&inputs, result);
            for one in &mut *all {
                one[here.clone()].copy_from_slice(result);
            }
        }
    }

    /// Returns the form of partials of hosts.
    fn partial(&self) -> Form {
        if self.rounding.is_some() { Form::Rounded } else { Form::Partial }
    }

    /// Returns the ratio of the bytes of partials to those of elements.
    pub fn expansion(&self) -> usize {
        if self.rounding.is_some() { 1 } else { self.width() }
    }

    /// Joins the `inputs` of a host's members into a partial.
    pub fn begin(&self, inputs: &[&[u8]], partial: &mut [u8]) {
        self.join(Form::Element, self.partial(), None, inputs, partial);
    }

    /// Returns the ratio of the bytes of accumulators to those of elements.
    pub fn width(&self) -> usize {
        self.kernel.expansion()
    }

    /// Like [`begin`](Self::begin), into accumulators, which [`merge`](Self::merge) joins.
    pub fn accumulate(&self, inputs: &[&[u8]], accumulators: &mut [u8]) {
        if self.rounding.is_none() {
            return self.join(Form::Element, Form::Partial, None, inputs, accumulators);
        }
        let mut rounded = vec![0; accumulators.len() / self.width()];
        self.begin(inputs, &mut rounded);
        self.join(Form::Rounded, Form::Partial, None, &[&rounded], accumulators);
    }

    /// Makes the result of the accumulators that were joined from all hosts.
    pub fn conclude(&self, accumulators: &[u8], out: &mut [u8]) {
        self.join(Form::Partial, Form::Element, None, &[accumulators], out);
    }

    /// Joins the accumulators of neighbours into one.
    pub fn merge(&self, earlier: &[u8], later: &[u8], partial: &mut [u8]) {
        self.join(Form::Partial, Form::Partial, None, &[earlier, later], partial);
    }

    /// Makes the result of the partials of all hosts.
    pub fn finish(&self, partials: &[&[u8]], out: &mut [u8]) {
        let orders = self.orders.as_ref().filter(|_| partials.len() > 1);
        self.join(self.partial(), Form::Element, orders.map(|orders| &orders.hosts), partials, out);
    }

    fn join(&self, from: Form, to: Form, order: Option<&Order>, inputs: &[&[u8]], out: &mut [u8]) {
        // SAFETY: `ordered` made sure that this processor has the instructions the kernel was
        // compiled for.
        unsafe { self.kernel.run(from, to, order, inputs, out) }
    }
}

/// Reduces one block per member into `out`.
///
/// # Errors
/// Like [`Reducer::new`], and `Shape` when lengths differ or are no whole number of elements.
pub fn reduce(
    dtype: DataType,
    op: ReduceOp,
    inputs: &[&[u8]],
    out: &mut [u8],
    prescale: f64,
    postscale: f64,
) -> Result<()> {
    let reducer =
        Reducer::new(Reduction { dtype, op, members: inputs.len(), prescale, postscale })?;
    if inputs.iter().any(|input| input.len() != out.len())
        || !out.len().is_multiple_of(dtype.size())
    {
        let lengths: Vec<usize> = inputs.iter().map(|input| input.len()).collect();
        let reason =
            format!("inputs of {lengths:?} bytes reduced into {} bytes of {dtype}", out.len());
        return Err(Error::Shape { reason });
    }
    reducer.run(inputs, out);
    Ok(())
}

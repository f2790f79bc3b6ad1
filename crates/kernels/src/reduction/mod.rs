// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reductions of byte blocks of equal length, one block per member, in member order.
//!
//! `out = post * (((pre * x0) op (pre * x1)) op (pre * x2) ...)`, or the same with the parentheses
//! of a [`ReductionOrder`]. Every element is computed separately, so the bits do not depend on how
//! a tensor is cut into blocks. The combined value of some members can be written as a partial: an
//! accumulator that is neither scaled nor rounded. Partials can be combined elsewhere, and the bits
//! are the same as if one member had computed everything. The rules for each type:
//!
//! - `float32`, `float64`: IEEE arithmetic in the type; an Average divides by the number of
//!   members, then scales.
//! - `float16`, `bfloat16`: computed as `float32` from the first input to the last scaling, and
//!   rounded once, to nearest even.
//! - `float8_e4m3fn`, `float8_e5m2`: the same. A value that is too large, also an infinity, becomes
//!   the largest number, 448, in the first type and an infinity in the second, as in torch.
//! - integers: Sum and Product wrap. An Average sums in 64 bits (128 for the 64-bit types), so it
//!   never overflows, and truncates toward zero. A scale factor other than 1 goes through
//!   `float64`, truncates toward zero and saturates; the factor 1 is exact.
//! - `bool`: Sum and Max are a logical or, Product and Min a logical and. Every byte except 0 is
//!   true. There is no Average, and there are no scale factors.
//! - `complex64`, `complex128`: only Sum and Average, separately for the real and the imaginary
//!   parts.
//! - A rounded Sum or Average of `float16` and `bfloat16` rounds the partial of each host to the
//!   type, unless there is only one host. Every algorithm rounds in this way, so the bits do not
//!   depend on the algorithm. If a sum within a host exceeds the range of the type, it becomes
//!   infinite. Sums of other types are not rounded between hosts.
//! - Min and Max give NaN if any input is NaN. If `-0.0` and `0.0` are both the result, the one of
//!   the later member is taken. If the result is NaN, its bits are not defined.
//!
//! All instruction sets give the same bits. [`InstructionSet::best_available`] is chosen once per
//! process.
#![expect(
    unsafe_code,
    reason = "functions compiled for instructions that only some processors have"
)]

mod adasum;
mod float8;
mod half;
mod kernel_selection;
mod native_elements;
mod neutral;
mod reduction_order;
mod reduction_parameters;
mod staged;

use std::sync::Arc;

use self::reduction_parameters::BlockForm;
use crate::{DataType, Error, Result};

pub use adasum::{AdasumPrecision, AdasumProducts};
pub use neutral::neutral_element;
pub use reduction_order::ReductionOrder;
pub use reduction_parameters::{InstructionSet, ReductionSpec};

/// Parentheses of a sum over the members of several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HierarchicalOrder {
    /// Order over all members.
    members: ReductionOrder,
    /// Order over the partials of the hosts.
    hosts: ReductionOrder,
    /// Number of members on each host.
    sizes: Vec<usize>,
}

impl HierarchicalOrder {
    /// Returns the order for hosts with these numbers of members. The members of a host follow each
    /// other.
    pub fn new(hosts: &[usize]) -> Self {
        Self {
            members: ReductionOrder::grouped_order(hosts),
            hosts: ReductionOrder::pairwise_order(hosts.len()),
            sizes: hosts.to_vec(),
        }
    }
}

/// Reduction with a chosen kernel. It is created once per operation and called once per block.
pub struct BlockReducer {
    reduction: ReductionSpec,
    kernel: kernel_selection::ReductionKernel,
    /// Order of the members; `None` if it is sequential.
    orders: Option<Arc<HierarchicalOrder>>,
    /// Order of the partial sums, if they are rounded between hosts.
    rounding: Option<Arc<HierarchicalOrder>>,
}

/// Bytes of elements that are combined at a time, host by host.
// Each block is read again right after it is written, so it should still be in the first-level
// cache.
const HOST_BLOCK_BYTES: usize = 4 << 10;

impl BlockReducer {
    /// Chooses the kernel for this processor.
    ///
    /// # Errors
    /// `Unsupported` when the operation is not defined for the type, `Shape` when there are no
    /// members or booleans are scaled.
    pub fn new(reduction: ReductionSpec) -> Result<Self> {
        Self::for_instruction_set(reduction, InstructionSet::best_available())
    }

    /// Chooses the kernel for the instruction set `path`.
    ///
    /// # Errors
    /// Like [`BlockReducer::new`], and `Shape` when this processor lacks the instruction set.
    pub fn for_instruction_set(reduction: ReductionSpec, path: InstructionSet) -> Result<Self> {
        Self::with_order(reduction, path, None)
    }

    /// Chooses the kernel for the instruction set `path` and these parentheses; `None` is the
    /// sequential order.
    ///
    /// # Errors
    /// Like [`BlockReducer::for_instruction_set`].
    pub fn with_order(
        reduction: ReductionSpec,
        path: InstructionSet,
        orders: Option<Arc<HierarchicalOrder>>,
    ) -> Result<Self> {
        let halves = matches!(reduction.dtype, DataType::F16 | DataType::Bf16);
        let rounding = orders.clone().filter(|orders| {
            reduction.op.rounds_between_hosts() && halves && orders.sizes.len() > 1
        });
        let reduction = ReductionSpec { op: reduction.op.with_unrounded_partials(), ..reduction };
        // The kernels are faster without a tree, and only a sequential order can run in place.
        let orders = orders.filter(|orders| !orders.members.is_sequential());
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
        let kernel = kernel_selection::choose_kernel(&reduction, path)
            .ok_or(Error::Unsupported { op: reduction.op, dtype: reduction.dtype })?;
        Ok(Self { reduction, kernel, orders, rounding })
    }

    /// Returns the parameters of the reduction.
    pub fn reduction_spec(&self) -> &ReductionSpec {
        &self.reduction
    }

    /// Reduces the `inputs` of all members, in member order, into `out`. Elements of `out` beyond
    /// the shortest input are not changed.
    pub fn reduce_blocks(&self, inputs: &[&[u8]], out: &mut [u8]) {
        // If each host has one unscaled member, partials are inputs of the type. Rounding changes
        // nothing then, and one pass is enough.
        if let Some(orders) = &self.rounding
            && (self.reduction.prescale != 1.0 || orders.sizes.iter().any(|size| *size > 1))
        {
            return self.reduce_host_by_host(&orders.sizes, inputs, out);
        }
        self.run_kernel(
            BlockForm::Element,
            BlockForm::Element,
            self.orders.as_ref().map(|orders| &orders.members),
            inputs,
            out,
        );
    }

    /// Like [`reduce_blocks`](Self::reduce_blocks), but computes the partial of each host first.
    fn reduce_host_by_host(&self, sizes: &[usize], inputs: &[&[u8]], out: &mut [u8]) {
        let bytes = inputs.iter().map(|input| input.len()).min().unwrap_or(0).min(out.len());
        let mut partials = vec![[0; HOST_BLOCK_BYTES]; sizes.len()];
        for start in (0..bytes).step_by(HOST_BLOCK_BYTES) {
            let here = start..bytes.min(start + HOST_BLOCK_BYTES);
            let mut rest = inputs;
            for (size, partial) in sizes.iter().zip(&mut partials) {
                let (members, others) = rest.split_at((*size).min(rest.len()));
                let members: Vec<&[u8]> =
                    members.iter().map(|input| &input[here.clone()]).collect();
                self.reduce_to_partial(&members, &mut partial[..here.len()]);
                rest = others;
            }
            let partials: Vec<&[u8]> =
                partials.iter().map(|partial| &partial[..here.len()]).collect();
            self.finish_partials(&partials, &mut out[here]);
        }
    }

    /// Like [`reduce_blocks`](Self::reduce_blocks), but writes the result into all inputs, which
    /// have equal lengths. If the kernel can, it does this in one pass. Otherwise the results of
    /// `block.len()` bytes at a time are computed in `block` and copied. `block` must not be empty.
    pub fn reduce_in_place(&self, all: &mut [&mut [u8]], block: &mut [u8]) {
        // SAFETY: `with_order` checked that this processor has the instructions for which the
        // kernel was compiled.
        if self.orders.is_none() && unsafe { self.kernel.reduce_in_place(all) } {
            return;
        }
        let bytes = all.iter().map(|one| one.len()).min().unwrap_or(0);
        for start in (0..bytes).step_by(block.len()) {
            let here = start..bytes.min(start + block.len());
            let result = &mut block[..here.len()];
            let inputs: Vec<&[u8]> = all.iter().map(|one| &one[here.clone()]).collect();
            self.reduce_blocks(&inputs, result);
            for one in &mut *all {
                one[here.clone()].copy_from_slice(result);
            }
        }
    }

    /// Returns the form in which hosts exchange partials.
    fn partial_form(&self) -> BlockForm {
        if self.rounding.is_some() { BlockForm::Rounded } else { BlockForm::Partial }
    }

    /// Returns the size of a partial as a multiple of the size of an element.
    pub fn partial_expansion(&self) -> usize {
        if self.rounding.is_some() { 1 } else { self.accumulator_expansion() }
    }

    /// Combines the `inputs` of a host's members into a partial.
    pub fn reduce_to_partial(&self, inputs: &[&[u8]], partial: &mut [u8]) {
        self.run_kernel(BlockForm::Element, self.partial_form(), None, inputs, partial);
    }

    /// Returns the size of an accumulator as a multiple of the size of an element.
    pub fn accumulator_expansion(&self) -> usize {
        self.kernel.accumulator_expansion()
    }

    /// Like [`reduce_to_partial`](Self::reduce_to_partial), but writes accumulators, which
    /// [`merge_accumulators`](Self::merge_accumulators) combines.
    pub fn accumulate_inputs(&self, inputs: &[&[u8]], accumulators: &mut [u8]) {
        if self.rounding.is_none() {
            return self.run_kernel(
                BlockForm::Element,
                BlockForm::Partial,
                None,
                inputs,
                accumulators,
            );
        }
        let mut rounded = vec![0; accumulators.len() / self.accumulator_expansion()];
        // Rounded and widened again, so that the bits are the same as with an algorithm that sends
        // the rounded partial.
        self.reduce_to_partial(inputs, &mut rounded);
        self.run_kernel(BlockForm::Rounded, BlockForm::Partial, None, &[&rounded], accumulators);
    }

    /// Computes the result from the accumulators over all hosts.
    pub fn finish_accumulators(&self, accumulators: &[u8], out: &mut [u8]) {
        self.run_kernel(BlockForm::Partial, BlockForm::Element, None, &[accumulators], out);
    }

    /// Combines the accumulators of two neighbours.
    pub fn merge_accumulators(&self, earlier: &[u8], later: &[u8], partial: &mut [u8]) {
        self.run_kernel(BlockForm::Partial, BlockForm::Partial, None, &[earlier, later], partial);
    }

    /// Computes the result from the partials of all hosts.
    pub fn finish_partials(&self, partials: &[&[u8]], out: &mut [u8]) {
        // A tree writes its result in its last merge, and a single partial has no merge.
        let orders = self.orders.as_ref().filter(|_| partials.len() > 1);
        self.run_kernel(
            self.partial_form(),
            BlockForm::Element,
            orders.map(|orders| &orders.hosts),
            partials,
            out,
        );
    }

    fn run_kernel(
        &self,
        from: BlockForm,
        to: BlockForm,
        order: Option<&ReductionOrder>,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) {
        // SAFETY: `with_order` checked that this processor has the instructions for which the
        // kernel was compiled.
        unsafe { self.kernel.reduce_blocks(from, to, order, inputs, out) }
    }
}

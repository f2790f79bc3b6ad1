# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reductions of one tensor or a group, and their gradients: the base of all forms of allreduce.

A gradient is the derivative of the sum of all ranks' losses. By Horovod's convention, gradients are
reduced by the op itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farandole._native import engine
from farandole.common import gradient_convention
from farandole.common.handles import process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import OPERATION_NAMES, Average, Max, Min, Product, Sum, engine_op_number
from farandole.torch import _large_tensor_memory
from farandole.torch._gpu_tensors import gpu_and_stream_of, gpus_and_streams_of
from farandole.torch._handles import (
    ENGINE_DTYPES,
    copy_without_autograd,
    describe_tensor,
    must_record_gradient,
    require_contiguous_tensor,
    synchronize,
    table,
    to_engine_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorReduction(NamedTuple):
    """The reduction of the tensors of all ranks."""

    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    rounds: bool = False
    """Whether partial sums of 16-bit floats are rounded between hosts."""

    @property
    def engine_arguments(self) -> tuple[int, float, float, int]:
        """The arguments for the engine."""
        number = engine_op_number(self.op, self.rounds)
        return number, self.prescale, self.postscale, process_set_number(self.process_set)


def start_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    reduction: TensorReduction,
    in_place: bool,
    caller_waits: bool,
) -> int:
    """Starts an allreduce, into a new tensor unless `in_place`; `caller_waits` when `synchronize`
    follows at once.
    """
    op, prescale, postscale, number = reduction.engine_arguments
    source = to_engine_tensor(tensor)
    if in_place and source is not tensor:
        require_contiguous_tensor(tensor)
    # A private copy serves as its own result.
    target = (
        _large_tensor_memory.uninitialized_like(source)
        if source is tensor and not in_place
        else source
    )
    return table.submit_operation(
        (source, target),
        (lambda _: copy_without_autograd(tensor, source))
        if in_place
        else (lambda _: target.to(tensor.device)),
        engine.allreduce,
        table.operation_name("allreduce", name, reduction.process_set),
        ENGINE_DTYPES[source.dtype],
        source.shape,
        source.data_ptr(),
        target.data_ptr(),
        op,
        prescale,
        postscale,
        number,
        caller_waits,
        gpu_and_stream_of(source),
    )


def start_grouped_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, reduction: TensorReduction, in_place: bool
) -> int:
    """Starts the allreduces of several tensors as one unit, into new ones unless `in_place`."""
    if in_place:
        for tensor in tensors:
            require_contiguous_tensor(tensor)
    arguments = reduction.engine_arguments
    sources = [to_engine_tensor(tensor) for tensor in tensors]
    targets = [
        _large_tensor_memory.uninitialized_like(source)
        if source is tensor and not in_place
        else source
        for source, tensor in zip(sources, tensors, strict=True)
    ]
    names = table.group_member_names("grouped_allreduce", name, len(tensors), reduction.process_set)
    members = [
        (*describe_tensor(member, source), target.data_ptr())
        for member, source, target in zip(names, sources, targets, strict=True)
    ]

    def finish_grouped_allreduce(_: object) -> list[torch.Tensor]:
        if in_place:
            return [
                copy_without_autograd(tensor, source)
                for tensor, source in zip(tensors, sources, strict=True)
            ]
        return [target.to(tensor.device) for tensor, target in zip(tensors, targets, strict=True)]

    return table.submit_operation(
        (sources, targets),
        finish_grouped_allreduce,
        engine.grouped_allreduce,
        members,
        *arguments,
        gpus_and_streams_of(sources),
    )


def reduce_tensor(
    tensor: torch.Tensor,
    name: str | None,
    reduction: TensorReduction,
    is_used_by_reduction_only: bool = False,
) -> torch.Tensor:
    """Reduces a tensor over all ranks, into a new tensor or, if `is_used_by_reduction_only`, in
    place; differentiable.
    """
    if must_record_gradient(tensor):
        return _reduce_differentiably([tensor], name, reduction, grouped=False)[0]
    in_place = is_used_by_reduction_only and tensor.is_contiguous()
    return synchronize(start_allreduce(tensor, name, reduction, in_place, caller_waits=True))


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: TensorReduction,
    is_used_by_reduction_only: bool = False,
) -> list[torch.Tensor]:
    """Reduces several tensors over all ranks as one unit, into new tensors or, if
    `is_used_by_reduction_only`, in place; differentiable.
    """
    if must_record_gradient(*tensors):
        return _reduce_differentiably(tensors, name, reduction, grouped=True)
    in_place = is_used_by_reduction_only and all(tensor.is_contiguous() for tensor in tensors)
    return synchronize(start_grouped_allreduce(tensors, name, reduction, in_place))


def _reduce_differentiably(
    tensors: Sequence[torch.Tensor], name: str | None, reduction: TensorReduction, grouped: bool
) -> list[torch.Tensor]:
    if reduction.op in (Min, Max, Product) and not gradient_convention.uses_horovod_gradients():
        kind = _ProductReduction if reduction.op == Product else _MinMaxReduction
        plain = reduction._replace(prescale=1.0, postscale=1.0)
        scaled = [_scale_like_engine(tensor, reduction.prescale) for tensor in tensors]
        return [
            _scale_like_engine(result, reduction.postscale)
            for result in kind.apply(grouped, name, plain, *scaled)
        ]
    return list(_LinearReduction.apply(grouped, name, reduction, *tensors))


def _scale_like_engine(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Scales like the engine: integers truncate toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


class _ReductionFunction(torch.autograd.Function):
    """The forward half of every reduction; also saves the arguments of the backward half."""

    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str | None,
        reduction: TensorReduction,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.grouped, ctx.reduction = grouped, reduction
        ctx.backward_name = None if name is None else f"{name}.backward"
        if grouped:
            results = synchronize(start_grouped_allreduce(tensors, name, reduction, in_place=False))
        else:
            results = [
                synchronize(
                    start_allreduce(tensors[0], name, reduction, in_place=False, caller_waits=True)
                )
            ]
        if reduction.op in (Min, Max, Product) and not gradient_convention.uses_horovod_gradients():
            ctx.save_for_backward(*tensors, *results)
        return tuple(results)

    @staticmethod
    def grad_requiring_indices(ctx: Any) -> list[int]:
        """Returns the tensors that require a gradient, the same ones on every rank."""
        return [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]

    @staticmethod
    def pad_gradients_with_none(
        ctx: Any, grads: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns a gradient for each wanted tensor, and `None` for every other argument."""
        places: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, grad in zip(_ReductionFunction.grad_requiring_indices(ctx), grads, strict=True):
            places[3 + i] = grad
        return tuple(places)


class _LinearReduction(_ReductionFunction):
    """Sum and Average: the gradient is reduced in the same way as the tensor. By Horovod's
    convention, this applies to every op.
    """

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if (
            ctx.reduction.op not in (Sum, Average)
            and not gradient_convention.uses_horovod_gradients()
        ):
            raise ValueError(f"this reduction has no gradient: {OPERATION_NAMES[ctx.reduction.op]}")
        wanted = [grads[i] for i in _ReductionFunction.grad_requiring_indices(ctx)]
        if not ctx.grouped:
            return _ReductionFunction.pad_gradients_with_none(
                ctx, [reduce_tensor(wanted[0], ctx.backward_name, ctx.reduction)]
            )
        return _ReductionFunction.pad_gradients_with_none(
            ctx, reduce_tensors(wanted, ctx.backward_name, ctx.reduction)
        )


class _MinMaxReduction(_ReductionFunction):
    """Min and Max: the gradient goes to the ranks and elements that hold the extreme, in equal
    parts.
    """

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted, count = _ReductionFunction.grad_requiring_indices(ctx), len(grads)
        inputs, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        holds = [
            ((inputs[i] == results[i]) | (inputs[i].isnan() & results[i].isnan())).to(
                grads[i].dtype
            )
            for i in wanted
        ]
        sums = reduce_tensors(
            [*(grads[i] for i in wanted), *holds], ctx.backward_name, ctx.reduction._replace(op=Sum)
        )
        totals, holders = sums[: len(wanted)], sums[len(wanted) :]
        return _ReductionFunction.pad_gradients_with_none(
            ctx,
            [
                total * held / number.clamp(min=1)
                for total, held, number in zip(totals, holds, holders, strict=True)
            ],
        )


class _ProductReduction(_ReductionFunction):
    """Product: the gradient is the product of the other ranks' elements, also if some are zero."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = _ReductionFunction.grad_requiring_indices(ctx)
        inputs = [ctx.saved_tensors[i] for i in wanted]
        zeros = [(tensor == 0).to(tensor.dtype) for tensor in inputs]
        filled = [torch.where(tensor == 0, torch.ones_like(tensor), tensor) for tensor in inputs]
        sums = reduce_tensors(
            [*(grads[i] for i in wanted), *zeros], ctx.backward_name, ctx.reduction._replace(op=Sum)
        )
        name = None if ctx.backward_name is None else f"{ctx.backward_name}.filled"
        products = reduce_tensors(filled, name, ctx.reduction)
        totals, numbers = sums[: len(wanted)], sums[len(wanted) :]
        return _ReductionFunction.pad_gradients_with_none(
            ctx,
            [
                total * torch.where(number - zero > 0, torch.zeros_like(own), product / own).conj()
                for total, number, zero, own, product in zip(
                    totals, numbers, zeros, filled, products, strict=True
                )
            ],
        )

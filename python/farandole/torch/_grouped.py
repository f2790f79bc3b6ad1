# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Grouped allreduce: several tensors that complete together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common.process_sets import ProcessSet, global_process_set, require_global
from farandole.common.util import Average, Sum, choose_op
from farandole.torch._handles import (
    DTYPES,
    copy_back,
    host_input,
    operation_name,
    require_in_place,
    synchronize,
    track_group,
)
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Sequence


def _submit(
    tensors: Sequence[torch.Tensor], in_place: bool, name: str | None, op: int, factors: tuple[float, float]
) -> int:
    if not tensors:
        raise ValueError("a group has at least one tensor")
    if in_place:
        for tensor in tensors:
            require_in_place(tensor)
    sources = [host_input(tensor) for tensor in tensors]
    # What the engine writes to: the tensor itself, a private copy of it, or something new.
    targets = [
        source if in_place or source is not tensor else torch.empty_like(source)
        for source, tensor in zip(sources, tensors, strict=True)
    ]
    base = operation_name("grouped_allreduce", name)
    members = [
        (f"{base}_{i}of{len(sources)}", DTYPES[source.dtype], source.shape, source.data_ptr(), target.data_ptr())
        for i, (source, target) in enumerate(zip(sources, targets, strict=True), start=1)
    ]
    handles = engine.grouped_allreduce(members, op, *factors, 0)

    def finish(_: engine.Gathered | None) -> list[torch.Tensor]:
        if in_place:
            return [
                tensor if target is tensor else copy_back(tensor, target)
                for tensor, target in zip(tensors, targets, strict=True)
            ]
        return [target.to(tensor.device) for tensor, target in zip(tensors, targets, strict=True)]

    return track_group(handles, (sources, targets), finish)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of several tensors as one unit; `synchronize` returns the list of results.

    Arguments and errors are those of `allreduce_async`; member `i` of `n` is named `<name>_<i>of<n>`.
    """
    op = choose_op(op, average)
    require_global(process_set)
    return _submit(tensors, False, name, op, (prescale_factor, postscale_factor))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites several contiguous tensors; else as `grouped_allreduce_async`."""
    op = choose_op(op, average)
    require_global(process_set)
    return _submit(tensors, True, name, op, (prescale_factor, postscale_factor))


class _GroupedAllreduce(torch.autograd.Function):
    """Grouped allreduce with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, pre: float, post: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = op, pre, post
        return tuple(synchronize(grouped_allreduce_async(tensors, None, name, op, pre, post)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, pre, post = ctx.arguments
        if op not in (Average, Sum):
            raise ValueError("only Average and Sum have a gradient")
        reduced = grouped_allreduce(grads, op=op, prescale_factor=pre, postscale_factor=post)
        return None, None, None, None, *reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combines several tensors over all ranks as one unit into new ones; else as `allreduce`, also in its gradient."""
    op = choose_op(op, average)
    require_global(process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in compressed):
        reduced = _GroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, *compressed)
    else:
        handle = grouped_allreduce_async(compressed, None, name, op, prescale_factor, postscale_factor)
        reduced = synchronize(handle)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, but overwrites the tensors, which must be contiguous, and returns them. No gradient."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)

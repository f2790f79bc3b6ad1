# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce: every rank gets the combination of all ranks' tensors."""

from __future__ import annotations

from typing import Any

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
    track,
)
from farandole.torch.compression import Compression, Compressor

Factors = tuple[float, float]
"""What inputs and the result are multiplied by."""


def _start(tensor: torch.Tensor, name: str | None, op: int, factors: Factors, attended: bool) -> int:
    """Starts an allreduce into a new tensor; `attended` when `synchronize` follows at once."""
    source = host_input(tensor)
    # A private copy serves as its own result.
    target = torch.empty_like(source) if source is tensor else source
    handle = engine.allreduce(
        operation_name("allreduce", name),
        DTYPES[source.dtype],
        source.shape,
        source.data_ptr(),
        target.data_ptr(),
        op,
        *factors,
        0,
        attended,
    )
    return track(handle, source, lambda _: target if tensor.is_cpu else target.to(tensor.device))


def _start_in_place(tensor: torch.Tensor, name: str | None, op: int, factors: Factors, attended: bool) -> int:
    """Starts an allreduce that overwrites `tensor`; `attended` when `synchronize` follows at once."""
    require_in_place(tensor)
    source = host_input(tensor)
    address = source.data_ptr()
    handle = engine.allreduce(
        operation_name("allreduce", name),
        DTYPES[source.dtype],
        source.shape,
        address,
        address,
        op,
        *factors,
        0,
        attended,
    )
    return track(handle, source, lambda _: tensor if source is tensor else copy_back(tensor, source))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce into a new tensor.

    Args:
        tensor: Any dense tensor; equal shape and dtype on all ranks. Must not be changed until `synchronize`. A
            tensor on a GPU goes through host memory.
        average: Deprecated; use `op`.
        name: Names the operation across ranks; unnamed operations match in the order they are issued.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The global one.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation of this name is under way.
        FarandoleInternalError: When the world is broken already.
    """
    op = choose_op(op, average)
    require_global(process_set)
    return _start(tensor, name, op, (prescale_factor, postscale_factor), attended=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites `tensor`, which must be contiguous; else as `allreduce_async`."""
    op = choose_op(op, average)
    require_global(process_set)
    return _start_in_place(tensor, name, op, (prescale_factor, postscale_factor), attended=False)


class _Allreduce(torch.autograd.Function):
    """Allreduce with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: int, pre: float, post: float) -> torch.Tensor:
        ctx.arguments = op, pre, post
        return synchronize(_start(tensor, name, op, (pre, post), attended=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        op, pre, post = ctx.arguments
        if op not in (Average, Sum):
            raise ValueError("only Average and Sum have a gradient")
        return allreduce(grads[0], op=op, prescale_factor=pre, postscale_factor=post), None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines all ranks' tensors into a new one, the same on every rank.

    Differentiable for `Average` and `Sum`: the gradient is allreduced by the same operation. `Min`, `Max` and
    `Product` have none here, where Horovod would return a wrong one.

    Args:
        tensor: As for `allreduce_async`.
        average: Deprecated; use `op`.
        name: As for `allreduce_async`.
        compression: Makes the tensor smaller on the wire, e.g. `Compression.bf16`.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The global one.

    Returns:
        A tensor of the same shape, dtype and device.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    op = choose_op(op, average)
    require_global(process_set)
    compressed, ctx = compression.compress(tensor)
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced = _Allreduce.apply(compressed, name, op, prescale_factor, postscale_factor)
    else:
        factors = (prescale_factor, postscale_factor)
        reduced = synchronize(_start(compressed, name, op, factors, attended=True))
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, but overwrites `tensor`, which must be contiguous, and returns it. No gradient."""
    op = choose_op(op, average)
    require_global(process_set)
    return synchronize(_start_in_place(tensor, name, op, (prescale_factor, postscale_factor), attended=True))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Broadcast: every rank gets one rank's tensor."""

from __future__ import annotations

from typing import Any

import torch

from farandole._native import engine
from farandole.common import basics, gradient_convention
from farandole.common.exceptions import FarandoleUsageError
from farandole.common.handles import member_ranks, process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Sum
from farandole.torch import _large_tensor_memory
from farandole.torch._gpu_tensors import gpu_and_stream_of
from farandole.torch._handles import (
    MOVABLE_DTYPES,
    copy_without_autograd,
    describe_tensor,
    must_record_gradient,
    require_contiguous_tensor,
    synchronize,
    table,
    to_engine_tensor,
)
from farandole.torch._reduce import TensorReduction, reduce_tensor


def _start_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    in_place: bool,
    caller_waits: bool,
) -> int:
    """Starts a broadcast, into a new tensor unless `in_place`; `caller_waits` when `synchronize`
    follows at once.
    """
    if in_place:
        require_contiguous_tensor(tensor)
    number = process_set_number(process_set)
    ranks = member_ranks(process_set)
    if root_rank not in ranks:
        raise FarandoleUsageError(
            f"root_rank must be a global rank among the members {ranks}: {root_rank!r}"
        )
    source = to_engine_tensor(tensor, MOVABLE_DTYPES)
    # A private copy serves as its own result.
    target = (
        _large_tensor_memory.uninitialized_like(source)
        if source is tensor and not in_place
        else source
    )
    described = describe_tensor(table.operation_name("broadcast", name, process_set), source)
    submission = (
        engine.broadcast,
        *described,
        target.data_ptr(),
        root_rank,
        number,
        caller_waits,
        gpu_and_stream_of(source),
    )
    if in_place:
        return table.submit_operation(
            source, lambda _: copy_without_autograd(tensor, source), *submission
        )
    return table.submit_operation((source, target), lambda _: target.to(tensor.device), *submission)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast into a new tensor.

    Args:
        tensor: Any dense tensor; equal shape and dtype on all ranks, the values of the root count.
            Must not be changed until `synchronize`.
        root_rank: The rank that sends, always a global rank, also within a process set; equal on
            all ranks.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_broadcast(
        tensor, root_rank, name, process_set, in_place=False, caller_waits=False
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast that overwrites `tensor`, which must be contiguous; else as
    `broadcast_async`.
    """
    return _start_broadcast(tensor, root_rank, name, process_set, in_place=True, caller_waits=False)


class _BroadcastFunction(torch.autograd.Function):
    """Broadcast with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.is_root = basics.rank() == root_rank
        ctx.reduction = TensorReduction(
            Average if gradient_convention.uses_horovod_gradients() else Sum,
            process_set=process_set,
        )
        ctx.backward_name = None if name is None else f"{name}.backward"
        return synchronize(
            _start_broadcast(
                tensor, root_rank, name, process_set, in_place=False, caller_waits=True
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = reduce_tensor(grads[0], ctx.backward_name, ctx.reduction)
        # Zeros that depend on `total`: a second backward pass must run this function on every
        # rank.
        return (
            total
            if ctx.is_root
            else total.masked_fill(torch.tensor(data=True, device=total.device), 0),
            None,
            None,
            None,
        )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank.

    Differentiable: the root's gradient is the *sum* of all ranks' gradients, or their average where
    gradients follow Horovod (`FARANDOLE_GRADIENT_CONVENTION`). The gradient of the other ranks is
    zero.

    Args:
        tensor: As for `broadcast_async`.
        root_rank: As for `broadcast_async`.
        name: As for `broadcast_async`.
        process_set: As for `broadcast_async`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    if must_record_gradient(tensor):
        return _BroadcastFunction.apply(tensor, root_rank, name, process_set)
    return synchronize(
        _start_broadcast(tensor, root_rank, name, process_set, in_place=False, caller_waits=True)
    )


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `broadcast`, but overwrites `tensor`, which must be contiguous, and returns it. No
    gradient.
    """
    return synchronize(
        _start_broadcast(tensor, root_rank, name, process_set, in_place=True, caller_waits=True)
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Broadcast: every rank gets one rank's tensor."""

from __future__ import annotations

from typing import Any

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.common.process_sets import ProcessSet, global_process_set, require_global
from farandole.common.util import Average
from farandole.torch._allreduce import allreduce
from farandole.torch._handles import (
    DTYPES,
    copy_back,
    host_input,
    operation_name,
    require_in_place,
    synchronize,
    track,
)


def _start(tensor: torch.Tensor, root_rank: int, name: str | None, attended: bool) -> int:
    """Starts a broadcast into a new tensor; `attended` when `synchronize` follows at once."""
    _require_root(root_rank)
    source = host_input(tensor)
    # A private copy serves as its own result.
    target = torch.empty_like(source) if source is tensor else source
    handle = engine.broadcast(
        operation_name("broadcast", name),
        DTYPES[source.dtype],
        source.shape,
        source.data_ptr(),
        target.data_ptr(),
        root_rank,
        0,
        attended,
    )
    return track(handle, source, lambda _: target if tensor.is_cpu else target.to(tensor.device))


def _start_in_place(tensor: torch.Tensor, root_rank: int, name: str | None, attended: bool) -> int:
    """Starts a broadcast that overwrites `tensor`; `attended` when `synchronize` follows at once."""
    _require_root(root_rank)
    require_in_place(tensor)
    source = host_input(tensor)
    address = source.data_ptr()
    handle = engine.broadcast(
        operation_name("broadcast", name), DTYPES[source.dtype], source.shape, address, address, root_rank, 0, attended
    )
    return track(handle, source, lambda _: tensor if source is tensor else copy_back(tensor, source))


def _require_root(root_rank: int) -> None:
    if not 0 <= root_rank < basics.size():
        raise ValueError(f"root_rank must be a rank of this world of {basics.size()}: {root_rank!r}")


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast into a new tensor.

    Args:
        tensor: Any dense tensor; equal shape and dtype on all ranks, the values of the root count. Must not be changed
            until `synchronize`. A tensor on a GPU goes through host memory.
        root_rank: The global rank that sends; equal on all ranks.
        name: Names the operation across ranks; unnamed operations match in the order they are issued.
        process_set: The global one.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation of this name is under way.
        FarandoleInternalError: When the world is broken already.
    """
    require_global(process_set)
    return _start(tensor, root_rank, name, attended=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast that overwrites `tensor`, which must be contiguous; else as `broadcast_async`."""
    require_global(process_set)
    return _start_in_place(tensor, root_rank, name, attended=False)


class _Broadcast(torch.autograd.Function):
    """Broadcast with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.is_root = basics.rank() == root_rank
        return synchronize(_start(tensor, root_rank, name, attended=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        reduced = allreduce(grads[0], op=Average)
        return reduced if ctx.is_root else torch.zeros_like(reduced), None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's tensor on every rank.

    Differentiable as in Horovod: the root's gradient is the average of all ranks' gradients, that of others is zero.

    Args:
        tensor: As for `broadcast_async`.
        root_rank: As for `broadcast_async`.
        name: As for `broadcast_async`.
        process_set: The global one.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    require_global(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name)
    return synchronize(_start(tensor, root_rank, name, attended=True))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast`, but overwrites `tensor`, which must be contiguous, and returns it. No gradient."""
    require_global(process_set)
    return synchronize(_start_in_place(tensor, root_rank, name, attended=True))

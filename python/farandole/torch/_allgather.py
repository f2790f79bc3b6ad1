# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allgather: every rank gets all ranks' tensors, one after the other."""

from __future__ import annotations

from typing import Any

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.common.process_sets import ProcessSet, global_process_set, require_global
from farandole.common.util import Sum
from farandole.torch._allreduce import allreduce
from farandole.torch._handles import DTYPES, host_input, operation_name, synchronize, track


def _start(tensor: torch.Tensor, name: str | None, finish: Any, attended: bool) -> int:
    """Starts an allgather; `finish` gets the result and the rows every rank gave, `synchronize` returns what it does.

    `attended` when `synchronize` follows at once.
    """
    if tensor.dim() == 0:
        raise ValueError("allgather needs a tensor of at least one dimension: shape ()")
    source = host_input(tensor)
    handle = engine.allgather(
        operation_name("allgather", name), DTYPES[source.dtype], source.shape, source.data_ptr(), 0, attended
    )

    def adopt(gathered: engine.Gathered | None) -> Any:
        rows = gathered.rows if gathered is not None else []
        shape = (sum(rows), *source.shape[1:])
        if gathered is None or len(gathered) == 0:
            return finish(torch.empty(shape, dtype=source.dtype, device=tensor.device), rows)
        # No copy: the tensor holds the engine's memory.
        whole = torch.frombuffer(gathered, dtype=source.dtype).view(shape)
        return finish(whole.to(tensor.device), rows)

    return track(handle, source, adopt)


def _whole(whole: torch.Tensor, _: list[int]) -> torch.Tensor:
    return whole


def _whole_and_rows(whole: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, list[int]]:
    return whole, rows


def gather_with_rows(tensor: torch.Tensor, name: str | None) -> tuple[torch.Tensor, list[int]]:
    """As `allgather`, without a gradient; returns also the number of rows every rank gave."""
    return synchronize(_start(tensor, name, _whole_and_rows, attended=True))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an allgather.

    Args:
        tensor: A dense tensor of at least one dimension. Ranks may differ in the first dimension only, which may be 0.
            Must not be changed until `synchronize`. A tensor on a GPU goes through host memory.
        name: Names the operation across ranks; unnamed operations match in the order they are issued.
        process_set: The global one.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation of this name is under way.
        FarandoleInternalError: When the world is broken already.
    """
    require_global(process_set)
    return _start(tensor, name, _whole, attended=False)


class _Allgather(torch.autograd.Function):
    """Allgather with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        whole, ctx.rows = gather_with_rows(tensor, name)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank = basics.rank()
        return allreduce(grads[0], op=Sum).narrow(0, sum(ctx.rows[:rank]), ctx.rows[rank]), None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in the order of ranks.

    Differentiable: the gradient of this rank's rows is the *sum* of what all ranks derive for them, as the chain rule
    and torch.distributed have it. Horovod averages them.

    Args:
        tensor: As for `allgather_async`.
        name: As for `allgather_async`.
        process_set: The global one.

    Returns:
        A tensor of the same dtype and device, equal on all ranks.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    require_global(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Allgather.apply(tensor, name)
    return synchronize(_start(tensor, name, _whole, attended=True))

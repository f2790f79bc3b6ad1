# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allgather: every rank gets all ranks' tensors, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common import convention
from farandole.common.handles import set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.torch._alltoall import exchange
from farandole.torch._device import spot, spots
from farandole.torch._handles import (
    MOVED,
    adopt,
    describe,
    require_dimension,
    synchronize,
    table,
    usable,
    wants_grad,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Rows = tuple[torch.Tensor, list[int]]
"""A tensor of all ranks' rows, and how many every rank gave."""


def _rows(gathered: Any, source: torch.Tensor, tensor: torch.Tensor) -> Rows:
    return adopt(gathered, source, tensor.device), gathered.rows if gathered is not None else []


def _whole(rows: Rows) -> torch.Tensor:
    return rows[0]


def _start_one(
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Rows], Any],
    attended: bool,
) -> int:
    """Starts an allgather; `attended` when `synchronize` follows at once."""
    require_dimension("allgather", tensor)
    number = set_number(process_set)
    source = usable(tensor, MOVED)
    described = describe(table.name("allgather", name, process_set), source)

    def finish(outcomes: list[Any]) -> Any:
        return result(_rows(outcomes[0], source, tensor))

    return table.submit(
        source, finish, engine.allgather, *described, number, attended, spot(source)
    )


def _start_group(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Rows], Any],
) -> int:
    """Starts the allgathers of several tensors as one unit."""
    for tensor in tensors:
        require_dimension("allgather", tensor)
    number = set_number(process_set)
    sources = [usable(tensor, MOVED) for tensor in tensors]
    names = table.names("grouped_allgather", name, len(tensors), process_set)
    members = [describe(member, source) for member, source in zip(names, sources, strict=True)]

    def finish(outcomes: list[Any]) -> list[Any]:
        return [result(rows) for rows in map(_rows, outcomes, sources, tensors)]

    return table.submit(sources, finish, engine.grouped_allgather, members, number, spots(sources))


def gather_rows(
    tensor: torch.Tensor, name: str | None, process_set: ProcessSet = global_process_set
) -> Rows:
    """Like `allgather`, without a gradient; returns also the number of rows every rank gave."""
    return synchronize(_start_one(tensor, name, process_set, tuple, attended=True))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather.

    Args:
        tensor: A dense tensor of at least one dimension. Ranks may differ in the first dimension
            only, which may be 0. Must not be changed until `synchronize`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_one(tensor, name, process_set, _whole, attended=False)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allgather of several tensors as one unit; `synchronize` returns the list of
    results.

    Arguments and errors are those of `allgather_async`; the first member is named `<name>`, member
    `i` of `n` after it `<name>_<i>of<n>`.
    """
    return _start_group(tensors, name, process_set, _whole)


class _Allgather(torch.autograd.Function):
    """Allgather with a gradient: every rank sends the others what it derived for their rows."""

    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.backward_name = None if name is None else f"{name}.backward"
        if grouped:
            results = synchronize(_start_group(tensors, name, process_set, tuple))
        else:
            results = [gather_rows(tensors[0], name, process_set)]
        ctx.rows = [rows for _, rows in results]
        return tuple(whole for whole, _ in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mine = ctx.process_set.rank()
        places: list[torch.Tensor | None] = [None, None, None]
        for i, (grad, rows, needed) in enumerate(
            zip(grads, ctx.rows, ctx.needs_input_grad[3:], strict=True)
        ):
            if not needed:
                places.append(None)
                continue
            name = None if ctx.backward_name is None else f"{ctx.backward_name}.{i}"
            derived, _ = exchange(grad, rows, name, ctx.process_set)
            parts = derived.view(len(rows), rows[mine], *grad.shape[1:])
            places.append(parts.mean(0) if convention.is_horovods() else parts.sum(0))
        return tuple(places)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in the order of ranks.

    Differentiable: the gradient of this rank's rows is the *sum* of what all ranks derive for them,
    as the chain rule and torch.distributed have it; their average where gradients follow Horovod
    (`FARANDOLE_GRADIENT_CONVENTION`).

    Args:
        tensor: As for `allgather_async`.
        name: As for `allgather_async`.
        process_set: As for `allgather_async`.

    Returns:
        A tensor of the same dtype and device, equal on all ranks.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    if wants_grad(tensor):
        return _Allgather.apply(False, name, process_set, tensor)[0]
    return gather_rows(tensor, name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Concatenates all ranks' tensors, several at once as one unit; else as `allgather`, also in
    its gradient.
    """
    if wants_grad(*tensors):
        return list(_Allgather.apply(True, name, process_set, *tensors))
    return synchronize(grouped_allgather_async(tensors, name, process_set))

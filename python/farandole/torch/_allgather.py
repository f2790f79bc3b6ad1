# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allgather: every rank gets all ranks' tensors, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common import gradient_convention
from farandole.common.handles import process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.torch._alltoall import alltoall_with_splits
from farandole.torch._gpu_tensors import gpu_and_stream_of, gpus_and_streams_of
from farandole.torch._handles import (
    MOVABLE_DTYPES,
    describe_tensor,
    must_record_gradient,
    require_dimension,
    synchronize,
    table,
    to_engine_tensor,
    wrap_collected_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GatheredRows = tuple[torch.Tensor, list[int]]
"""A tensor of all ranks' rows, and the number of rows of every rank."""


def _wrap_gathered_rows(gathered: Any, source: torch.Tensor, tensor: torch.Tensor) -> GatheredRows:
    return wrap_collected_rows(
        gathered, source, tensor.device
    ), gathered.rows if gathered is not None else []


def _rows_without_counts(rows: GatheredRows) -> torch.Tensor:
    return rows[0]


def _start_allgather(
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[GatheredRows], Any],
    caller_waits: bool,
) -> int:
    """Starts an allgather; `caller_waits` if `synchronize` follows at once."""
    require_dimension("allgather", tensor)
    number = process_set_number(process_set)
    source = to_engine_tensor(tensor, MOVABLE_DTYPES)
    described = describe_tensor(table.operation_name("allgather", name, process_set), source)

    def finish_allgather(outcomes: list[Any]) -> Any:
        return result(_wrap_gathered_rows(outcomes[0], source, tensor))

    return table.submit_operation(
        source,
        finish_allgather,
        engine.allgather,
        *described,
        number,
        caller_waits,
        gpu_and_stream_of(source),
    )


def _start_grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[GatheredRows], Any],
) -> int:
    """Starts the allgathers of several tensors as one unit."""
    for tensor in tensors:
        require_dimension("allgather", tensor)
    number = process_set_number(process_set)
    sources = [to_engine_tensor(tensor, MOVABLE_DTYPES) for tensor in tensors]
    names = table.group_member_names("grouped_allgather", name, len(tensors), process_set)
    members = [
        describe_tensor(member, source) for member, source in zip(names, sources, strict=True)
    ]

    def finish_grouped_allgather(outcomes: list[Any]) -> list[Any]:
        return [result(rows) for rows in map(_wrap_gathered_rows, outcomes, sources, tensors)]

    return table.submit_operation(
        sources,
        finish_grouped_allgather,
        engine.grouped_allgather,
        members,
        number,
        gpus_and_streams_of(sources),
    )


def allgather_rows_and_counts(
    tensor: torch.Tensor, name: str | None, process_set: ProcessSet = global_process_set
) -> GatheredRows:
    """Like `allgather`, without a gradient; returns also the number of rows every rank gave."""
    return synchronize(_start_allgather(tensor, name, process_set, tuple, caller_waits=True))


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
    return _start_allgather(tensor, name, process_set, _rows_without_counts, caller_waits=False)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allgather of several tensors as one unit; `synchronize` returns the list of
    results.

    Takes the arguments and raises the errors of `allgather_async`. The first member is named
    `<name>`, member `i` of `n` after it `<name>_<i>of<n>`.
    """
    return _start_grouped_allgather(tensors, name, process_set, _rows_without_counts)


class _AllgatherFunction(torch.autograd.Function):
    """Allgather with a gradient: every rank sends each other rank the gradient of its rows."""

    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.backward_name = None if name is None else f"{name}.backward"
        if grouped:
            results = synchronize(_start_grouped_allgather(tensors, name, process_set, tuple))
        else:
            results = [allgather_rows_and_counts(tensors[0], name, process_set)]
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
            derived, _ = alltoall_with_splits(grad, rows, name, ctx.process_set)
            parts = derived.view(len(rows), rows[mine], *grad.shape[1:])
            places.append(
                parts.mean(0) if gradient_convention.uses_horovod_gradients() else parts.sum(0)
            )
        return tuple(places)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in the order of ranks.

    Differentiable: the gradient of this rank's rows is the *sum* of all ranks' gradients for them,
    by the chain rule and as in torch.distributed; their average where gradients follow Horovod
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
    if must_record_gradient(tensor):
        return _AllgatherFunction.apply(False, name, process_set, tensor)[0]
    return allgather_rows_and_counts(tensor, name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Concatenates all ranks' tensors, several at once as one unit; else as `allgather`, also in
    its gradient.
    """
    if must_record_gradient(*tensors):
        return list(_AllgatherFunction.apply(True, name, process_set, *tensors))
    return synchronize(grouped_allgather_async(tensors, name, process_set))

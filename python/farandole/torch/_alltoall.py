# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Alltoall: every rank sends some of its rows to every other rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common.counted_noun import format_counted_noun
from farandole.common.exceptions import FarandoleUsageError
from farandole.common.handles import member_ranks, process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.torch._gpu_tensors import gpu_and_stream_of
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
    from collections.abc import Sequence

    Splits = Sequence[int] | torch.Tensor | None


def _rows_for_each_member(
    tensor: torch.Tensor, splits: Splits, process_set: ProcessSet
) -> list[int]:
    """Returns the number of rows for each member.

    Raises:
        ValueError: When the rows cannot be split that way.
    """
    require_dimension("alltoall", tensor)
    rows, members = tensor.shape[0], len(member_ranks(process_set))
    if isinstance(splits, torch.Tensor):
        if (
            splits.dim() != 1
            or splits.is_floating_point()
            or splits.is_complex()
            or not splits.is_cpu
        ):
            raise FarandoleUsageError(
                f"splits must be whole numbers in one dimension, on the CPU: {splits.dtype}, "
                f"shape {tuple(splits.shape)}, {splits.device}"
            )
        splits = splits.tolist()
    if splits is None or len(splits) == 0:
        if rows % members:
            raise FarandoleUsageError(
                "without splits, rows must divide evenly among "
                f"{format_counted_noun(members, 'rank')}: {rows}"
            )
        return [rows // members] * members
    if len(splits) != members:
        raise FarandoleUsageError(
            f"splits must have one entry for each of {members} ranks: {len(splits)}"
        )
    if any(split < 0 for split in splits) or sum(splits) != rows:
        raise FarandoleUsageError(
            f"splits must not be negative and add up to the {rows} rows: {list(splits)}"
        )
    return [int(split) for split in splits]


def _start_alltoall(
    tensor: torch.Tensor,
    splits: Splits,
    name: str | None,
    process_set: ProcessSet,
    caller_waits: bool,
) -> int:
    counts = _rows_for_each_member(tensor, splits, process_set)
    number = process_set_number(process_set)
    source = to_engine_tensor(tensor, MOVABLE_DTYPES)
    described = describe_tensor(table.operation_name("alltoall", name, process_set), source)

    def finish_alltoall(outcomes: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        (received,) = outcomes
        rows = received.rows if received is not None else []
        return wrap_collected_rows(received, source, tensor.device), torch.tensor(
            rows, dtype=torch.int32
        )

    return table.submit_operation(
        source,
        finish_alltoall,
        engine.alltoall,
        *described,
        counts,
        number,
        caller_waits,
        gpu_and_stream_of(source),
    )


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall; `synchronize` returns the pair `(tensor, received_splits)`.

    Args:
        tensor: A dense tensor of at least one dimension; all dimensions but the first are equal on
            all ranks. Must not be changed until `synchronize`.
        splits: Number of rows for each member, in the order of ranks; a tensor of them lives on
            the CPU. Must add up to all rows (Horovod drops rows that no member gets). Equal parts
            if not given, or empty.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_alltoall(tensor, splits, name, process_set, caller_waits=False)


class _AlltoallFunction(torch.autograd.Function):
    """Alltoall with a gradient, which sends received elements back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.process_set = process_set
        ctx.backward_name = None if name is None else f"{name}.backward"
        received, rows = synchronize(
            _start_alltoall(tensor, splits, name, process_set, caller_waits=True)
        )
        ctx.rows = rows.tolist()
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        derived, _ = alltoall_with_splits(grads[0], ctx.rows, ctx.backward_name, ctx.process_set)
        return derived, None, None, None


def alltoall_with_splits(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `alltoall`, but always returns the pair."""
    if must_record_gradient(tensor):
        return _AlltoallFunction.apply(tensor, splits, name, process_set)
    return synchronize(_start_alltoall(tensor, splits, name, process_set, caller_waits=True))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to every rank and returns the rows that all ranks sent here, in the order of
    ranks.

    Differentiable: the gradient of each row goes back to the rank that sent the row.

    Args:
        tensor: As for `alltoall_async`.
        splits: As for `alltoall_async`.
        name: As for `alltoall_async`.
        process_set: As for `alltoall_async`.

    Returns:
        The rows received; with `splits`, also the number of rows from each rank, an int32 tensor.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    received, rows = alltoall_with_splits(tensor, splits, name, process_set)
    return received if splits is None else (received, rows)

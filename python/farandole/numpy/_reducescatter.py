# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reduce-scatter: every rank gets its rows of the combination of all ranks' arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native import engine
from farandole.common.handles import process_set_number, row_count_of_this_rank
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Sum
from farandole.numpy._arrays import (
    Array,
    data_address,
    dtype_number,
    synchronize,
    table,
    to_engine_input,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


def _require_average_or_sum(op: int) -> None:
    """Refuses an op that the engine would refuse, before the operation uses up a number.

    Raises:
        ValueError: When `op` is neither `Average` nor `Sum`.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op must be Average or Sum in a reducescatter: {op!r}")


def _input_and_own_rows(value: Any, process_set: ProcessSet) -> tuple[Array, Array]:
    """Returns the input and memory for the own rows."""
    source = to_engine_input(value)
    if source.ndim == 0:
        raise ValueError("reducescatter needs an array of at least one dimension: shape ()")
    return source, np.empty(
        (row_count_of_this_rank(source.shape[0], process_set), *source.shape[1:]),
        dtype=source.dtype,
    )


def _start_reducescatter(
    value: Any,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    caller_waits: bool,
) -> int:
    number = process_set_number(process_set)
    _require_average_or_sum(op)
    source, target = _input_and_own_rows(value, process_set)
    return table.submit_operation(
        (source, target),
        lambda _: target,
        engine.reducescatter,
        table.operation_name("reducescatter", name, process_set),
        dtype_number(source.dtype),
        source.shape,
        data_address(source),
        data_address(target),
        op,
        *factors,
        number,
        caller_waits,
    )


def reducescatter_async(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduce-scatter.

    Args:
        tensor: An array of at least one dimension, or an array-like; equal
            shape and dtype on all ranks. Must not be changed until `synchronize`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        op: `Average` or `Sum`.
        process_set: The ranks that take part; this one must be a member.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_reducescatter(
        tensor, name, op, (prescale_factor, postscale_factor), process_set, caller_waits=False
    )


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combines all ranks' arrays and returns this rank's rows of the result.

    With `d` rows and `n` ranks every rank gets `d // n` rows, the first `d % n` ranks one more.

    Args:
        tensor: As for `reducescatter_async`.
        name: As for `reducescatter_async`.
        op: `Average` or `Sum`.
        process_set: As for `reducescatter_async`.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new array of the same dtype.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return synchronize(
        _start_reducescatter(
            tensor, name, op, (prescale_factor, postscale_factor), process_set, caller_waits=True
        )
    )


def grouped_reducescatter_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduce-scatter of several arrays as one unit; `synchronize` returns the list of
    results.
    """
    number = process_set_number(process_set)
    _require_average_or_sum(op)
    pairs = [_input_and_own_rows(tensor, process_set) for tensor in tensors]
    names = table.group_member_names("grouped_reducescatter", name, len(pairs), process_set)
    members = [
        (own, dtype_number(source.dtype), source.shape, data_address(source), data_address(target))
        for own, (source, target) in zip(names, pairs, strict=True)
    ]

    def collect_results(_: object) -> list[Array]:
        return [target for _, target in pairs]

    arguments = (members, op, prescale_factor, postscale_factor, number)
    return table.submit_operation(pairs, collect_results, engine.grouped_reducescatter, *arguments)


def grouped_reducescatter(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Like `reducescatter`, for several arrays as one unit."""
    return synchronize(
        grouped_reducescatter_async(
            tensors, name, op, process_set, prescale_factor, postscale_factor
        )
    )

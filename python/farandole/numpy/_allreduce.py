# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce of one array or a group: every rank gets the combination of all ranks' arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole._native import engine
from farandole.common.handles import process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import resolve_op_argument
from farandole.numpy._arrays import (
    Array,
    copy_unless_same_memory,
    data_address,
    dtype_number,
    require_writable_array,
    synchronize,
    table,
    to_engine_input,
    to_engine_input_and_output,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

Factors = tuple[float, float]
"""Factors of the inputs and of the result."""


def _start_allreduce(
    value: Any,
    name: str | None,
    op: int,
    factors: Factors,
    process_set: ProcessSet,
    caller_waits: bool,
) -> int:
    """Starts an allreduce into a new array; `caller_waits` when `synchronize` follows at once."""
    number = process_set_number(process_set)
    source, target = to_engine_input_and_output(value)
    return table.submit_operation(
        (source, target),
        lambda _: target,
        engine.allreduce,
        table.operation_name("allreduce", name, process_set),
        dtype_number(source.dtype),
        source.shape,
        data_address(source),
        data_address(target),
        op,
        *factors,
        number,
        caller_waits,
    )


def _start_allreduce_in_place(
    value: Any,
    name: str | None,
    op: int,
    factors: Factors,
    process_set: ProcessSet,
    caller_waits: bool,
) -> int:
    """Starts an allreduce that overwrites the array; `caller_waits` when `synchronize` follows at
    once.
    """
    number = process_set_number(process_set)
    array = require_writable_array(value)
    work = to_engine_input(array)
    address = data_address(work)
    return table.submit_operation(
        work,
        lambda _: copy_unless_same_memory(array, work),
        engine.allreduce,
        table.operation_name("allreduce", name, process_set),
        dtype_number(work.dtype),
        work.shape,
        address,
        address,
        op,
        *factors,
        number,
        caller_waits,
    )


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce into a new array.

    Args:
        tensor: An array, or an array-like; equal shape and dtype on all ranks.
            Must not be changed until `synchronize`. One that is not contiguous, aligned and in
            native byte order is copied first.
        average: Deprecated; use `op`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    op = resolve_op_argument(op, average)
    return _start_allreduce(
        tensor, name, op, (prescale_factor, postscale_factor), process_set, caller_waits=False
    )


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites `tensor`, any writable array; else as `allreduce_async`.

    An array that is not contiguous, aligned and in native byte order is written when its handle is
    synchronized.
    """
    op = resolve_op_argument(op, average)
    return _start_allreduce_in_place(
        tensor, name, op, (prescale_factor, postscale_factor), process_set, caller_waits=False
    )


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combines all ranks' arrays into a new one, the same bits on every rank.

    Args:
        tensor: As for `allreduce_async`.
        average: Deprecated; use `op`.
        name: As for `allreduce_async`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.
        process_set: As for `allreduce_async`.

    Returns:
        A contiguous array of the same shape and dtype, in native byte order.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    op = resolve_op_argument(op, average)
    return synchronize(
        _start_allreduce(
            tensor, name, op, (prescale_factor, postscale_factor), process_set, caller_waits=True
        )
    )


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Like `allreduce`, but overwrites `tensor`, any writable array, and returns it."""
    op = resolve_op_argument(op, average)
    factors = (prescale_factor, postscale_factor)
    return synchronize(
        _start_allreduce_in_place(tensor, name, op, factors, process_set, caller_waits=True)
    )


def _start_grouped_allreduce(
    values: Sequence[Any],
    in_place: bool,
    name: str | None,
    op: int,
    factors: Factors,
    process_set: ProcessSet,
) -> int:
    """Starts the allreduces of a group."""
    number = process_set_number(process_set)
    if in_place:
        for value in values:
            require_writable_array(value)
    pairs = [
        (to_engine_input(value),) * 2 if in_place else to_engine_input_and_output(value)
        for value in values
    ]
    names = table.group_member_names("grouped_allreduce", name, len(pairs), process_set)
    members = [
        (own, dtype_number(source.dtype), source.shape, data_address(source), data_address(target))
        for own, (source, target) in zip(names, pairs, strict=True)
    ]

    def collect_results(_: Any) -> list[Array]:
        if not in_place:
            return [target for _, target in pairs]
        return [
            copy_unless_same_memory(value, target)
            for value, (_, target) in zip(values, pairs, strict=True)
        ]

    return table.submit_operation(
        pairs, collect_results, engine.grouped_allreduce, members, op, *factors, number
    )


def grouped_allreduce_async(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of several arrays as one unit; `synchronize` returns the list of results.

    Arguments and errors are the same as in `allreduce_async`. The first member is named `<name>`,
    and the following member `i` of `n` is named `<name>_<i>of<n>`.
    """
    op = resolve_op_argument(op, average)
    return _start_grouped_allreduce(
        tensors, False, name, op, (prescale_factor, postscale_factor), process_set
    )


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites several writable arrays; else as
    `grouped_allreduce_async`.
    """
    op = resolve_op_argument(op, average)
    return _start_grouped_allreduce(
        tensors, True, name, op, (prescale_factor, postscale_factor), process_set
    )


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Combines several arrays over all ranks as one unit into new ones; else as `allreduce`."""
    factors = (prescale_factor, postscale_factor)
    return synchronize(grouped_allreduce_async(tensors, average, name, op, *factors, process_set))


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Like `grouped_allreduce`, but overwrites the writable arrays and returns them."""
    factors = (prescale_factor, postscale_factor)
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors, process_set))

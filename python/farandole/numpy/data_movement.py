# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations that move arrays as they are: allgather, broadcast, alltoall."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native import engine
from farandole.common.counted_noun import format_counted_noun
from farandole.common.handles import member_ranks, process_set_number
from farandole.common.process_sets import ProcessSet, global_process_set
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
    wrap_engine_output,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike


def _as_row_array(value: Any, operation: str) -> Array:
    source = to_engine_input(value)
    if source.ndim == 0:
        raise ValueError(f"{operation} needs an array of at least one dimension: shape ()")
    return source


def _start_allgather(
    value: Any,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Array, list[int]], Any],
    caller_waits: bool,
) -> int:
    """Starts an allgather; `finish` gets the result and the rows every member gave."""
    number = process_set_number(process_set)
    source = _as_row_array(value, "allgather")
    return table.submit_operation(
        source,
        lambda outcomes: finish(*wrap_engine_output(outcomes[0], source.dtype, source.shape[1:])),
        engine.allgather,
        table.operation_name("allgather", name, process_set),
        dtype_number(source.dtype),
        source.shape,
        data_address(source),
        number,
        caller_waits,
    )


def allgather_with_row_counts(
    value: ArrayLike, name: str | None, process_set: ProcessSet
) -> tuple[Array, list[int]]:
    """Like `allgather`; returns also the number of rows every member gave."""
    return synchronize(
        _start_allgather(value, name, process_set, lambda *both: both, caller_waits=True)
    )


def allgather_async(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather.

    Args:
        tensor: An array of at least one dimension, or an array-like. Ranks may
            differ in the first dimension only, which may be 0. Must not be changed until
            `synchronize`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_allgather(tensor, name, process_set, lambda whole, _: whole, caller_waits=False)


def allgather(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Concatenates all ranks' arrays along the first dimension, in the order of ranks.

    Args:
        tensor: As for `allgather_async`.
        name: As for `allgather_async`.
        process_set: As for `allgather_async`.

    Returns:
        An array of the same dtype, equal on all ranks.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return allgather_with_row_counts(tensor, name, process_set)[0]


def grouped_allgather_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allgather of several arrays as one unit; `synchronize` returns the list of
    results.
    """
    number = process_set_number(process_set)
    sources = [_as_row_array(tensor, "allgather") for tensor in tensors]
    names = table.group_member_names("grouped_allgather", name, len(sources), process_set)
    members = [
        (own, dtype_number(source.dtype), source.shape, data_address(source))
        for own, source in zip(names, sources, strict=True)
    ]

    def collect_results(outcomes: list[Any]) -> list[Array]:
        pairs = zip(outcomes, sources, strict=True)
        return [
            wrap_engine_output(outcome, source.dtype, source.shape[1:])[0]
            for outcome, source in pairs
        ]

    return table.submit_operation(
        sources, collect_results, engine.grouped_allgather, members, number
    )


def grouped_allgather(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Like `allgather`, for several arrays as one unit."""
    return synchronize(grouped_allgather_async(tensors, name, process_set))


def _require_root_member(root_rank: int, process_set: ProcessSet) -> None:
    members = member_ranks(process_set)
    if root_rank not in members:
        raise ValueError(
            f"root_rank must be a global rank of the process set {members}: {root_rank!r}"
        )


def _start_broadcast(
    value: Any, root_rank: int, name: str | None, process_set: ProcessSet, caller_waits: bool
) -> int:
    """Starts a broadcast into a new array; `caller_waits` when `synchronize` follows at once."""
    number = process_set_number(process_set)
    _require_root_member(root_rank, process_set)
    source, target = to_engine_input_and_output(value)
    return table.submit_operation(
        (source, target),
        lambda _: target,
        engine.broadcast,
        table.operation_name("broadcast", name, process_set),
        dtype_number(source.dtype),
        source.shape,
        data_address(source),
        data_address(target),
        root_rank,
        number,
        caller_waits,
    )


def _start_broadcast_in_place(
    value: Any, root_rank: int, name: str | None, process_set: ProcessSet, caller_waits: bool
) -> int:
    """Starts a broadcast that overwrites the array; `caller_waits` when `synchronize` follows at
    once.
    """
    number = process_set_number(process_set)
    _require_root_member(root_rank, process_set)
    array = require_writable_array(value)
    work = to_engine_input(array)
    address = data_address(work)
    return table.submit_operation(
        work,
        lambda _: copy_unless_same_memory(array, work),
        engine.broadcast,
        table.operation_name("broadcast", name, process_set),
        dtype_number(work.dtype),
        work.shape,
        address,
        address,
        root_rank,
        number,
        caller_waits,
    )


def broadcast_async(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast into a new array.

    Args:
        tensor: An array, or an array-like; equal shape and dtype on all ranks,
            the values of the root count. Must not be changed until `synchronize`.
        root_rank: The global rank that sends, a member of the set; equal on all ranks.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_broadcast(tensor, root_rank, name, process_set, caller_waits=False)


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast that overwrites `tensor`, any writable array; else as
    `broadcast_async`.
    """
    return _start_broadcast_in_place(tensor, root_rank, name, process_set, caller_waits=False)


def broadcast(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Returns the root's array on every rank.

    Args:
        tensor: As for `broadcast_async`.
        root_rank: As for `broadcast_async`.
        name: As for `broadcast_async`.
        process_set: As for `broadcast_async`.

    Returns:
        A new array of the same shape and dtype.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return synchronize(_start_broadcast(tensor, root_rank, name, process_set, caller_waits=True))


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Like `broadcast`, but overwrites `tensor`, any writable array, and returns it."""
    return synchronize(
        _start_broadcast_in_place(tensor, root_rank, name, process_set, caller_waits=True)
    )


def _start_alltoall(
    value: Any,
    splits: ArrayLike | None,
    name: str | None,
    process_set: ProcessSet,
    caller_waits: bool,
) -> int:
    number = process_set_number(process_set)
    source = _as_row_array(value, "alltoall")
    rows = _rows_per_member(source.shape[0], splits, len(member_ranks(process_set)))

    def collect_rows(outcomes: list[Any]) -> tuple[Array, Array]:
        received, rows = wrap_engine_output(outcomes[0], source.dtype, source.shape[1:])
        return received, np.asarray(rows, dtype=np.int32)

    return table.submit_operation(
        source,
        collect_rows,
        engine.alltoall,
        table.operation_name("alltoall", name, process_set),
        dtype_number(source.dtype),
        source.shape,
        data_address(source),
        rows,
        number,
        caller_waits,
    )


def _rows_per_member(rows: int, splits: ArrayLike | None, members: int) -> list[int]:
    """Returns the number of rows for each member.

    Raises:
        ValueError: When the rows cannot be distributed in these splits.
    """
    array = np.asarray([] if splits is None else splits)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise ValueError(f"splits must be a list of whole numbers, one per member: {splits!r}")
    if array.size == 0:
        if rows % members:
            raise ValueError(
                "without splits, rows must divide evenly among "
                f"{format_counted_noun(members, 'rank')}: {rows}"
            )
        return [rows // members] * members
    counts = [operator.index(entry) for entry in array.tolist()]
    if len(counts) != members or any(count < 0 for count in counts) or sum(counts) != rows:
        raise ValueError(
            f"splits must be {members} numbers, none negative, that add up to the {rows} rows: "
            f"{counts!r}"
        )
    return counts


def alltoall_async(
    tensor: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an all-to-all.

    Args:
        tensor: An array of at least one dimension, or an array-like; its rows
            are distributed to the members in order. Must not be changed until `synchronize`.
        splits: Number of rows for each member, all rows together; all the same when `None` or
            empty, which must come out even.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `poll` and for `synchronize`, which returns the rows received, in the order of
        senders, and how many each member sent.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    return _start_alltoall(tensor, splits, name, process_set, caller_waits=False)


def alltoall(
    tensor: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Sends rows to every member and returns the rows that all members sent here.

    Args:
        tensor: As for `alltoall_async`.
        splits: As for `alltoall_async`.
        name: As for `alltoall_async`.
        process_set: As for `alltoall_async`.

    Returns:
        The rows received, in the order of senders; with `splits`, also how many each member sent,
        as int32.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    received = synchronize(_start_alltoall(tensor, splits, name, process_set, caller_waits=True))
    return received[0] if splits is None else received

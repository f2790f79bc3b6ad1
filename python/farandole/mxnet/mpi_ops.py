# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives on MXNet arrays. Each waits for its result; `priority` is accepted for compatibility
with Horovod.

They have no gradients. Adasum is refused, as by Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mxnet

import farandole.numpy as arrays
from farandole.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.timeline import start_timeline, stop_timeline
from farandole.common.util import Adasum, Average, Max, Min, Product, Sum, resolve_op_argument
from farandole.common.util import resolve_op_argument as handle_average_backwards_compatibility

mx: Any = mxnet  # nothing of it is annotated

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
]

_also = (handle_average_backwards_compatibility, start_timeline, stop_timeline)
"""Names that Horovod has here and not in `horovod.mxnet`."""


def _to_mxnet_array(tensor: Any, value: Any) -> Any:
    """Returns an array of MXNet's where `tensor` is, of the same kind."""
    make = mx.np.array if isinstance(tensor, mx.np.ndarray) else mx.nd.array
    return make(value, ctx=tensor.context, dtype=value.dtype)


def _resolve_supported_op(op: int | None, average: bool | None) -> int:
    chosen = resolve_op_argument(op, average)
    if chosen == Adasum:
        raise ValueError("Adasum is not offered for MXNet")
    return chosen


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """Combines several arrays as one unit into new ones, the same on every rank.

    Args:
        tensors: Equal shapes and dtypes on all ranks.
        average: Deprecated; use `op`.
        name: Names the operation across ranks.
        priority: Not used.
        prescale_factor: Multiplies every rank's arrays before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.

    Returns:
        The results, in order.

    Raises:
        ValueError: When an argument is wrong.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    del priority
    op = _resolve_supported_op(op, average)
    if not tensors:
        return []
    reduced = arrays.grouped_allreduce(
        [tensor.asnumpy() for tensor in tensors],
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [_to_mxnet_array(tensor, value) for tensor, value in zip(tensors, reduced, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """Like `grouped_allreduce`, but overwrites the arrays and returns them."""
    reduced = grouped_allreduce(
        tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op
    )
    for tensor, value in zip(tensors, reduced, strict=True):
        tensor[:] = value
    return list(tensors)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """Like `grouped_allreduce` for one array."""
    return grouped_allreduce(
        [tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op
    )[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """Like `allreduce`, but overwrites the array and returns it."""
    return grouped_allreduce_(
        [tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op
    )[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Like `allgather` for several arrays as one unit."""
    del priority
    if not tensors:
        return []
    gathered = arrays.grouped_allgather([tensor.asnumpy() for tensor in tensors], name, process_set)
    return [_to_mxnet_array(tensor, value) for tensor, value in zip(tensors, gathered, strict=True)]


def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates all ranks' arrays along the first dimension, in which they may differ.

    Args:
        tensor: At least one dimension.
        name: Names the operation across ranks.
        priority: Not used.
        process_set: The ranks that take part.

    Returns:
        The ranks' arrays in rank order.
    """
    del priority
    return _to_mxnet_array(tensor, arrays.allgather(tensor.asnumpy(), name, process_set))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's array on every rank, a new one.

    Args:
        tensor: The same shape and dtype everywhere.
        root_rank: The rank that sends, a rank of the world also inside a process set.
        name: Names the operation across ranks.
        priority: Not used.
        process_set: The ranks that take part.

    Returns:
        The root's values.
    """
    del priority
    return _to_mxnet_array(tensor, arrays.broadcast(tensor.asnumpy(), root_rank, name, process_set))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Like `broadcast`, but overwrites the array and returns it."""
    tensor[:] = broadcast(tensor, root_rank, name, priority, process_set)
    return tensor


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of every rank's array to all ranks.

    Args:
        tensor: At least one dimension.
        splits: Rows for each rank, which add up to all rows; `None` for equal parts.
        name: Names the operation across ranks.
        priority: Not used.
        process_set: The ranks that take part.

    Returns:
        The rows dealt to this rank, in rank order; with `splits` also how many each rank sent.
    """
    del priority
    if splits is None:
        return _to_mxnet_array(tensor, arrays.alltoall(tensor.asnumpy(), None, name, process_set))
    rows = splits.asnumpy().astype("int32") if hasattr(splits, "asnumpy") else splits
    output, received = arrays.alltoall(tensor.asnumpy(), rows, name, process_set)
    return _to_mxnet_array(tensor, output), mx.nd.array(received, dtype="int32")


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Like `reducescatter` for several arrays as one unit."""
    del priority
    if not tensors:
        return []
    scattered = arrays.grouped_reducescatter(
        [tensor.asnumpy() for tensor in tensors],
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [
        _to_mxnet_array(tensor, value) for tensor, value in zip(tensors, scattered, strict=True)
    ]


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combines all ranks' arrays and gives every rank its own rows. Remaining rows go to the first
    ranks.

    Args:
        tensor: At least one dimension; equal shape and dtype on all ranks.
        op: `Average` or `Sum`.
        name: Names the operation across ranks.
        priority: Not used.
        process_set: The ranks that take part.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows.
    """
    return grouped_reducescatter(
        [tensor], op, name, priority, process_set, prescale_factor, postscale_factor
    )[0]

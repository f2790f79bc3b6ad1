# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives on JAX arrays, with gradients of the sum of all ranks' losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import farandole.numpy as plain
from farandole.common import basics
from farandole.common.handles import member_ranks, row_count_of_this_rank
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Sum, resolve_op_argument
from farandole.jax._call import is_traced, run_now_or_in_jit, shape_dtype_of
from farandole.numpy.data_movement import allgather_with_row_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.typing import ArrayLike


def _make_differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `forward`, a function of arrays, with the custom gradient `backward`, a function of
    the results' gradients.
    """
    function = jax.custom_vjp(forward)
    function.defvjp(lambda *values: (forward(*values), None), lambda _, grads: backward(grads))
    return function


def _gradient_operation_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Combines several arrays over all ranks as one unit; else as `allreduce`."""
    op = resolve_op_argument(op, average)
    factors = (prescale_factor, postscale_factor)

    def run_grouped_allreduce(arrays: list[Any], name: str | None) -> Sequence[Any]:
        return plain.grouped_allreduce(arrays, None, name, op, *factors, process_set)

    def grouped_allreduce_forward(*values: Any) -> list[jax.Array]:
        return run_now_or_in_jit(
            run_grouped_allreduce, values, lambda: [shape_dtype_of(value) for value in values], name
        )

    def grouped_allreduce_backward(grads: list[Any]) -> tuple[jax.Array, ...]:
        if op not in (Average, Sum):
            raise ValueError("only Average and Sum have a gradient")
        return tuple(
            grouped_allreduce(
                grads, None, _gradient_operation_name(name), op, *factors, process_set
            )
        )

    if not tensors:
        raise ValueError("a group must have at least one array")
    return _make_differentiable(grouped_allreduce_forward, grouped_allreduce_backward)(
        *[jnp.asarray(tensor) for tensor in tensors]
    )


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Combines all ranks' arrays into one, the same bits on every rank.

    Differentiable for `Average` and `Sum`: the gradient is allreduced by the same operation.

    Args:
        tensor: An array; equal shape and dtype on all ranks.
        average: Deprecated; use `op`.
        name: Names the operation across ranks; unnamed operations match in the order they run.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        An array of the same shape and dtype.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down. Under jit both
            arrive as `jax.errors.JaxRuntimeError` with the same text.
    """
    op = resolve_op_argument(op, average)
    factors = (prescale_factor, postscale_factor)

    def run_allreduce(arrays: list[Any], name: str | None) -> Sequence[Any]:
        return [plain.allreduce(arrays[0], None, name, op, *factors, process_set)]

    def allreduce_forward(value: Any) -> jax.Array:
        return run_now_or_in_jit(run_allreduce, [value], lambda: [shape_dtype_of(value)], name)[0]

    def allreduce_backward(grad: Any) -> tuple[jax.Array]:
        if op not in (Average, Sum):
            raise ValueError("only Average and Sum have a gradient")
        return (allreduce(grad, None, _gradient_operation_name(name), op, *factors, process_set),)

    return _make_differentiable(allreduce_forward, allreduce_backward)(jnp.asarray(tensor))


def _require_rows(value: Any, operation: str) -> Any:
    value = jnp.asarray(value)
    if value.ndim == 0:
        raise ValueError(f"{operation} needs an array of at least one dimension: shape ()")
    return value


def allgather(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Concatenates all ranks' arrays along the first dimension, in the order of ranks.

    Differentiable: every rank gets its rows of the sum of all ranks' gradients.

    Args:
        tensor: An array of at least one dimension. Ranks may differ in the first, but not under
            jit, which has to know the result's shape.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        An array of the same dtype, equal on all ranks.

    Raises:
        ValueError: As for `allreduce`.
        FarandoleInternalError: As for `allreduce`.
    """
    members = member_ranks(process_set)
    value = _require_rows(tensor, "allgather")
    counts = [value.shape[0]] * len(members)

    def run_allgather(arrays: list[Any], name: str | None) -> Sequence[Any]:
        whole, counts[:] = allgather_with_row_counts(arrays[0], name, process_set)
        return [whole]

    def run_equal_rows_allgather(arrays: list[Any], name: str | None) -> Sequence[Any]:
        whole, rows = allgather_with_row_counts(arrays[0], name, process_set)
        if len(set(rows)) > 1:
            raise ValueError(
                f"ranks have different numbers of rows, which is possible only outside jit: {rows}"
            )
        return [whole]

    def allgather_forward(value: Any) -> jax.Array:
        operation = run_equal_rows_allgather if is_traced([value]) else run_allgather
        shape = (value.shape[0] * len(members), *value.shape[1:])
        return run_now_or_in_jit(
            operation, [value], lambda: [jax.ShapeDtypeStruct(shape, value.dtype)], name
        )[0]

    def allgather_backward(grad: Any) -> tuple[jax.Array]:
        total = allreduce(grad, None, _gradient_operation_name(name), Sum, process_set=process_set)
        own_index = members.index(basics.rank())
        # Under jit all counts are equal, or the operation fails.
        start = sum(counts[:own_index])
        return (total[start : start + value.shape[0]],)

    return _make_differentiable(allgather_forward, allgather_backward)(value)


def broadcast(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Returns the root's array on every rank.

    Differentiable: the root gets the sum of all ranks' gradients, the others zeros.

    Args:
        tensor: An array; equal shape and dtype on all ranks, the values of the root count.
        root_rank: The global rank that sends, a member of the set; equal on all ranks.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        An array of the same shape and dtype.

    Raises:
        ValueError: As for `allreduce`.
        FarandoleInternalError: As for `allreduce`.
    """

    def run_broadcast(arrays: list[Any], name: str | None) -> Sequence[Any]:
        return [plain.broadcast(arrays[0], root_rank, name, process_set)]

    def broadcast_forward(value: Any) -> jax.Array:
        return run_now_or_in_jit(run_broadcast, [value], lambda: [shape_dtype_of(value)], name)[0]

    def broadcast_backward(grad: Any) -> tuple[jax.Array]:
        total = allreduce(grad, None, _gradient_operation_name(name), Sum, process_set=process_set)
        return (total if basics.rank() == root_rank else jnp.zeros_like(total),)

    return _make_differentiable(broadcast_forward, broadcast_backward)(jnp.asarray(tensor))


def alltoall(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every member and returns the rows that all members sent here.

    Differentiable: the gradient of each row is sent back to the rank of the row.

    Args:
        tensor: An array of at least one dimension; its rows are dealt out to the members in order.
        splits: Number of rows for each member; all the same when `None`, which must come out even.
            Not under jit, which has to know the result's shape.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        The rows received, in the order of senders; with `splits`, also how many each member sent,
        as int32.

    Raises:
        ValueError: As for `allreduce`; or when `splits` are given under jit.
        FarandoleInternalError: As for `allreduce`.
    """
    value = _require_rows(tensor, "alltoall")
    if splits is not None and is_traced([value]) and not _has_equal_splits(splits, value.shape[0]):
        raise ValueError(
            "alltoall under jit needs equal splits, because the shape of the result must be known"
        )
    received: list[Any] = [None]

    def run_alltoall(arrays: list[Any], name: str | None) -> Sequence[Any]:
        handle = plain.alltoall_async(arrays[0], splits, name, process_set)
        rows, received[0] = plain.synchronize(handle)
        return [rows]

    def alltoall_forward(value: Any) -> jax.Array:
        return run_now_or_in_jit(run_alltoall, [value], lambda: [shape_dtype_of(value)], name)[0]

    def alltoall_backward(grad: Any) -> tuple[jax.Array]:
        back = None if is_traced([grad]) or received[0] is None else received[0].tolist()
        result = alltoall(grad, back, _gradient_operation_name(name), process_set)
        return (result if back is None else result[0],)

    rows = _make_differentiable(alltoall_forward, alltoall_backward)(value)
    if splits is None:
        return rows
    counts = received[0] if received[0] is not None else np.asarray(splits, dtype=np.int32)
    return rows, jnp.asarray(counts)


def _has_equal_splits(splits: Sequence[int], rows: int) -> bool:
    counts = np.asarray(splits).tolist()
    return len(set(counts)) <= 1 and sum(counts) == rows


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> jax.Array:
    """Combines all ranks' arrays and returns this rank's rows of the result.

    Differentiable: all ranks' rows of the gradient are gathered.

    Args:
        tensor: An array of at least one dimension; equal shape and dtype on all ranks.
        name: As for `allreduce`.
        op: `Average` or `Sum`.
        process_set: As for `allreduce`.
        prescale_factor: Multiplies every rank's array before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        With `d` rows and `n` ranks `d // n` rows, on the first `d % n` ranks one more.

    Raises:
        ValueError: As for `allreduce`.
        FarandoleInternalError: As for `allreduce`.
    """
    value = _require_rows(tensor, "reducescatter")
    rows = row_count_of_this_rank(value.shape[0], process_set)
    size = len(member_ranks(process_set))

    def run_reducescatter(arrays: list[Any], name: str | None) -> Sequence[Any]:
        return [
            plain.reducescatter(arrays[0], name, op, process_set, prescale_factor, postscale_factor)
        ]

    def reducescatter_forward(value: Any) -> jax.Array:
        shape = (rows, *value.shape[1:])
        return run_now_or_in_jit(
            run_reducescatter, [value], lambda: [jax.ShapeDtypeStruct(shape, value.dtype)], name
        )[0]

    def reducescatter_backward(grad: Any) -> tuple[jax.Array]:
        def run_allgather(arrays: list[Any], name: str | None) -> Sequence[Any]:
            return [plain.allgather(arrays[0], name, process_set)]

        whole = run_now_or_in_jit(
            run_allgather,
            [grad],
            lambda: [jax.ShapeDtypeStruct(value.shape, grad.dtype)],
            _gradient_operation_name(name),
        )[0]
        factor = prescale_factor * postscale_factor / (size if op == Average else 1)
        return ((whole * factor).astype(grad.dtype),)

    return _make_differentiable(reducescatter_forward, reducescatter_backward)(value)

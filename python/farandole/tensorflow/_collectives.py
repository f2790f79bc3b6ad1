# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The public reductions: dense tensors and slices, compression, devices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import (
    OPERATION_NAMES,
    Adasum,
    Average,
    Sum,
    allows_rounded_sums,
    engine_op_number,
    resolve_op_argument,
)
from farandole.tensorflow import xla
from farandole.tensorflow._eager_fast_path import is_eager
from farandole.tensorflow.compression import Compression, Compressor
from farandole.tensorflow.mpi_ops import (
    allreduce_eager_tensor,
    as_tensor,
    grouped_allgather,
    grouped_reduce,
    size_op,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combines all ranks' tensors into a new one, the same on every rank.

    Differentiable for `Average` and `Sum`. An `IndexedSlices` is gathered: its values and indices
    of all ranks, which add up where it is applied; the values are divided by the number of ranks
    for `Average`. In a function that XLA compiles, it becomes a tensor first, because the size of
    the gathered result would be unknown.

    Args:
        tensor: A tensor, a variable or an `IndexedSlices`; equal shape and dtype on all ranks.
        average: Deprecated; use `op`.
        device_dense: Device of the op for dense tensors.
        device_sparse: Device of the ops for slices.
        compression: Compresses the tensor for transport, for example `Compression.bf16`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.
        name: Names the operation across ranks.
        process_set: The ranks that take part.
        ignore_name_scope: Whether only the last part of the name counts.

    Returns:
        As `tensor`.

    Raises:
        ValueError: When an argument is wrong.
        NotImplementedError: When slices are to be reduced by anything but `Average` or `Sum`, or
            scaled.
    """
    if is_eager(tensor) and not device_dense:
        op = resolve_op_argument(op, average)
        check_adasum(op, process_set)
        if compression is Compression.none:
            return allreduce_eager_tensor(
                tensor, op, prescale_factor, postscale_factor, name, process_set, ignore_name_scope
            )
        value, ctx = compression.compress(tensor)
        number = engine_op_number(op, allows_rounded_sums(compression))
        reduced = allreduce_eager_tensor(
            value, number, prescale_factor, postscale_factor, name, process_set, ignore_name_scope
        )
        return compression.decompress(reduced, ctx)
    reduced = grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )
    return reduced[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Like `allreduce` for several tensors, of any dtypes, as one unit."""
    op = resolve_op_argument(op, average)
    check_adasum(op, process_set)
    factors = (prescale_factor, postscale_factor)
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        if xla.is_tracing_for_xla():
            tensors = [as_tensor(tensor) for tensor in tensors]
        else:
            _check_slices(op, factors)
    sparse = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    with _device_scope(device_dense):
        pairs = [compression.compress(as_tensor(tensor)) for tensor in dense]
        number = engine_op_number(op, allows_rounded_sums(compression))
        reduced = grouped_reduce(
            [pair[0] for pair in pairs], number, factors, name, process_set, ignore_name_scope
        )
        done = [
            compression.decompress(value, ctx)
            for value, (_, ctx) in zip(reduced, pairs, strict=True)
        ]
    if not sparse:
        return done
    done = iter(done)
    with _device_scope(device_sparse):
        gathered = iter(_gather_slices(sparse, op, name, process_set, ignore_name_scope))
    return [
        next(gathered) if isinstance(tensor, tf.IndexedSlices) else next(done) for tensor in tensors
    ]


def _device_scope(device: str) -> Any:
    """Places ops; nowhere in particular when no device is named, which costs nothing then."""
    return tf.device(device) if device else nullcontext()


def check_adasum(op: int, process_set: ProcessSet) -> None:
    """Refuses Adasum among part of the ranks.

    Raises:
        NotImplementedError: For Adasum in a process set.
    """
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum works among all ranks only, not in a process set")


def _check_slices(op: int, factors: tuple[float, float]) -> None:
    """Refuses a reduction that gathered slices cannot represent, before any collective starts.

    Raises:
        NotImplementedError: Any operation but `Average` and `Sum`, or a scale.
    """
    way_out = "convert them with tf.convert_to_tensor, or pass sparse_as_dense=True to an optimizer"
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Average or Sum only, not by {OPERATION_NAMES[op]}: "
            f"{way_out}"
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices cannot be scaled by prescale_factor or postscale_factor, which are "
            f"{factors[0]:g} and {factors[1]:g}: {way_out}"
        )


def _gather_slices(
    slices: Sequence[Any],
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:
    if not slices:
        return []
    parts = [part for entry in slices for part in (entry.values, entry.indices)]
    name = None if name is None else f"{name}.slices"
    gathered = grouped_allgather(parts, name, ignore_name_scope, process_set)
    results = []
    for entry, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        scaled = (
            values / tf.cast(size_op(_process_set_number_or_zero(process_set)), values.dtype)
            if op == Average
            else values
        )
        results.append(tf.IndexedSlices(scaled, indices, dense_shape=entry.dense_shape))
    return results


def _process_set_number_or_zero(process_set: ProcessSet) -> int:
    return process_set.process_set_id or 0


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combines all ranks' tensors and gives every rank its own rows. Remaining rows go to the first
    ranks.

    Args:
        tensor: At least one dimension; equal shape and dtype on all ranks.
        device_dense: Device of the op.
        compression: Compresses the tensor for transport.
        op: `Average` or `Sum`.
        name: Names the operation across ranks.
        process_set: The ranks that take part.
        ignore_name_scope: Whether only the last part of the name counts.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows. Differentiable.

    Raises:
        NotImplementedError: For an `IndexedSlices`.
    """
    factors = (prescale_factor, postscale_factor)
    return _reducescatter_tensors(
        [tensor], device_dense, compression, op, name, process_set, ignore_name_scope, factors
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Like `reducescatter` for several tensors as one unit."""
    factors = (prescale_factor, postscale_factor)
    return _reducescatter_tensors(
        tensors, device_dense, compression, op, None, process_set, False, factors
    )


def _reducescatter_tensors(
    tensors: Sequence[Any],
    device: str,
    compression: type[Compressor],
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    factors: tuple[float, float],
) -> list[Any]:
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("slices cannot be reduced and scattered: convert them to tensors")
    with _device_scope(device):
        pairs = [compression.compress(as_tensor(tensor)) for tensor in tensors]
        values = [pair[0] for pair in pairs]
        number = engine_op_number(op, allows_rounded_sums(compression))
        parts = grouped_reduce(
            values, number, factors, name, process_set, ignore_name_scope, scatter=True
        )
        return [
            compression.decompress(part, ctx) for part, (_, ctx) in zip(parts, pairs, strict=True)
        ]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of the ops. The loss is the sum of all ranks' losses: what a rank gave to others, others send back."""

from __future__ import annotations

import struct
from typing import Any

import tensorflow as tf

from farandole.common.util import Average, Sum
from farandole.tensorflow._library import ops
from farandole.tensorflow._names import gradient_arguments


def _reduction(op: Any) -> dict[str, Any]:
    """The attributes of a reduction.

    Raises:
        ValueError: When it has no gradient.
    """
    if op.get_attr("reduce_op") not in (Average, Sum):
        raise ValueError("only Average and Sum have a gradient")
    return {key: op.get_attr(key) for key in ("reduce_op", "prescale", "postscale")}


def _allreduce(op: Any, grad: Any) -> Any:
    return ops.farandole_allreduce(tensor=grad, **_reduction(op), **gradient_arguments(op))


def _grouped_allreduce(op: Any, *grads: Any) -> list[Any]:
    return list(ops.farandole_grouped_allreduce(tensors=list(grads), **_reduction(op), **gradient_arguments(op)))


def _at_root(op: Any, grads: list[Any]) -> list[Any]:
    """Sums of gradients where they came from, nothing elsewhere."""
    summed = ops.farandole_grouped_allreduce(tensors=grads, reduce_op=Sum, **gradient_arguments(op))
    is_root = tf.equal(ops.farandole_rank(), op.get_attr("root_rank"))
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in summed]


def _broadcast(op: Any, grad: Any) -> Any:
    return _at_root(op, [grad])[0]


def _grouped_broadcast(op: Any, *grads: Any) -> list[Any]:
    return _at_root(op, list(grads))


def _own_rows(op: Any, grads: list[Any], rows: Any) -> list[Any]:
    """Sums of gradients, of which each rank takes the rows it gave."""
    arguments = gradient_arguments(op)
    summed = ops.farandole_grouped_allreduce(tensors=grads, reduce_op=Sum, **arguments)
    rank = ops.farandole_rank(process_set=arguments["process_set"])
    starts, counts = tf.cumsum(rows, axis=1, exclusive=True)[:, rank], rows[:, rank]
    return [total[starts[index] : starts[index] + counts[index]] for index, total in enumerate(summed)]


def _allgather(op: Any, grad: Any, _rows: Any) -> Any:
    return _own_rows(op, [grad], op.outputs[1])[0]


def _grouped_allgather(op: Any, *grads: Any) -> list[Any]:
    return _own_rows(op, list(grads[:-1]), op.outputs[-1])


def _alltoall(op: Any, grad: Any, _splits: Any) -> list[Any]:
    splits = tf.cast(op.outputs[1], tf.int64)
    returned = ops.farandole_alltoall(tensor=grad, splits=splits, **gradient_arguments(op)).output
    return [returned, None]


def _gathered(op: Any, grads: list[Any]) -> list[Any]:
    """Every rank's part of the gradient, by the factors."""
    attributes, arguments = _reduction(op), gradient_arguments(op)
    parts = ops.farandole_grouped_allgather(tensors=grads, **arguments).outputs
    factor = _double(attributes["prescale"]) * _double(attributes["postscale"])
    divisor = ops.farandole_size(process_set=arguments["process_set"]) if attributes["reduce_op"] == Average else None
    return [_scaled(part, factor, divisor) for part in parts]


def _scaled(tensor: Any, factor: float, divisor: Any) -> Any:
    if factor != 1.0:
        tensor *= tf.cast(factor, tensor.dtype)
    return tensor if divisor is None else tensor / tf.cast(divisor, tensor.dtype)


def _double(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _reducescatter(op: Any, grad: Any) -> Any:
    return _gathered(op, [grad])[0]


def _grouped_reducescatter(op: Any, *grads: Any) -> list[Any]:
    return _gathered(op, list(grads))


def _register() -> None:
    gradients = {
        "Allreduce": _allreduce,
        "GroupedAllreduce": _grouped_allreduce,
        "Broadcast": _broadcast,
        "GroupedBroadcast": _grouped_broadcast,
        "Allgather": _allgather,
        "GroupedAllgather": _grouped_allgather,
        "Alltoall": _alltoall,
        "Reducescatter": _reducescatter,
        "GroupedReducescatter": _grouped_reducescatter,
    }
    for name, gradient in gradients.items():
        tf.RegisterGradient(f"Farandole{name}")(gradient)
    for name in ("Size", "Rank", "LocalSize", "LocalRank", "Included", "Join", "Probe"):
        tf.no_gradient(f"Farandole{name}")


_register()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of the ops. The loss is the sum of all ranks' losses, so ranks send gradients back to
the sender.

By Horovod's convention (`farandole.common.gradient_convention`) some are averages, or larger by the
number of ranks.

Each function takes the module whose ops it uses, the gradients of the results and the arguments of
the forward op, and returns the gradients of the tensors. This module registers the functions of the
native ops with TensorFlow. The substitutes call the functions directly.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.common import gradient_convention
from farandole.common.util import Average, Sum, op_of_engine_number
from farandole.tensorflow._names import (
    ONE_BITS,
    collective_arguments_of_gradient,
    double_from_bits,
    normalize_name,
)
from farandole.tensorflow._native_ops import ops

REDUCTION_ATTRIBUTES = ("reduce_op", "prescale", "postscale")
"""Names of a reduction's arguments."""
DEFAULT_ATTRIBUTES = {
    "tensor_name": b"",
    "process_set": 0,
    "reduce_op": Average,
    "prescale": ONE_BITS,
    "postscale": ONE_BITS,
}
"""Default arguments of eager ops."""


def _differentiable_reduction_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a reduction.

    Raises:
        ValueError: When it has no gradient.
    """
    if (
        op_of_engine_number(attributes["reduce_op"]) not in (Average, Sum)
        and not gradient_convention.uses_horovod_gradients()
    ):
        raise ValueError("only Average and Sum have a gradient")
    return {key: attributes[key] for key in REDUCTION_ATTRIBUTES}


def op_for_broadcast_gradients() -> int:
    """Returns the reduction of the gradients that ranks derive for values of one of them."""
    return Average if gradient_convention.uses_horovod_gradients() else Sum


def allreduce(ops: Any, grads: list[Any], attributes: dict[str, Any]) -> list[Any]:
    """Returns the same reduction of the gradients."""
    return list(
        ops.farandole_grouped_allreduce(
            tensors=grads,
            **_differentiable_reduction_attributes(attributes),
            **collective_arguments_of_gradient(attributes),
        )
    )


def broadcast(ops: Any, grads: list[Any], attributes: dict[str, Any]) -> list[Any]:
    """Returns the sums of the gradients on the root, and zeros on the other ranks."""
    summed = ops.farandole_grouped_allreduce(
        tensors=grads,
        reduce_op=op_for_broadcast_gradients(),
        **collective_arguments_of_gradient(attributes),
    )
    is_root = tf.equal(ops.farandole_rank(), attributes["root_rank"])
    return [tf.where(is_root, whole, tf.zeros_like(whole)) for whole in summed]


def allgather(ops: Any, grads: list[Any], attributes: dict[str, Any], rows: Any) -> list[Any]:
    """Sums the gradients of all ranks; each rank takes the rows that it has sent."""
    arguments = collective_arguments_of_gradient(attributes)
    summed = ops.farandole_grouped_allreduce(
        tensors=grads, reduce_op=op_for_broadcast_gradients(), **arguments
    )
    rank = ops.farandole_rank(process_set=arguments["process_set"])
    starts, counts = tf.cumsum(rows, axis=1, exclusive=True)[:, rank], rows[:, rank]
    return [
        whole[starts[index] : starts[index] + counts[index]] for index, whole in enumerate(summed)
    ]


def alltoall(ops: Any, grad: Any, attributes: dict[str, Any], received: Any) -> Any:
    """Sends the gradients of rows back to the ranks of the rows."""
    splits = tf.cast(received, tf.int64)
    return ops.farandole_alltoall(
        tensor=grad, splits=splits, **collective_arguments_of_gradient(attributes)
    ).output


def reducescatter(ops: Any, grads: list[Any], attributes: dict[str, Any]) -> list[Any]:
    """Returns every rank's part of the gradient, by the factors."""
    reduction, arguments = (
        _differentiable_reduction_attributes(attributes),
        collective_arguments_of_gradient(attributes),
    )
    parts = ops.farandole_grouped_allgather(tensors=grads, **arguments).outputs
    factor = double_from_bits(reduction["prescale"]) * double_from_bits(reduction["postscale"])
    if factor != 1.0:
        parts = [part * tf.cast(factor, part.dtype) for part in parts]
    averages, larger = (
        op_of_engine_number(reduction["reduce_op"]) == Average,
        gradient_convention.uses_horovod_gradients(),
    )
    if averages == larger:
        return list(parts)
    size = ops.farandole_size(process_set=arguments["process_set"])
    apply = tf.divide if averages else tf.multiply
    return [apply(part, tf.cast(size, part.dtype)) for part in parts]


def _arguments_of_forward_op(op: Any, *more: str) -> dict[str, Any]:
    """Returns the arguments of a native op."""

    def attribute_value(key: str) -> Any:
        try:
            return op.get_attr(key)
        except KeyError:
            return DEFAULT_ATTRIBUTES[key]

    name = tf.compat.as_text(attribute_value("tensor_name"))
    if not name and not tf.executing_eagerly():
        name = f"Farandole_{normalize_name(op.name)}"
    attributes = {key: attribute_value(key) for key in ("process_set", *more)}
    return {"tensor_name": name, **attributes}


def _register_gradients() -> None:
    def single_tensor_gradient(gradient: Any, *more: str) -> Any:
        return lambda op, grad: gradient(ops, [grad], _arguments_of_forward_op(op, *more))[0]

    def grouped_gradient(gradient: Any, *more: str) -> Any:
        return lambda op, *grads: gradient(ops, list(grads), _arguments_of_forward_op(op, *more))

    gradients = {
        "Allreduce": single_tensor_gradient(allreduce, *REDUCTION_ATTRIBUTES),
        "GroupedAllreduce": grouped_gradient(allreduce, *REDUCTION_ATTRIBUTES),
        "Broadcast": single_tensor_gradient(broadcast, "root_rank"),
        "GroupedBroadcast": grouped_gradient(broadcast, "root_rank"),
        "Allgather": lambda op, grad, _rows: allgather(
            ops, [grad], _arguments_of_forward_op(op), op.outputs[1]
        )[0],
        "GroupedAllgather": lambda op, *grads: allgather(
            ops, list(grads[:-1]), _arguments_of_forward_op(op), op.outputs[-1]
        ),
        "Alltoall": lambda op, grad, _splits: [
            alltoall(ops, grad, _arguments_of_forward_op(op), op.outputs[1]),
            None,
        ],
        "Reducescatter": single_tensor_gradient(reducescatter, *REDUCTION_ATTRIBUTES),
        "GroupedReducescatter": grouped_gradient(reducescatter, *REDUCTION_ATTRIBUTES),
    }
    for name, gradient in gradients.items():
        tf.RegisterGradient(f"Farandole{name}")(gradient)
    for name in ("Size", "Rank", "LocalSize", "LocalRank", "Included", "Join", "Probe"):
        tf.no_gradient(f"Farandole{name}")


_register_gradients()

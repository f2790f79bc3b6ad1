# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of the ops. The loss is the sum of all ranks' losses, so ranks send gradients back to
the sender.

By Horovod's convention (`farandole.common.convention`) some are averages, or larger by the number
of ranks.

Each function takes the module whose ops it uses, the gradients of the results and the arguments of
the forward op, and returns the gradients of the tensors. Those of the native ops are registered
with TensorFlow here. The substitutes call them directly.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.common import convention
from farandole.common.util import Average, Sum, exact
from farandole.tensorflow._library import ops
from farandole.tensorflow._names import ONE, double, gradient_arguments, normalize

REDUCTION = ("reduce_op", "prescale", "postscale")
"""Names of a reduction's arguments."""
DEFAULTS = {
    "tensor_name": b"",
    "process_set": 0,
    "reduce_op": Average,
    "prescale": ONE,
    "postscale": ONE,
}
"""Default arguments of eager ops."""


def _reduction(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a reduction.

    Raises:
        ValueError: When it has no gradient.
    """
    if exact(told["reduce_op"]) not in (Average, Sum) and not convention.is_horovods():
        raise ValueError("only Average and Sum have a gradient")
    return {key: told[key] for key in REDUCTION}


def total() -> int:
    """Returns the reduction of the gradients that ranks derive for values of one of them."""
    return Average if convention.is_horovods() else Sum


def allreduce(here: Any, grads: list[Any], told: dict[str, Any]) -> list[Any]:
    """Returns the same reduction of the gradients."""
    return list(
        here.farandole_grouped_allreduce(
            tensors=grads, **_reduction(told), **gradient_arguments(told)
        )
    )


def broadcast(here: Any, grads: list[Any], told: dict[str, Any]) -> list[Any]:
    """Sums of gradients where the values came from, nothing elsewhere."""
    summed = here.farandole_grouped_allreduce(
        tensors=grads, reduce_op=total(), **gradient_arguments(told)
    )
    is_root = tf.equal(here.farandole_rank(), told["root_rank"])
    return [tf.where(is_root, whole, tf.zeros_like(whole)) for whole in summed]


def allgather(here: Any, grads: list[Any], told: dict[str, Any], rows: Any) -> list[Any]:
    """Sums of gradients, of which each rank takes the rows it gave."""
    arguments = gradient_arguments(told)
    summed = here.farandole_grouped_allreduce(tensors=grads, reduce_op=total(), **arguments)
    rank = here.farandole_rank(process_set=arguments["process_set"])
    starts, counts = tf.cumsum(rows, axis=1, exclusive=True)[:, rank], rows[:, rank]
    return [
        whole[starts[index] : starts[index] + counts[index]] for index, whole in enumerate(summed)
    ]


def alltoall(here: Any, grad: Any, told: dict[str, Any], received: Any) -> Any:
    """Sends the gradients of rows back to the ranks of the rows."""
    splits = tf.cast(received, tf.int64)
    return here.farandole_alltoall(tensor=grad, splits=splits, **gradient_arguments(told)).output


def reducescatter(here: Any, grads: list[Any], told: dict[str, Any]) -> list[Any]:
    """Returns every rank's part of the gradient, by the factors."""
    reduction, arguments = _reduction(told), gradient_arguments(told)
    parts = here.farandole_grouped_allgather(tensors=grads, **arguments).outputs
    factor = double(reduction["prescale"]) * double(reduction["postscale"])
    if factor != 1.0:
        parts = [part * tf.cast(factor, part.dtype) for part in parts]
    averages, larger = exact(reduction["reduce_op"]) == Average, convention.is_horovods()
    if averages == larger:
        return list(parts)
    size = here.farandole_size(process_set=arguments["process_set"])
    apply = tf.divide if averages else tf.multiply
    return [apply(part, tf.cast(size, part.dtype)) for part in parts]


def _told(op: Any, *more: str) -> dict[str, Any]:
    """Returns the arguments of a native op."""

    def told_of(key: str) -> Any:
        try:
            return op.get_attr(key)
        except KeyError:
            return DEFAULTS[key]

    name = tf.compat.as_text(told_of("tensor_name"))
    if not name and not tf.executing_eagerly():
        name = f"Farandole_{normalize(op.name)}"
    told = {key: told_of(key) for key in ("process_set", *more)}
    return {"tensor_name": name, **told}


def _register() -> None:
    def one(gradient: Any, *more: str) -> Any:
        return lambda op, grad: gradient(ops, [grad], _told(op, *more))[0]

    def several(gradient: Any, *more: str) -> Any:
        return lambda op, *grads: gradient(ops, list(grads), _told(op, *more))

    gradients = {
        "Allreduce": one(allreduce, *REDUCTION),
        "GroupedAllreduce": several(allreduce, *REDUCTION),
        "Broadcast": one(broadcast, "root_rank"),
        "GroupedBroadcast": several(broadcast, "root_rank"),
        "Allgather": lambda op, grad, _rows: allgather(ops, [grad], _told(op), op.outputs[1])[0],
        "GroupedAllgather": lambda op, *grads: allgather(
            ops, list(grads[:-1]), _told(op), op.outputs[-1]
        ),
        "Alltoall": lambda op, grad, _splits: [alltoall(ops, grad, _told(op), op.outputs[1]), None],
        "Reducescatter": one(reducescatter, *REDUCTION),
        "GroupedReducescatter": several(reducescatter, *REDUCTION),
    }
    for name, gradient in gradients.items():
        tf.RegisterGradient(f"Farandole{name}")(gradient)
    for name in ("Size", "Rank", "LocalSize", "LocalRank", "Included", "Join", "Probe"):
        tf.no_gradient(f"Farandole{name}")


_register()

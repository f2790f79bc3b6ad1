# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of operations: the same on every rank, since tensors meet by name."""

from __future__ import annotations

import collections
import re
import struct
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole._native import engine

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME_COUNTS_ATTRIBUTE = "_farandole_names"
"""Attribute of a graph: the number of uses of each name."""
_NON_ALPHANUMERIC_PATTERN = re.compile(r"[^a-zA-Z0-9]")


def normalize_name(name: str) -> str:
    """Replaces each character of `name` that is neither letter nor digit by `_`."""
    return _NON_ALPHANUMERIC_PATTERN.sub("_", name)


def strip_name_scope(name: str, ignore_name_scope: bool) -> str:
    """Returns `name`, or its part after the last `/`."""
    return name.rsplit("/", 1)[-1] if ignore_name_scope else name


def eager_collective_arguments(
    operation: str, name: str | None, process_set: Any, ignore_name_scope: bool
) -> dict[str, Any]:
    """Like `collective_arguments`, when running eagerly.

    The thread that runs the op drives it to completion, because the thread would wait for the op
    anyway. If TensorFlow runs eager ops asynchronously, the thread runs them one after the other.
    """
    chosen = "" if name is None else f"{operation}.{strip_name_scope(name, ignore_name_scope)}"
    return {
        "tensor_name": chosen,
        "process_set": registered_process_set_number(process_set),
        "attended": True,
    }


def registered_process_set_number(process_set: Any) -> int:
    """Returns the engine's number of a process set.

    Raises:
        ValueError: When it has none, or one that the engine does not know.
    """
    number = process_set.process_set_id
    if number is None or (number != 0 and number not in engine.process_sets()):
        raise ValueError(f"the process set is not registered: {process_set!r}")
    return number


def collective_arguments(
    operation: str,
    tensors: Sequence[Any],
    name: str | None,
    process_set: Any,
    ignore_name_scope: bool = False,
) -> dict[str, Any]:
    """Returns the arguments of each collective's op: its name across ranks, process set and driving
    thread.

    In a graph an unnamed operation is named after its tensors; run eagerly, the engine numbers it.
    Eager operations are driven by the calling thread, which waits for them anyway; nodes of a graph
    by the engine's own.

    Raises:
        ValueError: When the process set is not registered.
    """
    if tf.executing_eagerly():
        return eager_collective_arguments(operation, name, process_set, ignore_name_scope)
    number = registered_process_set_number(process_set)
    if name is None:
        ends = [tensors[0], tensors[-1]] if len(tensors) > 1 else tensors[:1]
        # A tensor made eagerly outside of the graph has none.
        labels = [getattr(tensor, "name", "captured") for tensor in ends]
        parts = [normalize_name(strip_name_scope(label, ignore_name_scope)) for label in labels]
        chosen = unique_operation_name("_".join([f"Farandole{operation}", *parts]))
    else:
        chosen = f"Farandole{operation}_{normalize_name(strip_name_scope(name, ignore_name_scope))}"
    return {"tensor_name": chosen, "process_set": number}


def unique_operation_name(name: str) -> str:
    """Returns `name`, made distinct from the names that this graph has already. Equal programs get
    equal names, because the names follow the order in which the graph is built.

    The graph's own `unique_name` would prepend the scope, in which Keras numbers optimizers and
    layers by the order in which a process made them. A branch or a loop of a `tf.compat.v1` graph
    runs beside the rest of the graph, so branch, loop and graph share one count. Every function has
    a separate count, wherever the function is called.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if not tf.compat.v1.executing_eagerly_outside_functions():
        while isinstance(graph, tf.__internal__.FuncGraph):
            graph = graph.outer_graph
    if not hasattr(graph, _NAME_COUNTS_ATTRIBUTE):
        setattr(graph, _NAME_COUNTS_ATTRIBUTE, collections.Counter())
    used = getattr(graph, _NAME_COUNTS_ATTRIBUTE)
    number = used[name]
    used[name] += 1
    return f"{name}_{number}" if number else name


ONE_BITS = 4607182418800017408
"""1.0 by its bits."""


def double_from_bits(number: int) -> float:
    """Inverts `bits`."""
    return struct.unpack("<d", struct.pack("<q", number))[0]


def double_bits(factor: float) -> int:
    """Returns a double by its bits: attributes of ops are singles."""
    if factor == 1.0:
        return ONE_BITS
    return struct.unpack("<q", struct.pack("<d", float(factor)))[0]


def collective_arguments_of_gradient(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the collective in another collective's gradient, made from that
    one's arguments.
    """
    number = attributes["process_set"]
    if tf.executing_eagerly():
        return {"tensor_name": "", "process_set": number, "attended": True}
    return {
        "tensor_name": unique_operation_name(f"{attributes['tensor_name'] or 'Farandole'}_grad"),
        "process_set": number,
    }

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stand-ins for the native ops, by `tf.py_function`: the same names, arguments and results, in Python.

They hold a thread of TensorFlow's and, for moments, the interpreter's lock; in graphs without automatic control
dependencies each waits for the one made before it, since ranks that block in different orders would wait for each
other forever.
"""

from __future__ import annotations

import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

import farandole.numpy as hvd
from farandole.common.exceptions import FarandoleInternalError
from farandole.common.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE = 4607182418800017408
"""1.0 by its bits, as the native ops take factors."""

_last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The op made last in each graph."""


class Gathered(NamedTuple):
    """Result of an allgather."""

    output: Any
    rows: Any


class GroupedGathered(NamedTuple):
    """Result of a grouped allgather."""

    outputs: list[Any]
    rows: Any


class Dealt(NamedTuple):
    """Result of an all-to-all."""

    output: Any
    received_splits: Any


class _Numbered:
    """A process set that is known by its number only."""

    def __init__(self, number: int) -> None:
        self.process_set_id = number


def _set(number: int) -> ProcessSet:
    return global_process_set if number == 0 else _Numbered(number)  # type: ignore[return-value]


def _factor(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _call(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Runs `function` on arrays when the graph runs; one after the other in graphs that would not see to it."""

    def run(*tensors: Any) -> list[Any]:
        try:
            return function(*(tensor.numpy() for tensor in tensors))
        except ValueError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        except FarandoleInternalError as error:
            raise tf.errors.UnknownError(None, None, f"FarandolePython: {error}") from error

    if tf.executing_eagerly():
        return [tf.convert_to_tensor(value) for value in run(*map(tf.convert_to_tensor, inputs))]
    graph = tf.compat.v1.get_default_graph()
    before = [] if isinstance(graph, tf.__internal__.FuncGraph) or graph not in _last else [_last[graph]]
    with tf.control_dependencies(before):
        results = tf.py_function(run, list(inputs), list(dtypes))
    results = results if isinstance(results, list) else [results]
    _last[graph] = results[0].op
    return results


def _shaped(results: Sequence[Any], like: Sequence[Any], rows_differ: bool) -> list[Any]:
    for result, tensor in zip(results, like, strict=True):
        shape = tensor.shape
        if rows_differ and shape.rank:
            shape = tf.TensorShape([None]).concatenate(shape[1:])
        if not tf.executing_eagerly():
            result.set_shape(shape)
    return list(results)


def _name(tensor_name: str) -> str | None:
    return tensor_name or None


def farandole_grouped_allreduce(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001 - the native op's
    reduce_op: int = 0,
    prescale: int = ONE,
    postscale: int = ONE,
    name: str | None = None,  # noqa: ARG001
) -> list[Any]:
    """Combines several tensors as one unit."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        return hvd.grouped_allreduce(
            list(arrays),
            name=_name(tensor_name),
            op=reduce_op,
            prescale_factor=_factor(prescale),
            postscale_factor=_factor(postscale),
            process_set=_set(process_set),
        )

    return _shaped(_call(run, tensors, [tensor.dtype for tensor in tensors]), tensors, rows_differ=False)


def farandole_allreduce(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor."""
    return farandole_grouped_allreduce([tensor], **arguments)[0]


def farandole_grouped_broadcast(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001
) -> list[Any]:
    """The root's tensors on every rank."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        names = [f"{tensor_name}_{index}" if tensor_name else None for index in range(len(arrays))]
        handles = [
            hvd.broadcast_async(array, root_rank, name=name, process_set=_set(process_set))
            for array, name in zip(arrays, names, strict=True)
        ]
        return [hvd.synchronize(handle) for handle in handles]

    return _shaped(_call(run, tensors, [tensor.dtype for tensor in tensors]), tensors, rows_differ=False)


def farandole_broadcast(tensor: Any, **arguments: Any) -> Any:
    """The root's tensor on every rank."""
    return farandole_grouped_broadcast([tensor], **arguments)[0]


def farandole_grouped_allgather(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
    name: str | None = None,  # noqa: ARG001
) -> GroupedGathered:
    """All ranks' tensors, and how many rows each rank gave of each."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        chosen = _set(process_set)
        counts = np.array([[len(array) if array.ndim else 0] for array in arrays], np.int64)
        rows = hvd.allgather(
            counts.reshape(1, -1), name=_name(tensor_name and f"{tensor_name}.rows"), process_set=chosen
        )
        return [*hvd.grouped_allgather(list(arrays), name=_name(tensor_name), process_set=chosen), rows.T.copy()]

    *outputs, rows = _call(run, tensors, [*(tensor.dtype for tensor in tensors), tf.int64])
    return GroupedGathered(_shaped(outputs, tensors, rows_differ=True), rows)


def farandole_allgather(tensor: Any, **arguments: Any) -> Gathered:
    """All ranks' tensors."""
    outputs, rows = farandole_grouped_allgather([tensor], **arguments)
    return Gathered(outputs[0], rows)


def farandole_grouped_reducescatter(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
    reduce_op: int = 0,
    prescale: int = ONE,
    postscale: int = ONE,
    name: str | None = None,  # noqa: ARG001
) -> list[Any]:
    """Combines several tensors and keeps this rank's rows."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        return hvd.grouped_reducescatter(
            list(arrays),
            name=_name(tensor_name),
            op=reduce_op,
            prescale_factor=_factor(prescale),
            postscale_factor=_factor(postscale),
            process_set=_set(process_set),
        )

    return _shaped(_call(run, tensors, [tensor.dtype for tensor in tensors]), tensors, rows_differ=True)


def farandole_reducescatter(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor and keeps this rank's rows."""
    return farandole_grouped_reducescatter([tensor], **arguments)[0]


def farandole_alltoall(
    tensor: Any,
    splits: Any,
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
    name: str | None = None,  # noqa: ARG001
) -> Dealt:
    """Deals rows out to all ranks."""
    tensor = tf.convert_to_tensor(tensor)

    def run(array: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
        chosen, sent = _set(process_set), splits.astype(np.int32)
        if not len(sent):
            size = int(farandole_size(process_set))
            if not array.ndim or len(array) % size:
                raise ValueError(f"rows must divide by the {size} ranks: {array.shape}")
            sent = np.full(size, len(array) // size, np.int32)
        output, received = hvd.alltoall(array, sent, name=_name(tensor_name), process_set=chosen)
        return [output, np.asarray(received, np.int32)]

    output, received = _call(run, [tensor, splits], [tensor.dtype, tf.int32])
    return Dealt(_shaped([output], [tensor], rows_differ=True)[0], received)


def farandole_join(tensor_name: str = "", process_set: int = 0, attended: bool = False, name: str | None = None) -> Any:  # noqa: ARG001
    """Waits for all ranks to join."""
    return _call(lambda: [np.int32(hvd.join())], [], [tf.int32])[0]


def _number(question: Callable[[ProcessSet], int], process_set: int) -> Any:
    return _call(lambda: [np.int32(question(_registered(process_set)))], [], [tf.int32])[0]


def _registered(number: int) -> ProcessSet:
    from farandole._native import engine  # noqa: PLC0415

    if number == 0:
        return global_process_set
    members = engine.process_sets()
    if number not in members:
        raise ValueError(f"no such process set: {number}")
    process_set = ProcessSet(members[number])
    process_set.process_set_id = number
    return process_set


def farandole_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Ranks in the set."""
    return _number(lambda chosen: chosen.size() or 0, process_set)


def farandole_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Position in the set."""
    return _number(lambda chosen: chosen.rank() or 0, process_set)


def farandole_local_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Ranks on this host."""
    return _number(lambda _: hvd.local_size(), process_set)


def farandole_local_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Position on this host."""
    return _number(lambda _: hvd.local_rank(), process_set)


def farandole_included(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Whether this rank is in the set."""
    return _number(lambda chosen: int(bool(chosen.included())), process_set)

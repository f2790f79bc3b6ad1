# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Substitutes for the native ops with `tf.py_function`: the same names, arguments and results, in
Python.

They occupy a TensorFlow thread and, for short times, the interpreter's lock. In graphs without
automatic control dependencies, each op waits for the one before it, because ranks that block in
different orders would wait for each other for ever.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

import farandole.numpy as hvd
from farandole.common.counted_noun import format_counted_noun
from farandole.common.exceptions import FarandoleInternalError, FarandoleUsageError
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import op_of_engine_number
from farandole.tensorflow._names import ONE_BITS, double_from_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LAST_OP_ATTRIBUTE = "_farandole_last"
"""Attribute of a graph: the op made last in it."""


_UNSUPPORTED_DTYPE_PATTERN = re.compile(r"^\w+ of .* failed: ")
"""The beginning of the engine's error about an operation that does not support a dtype."""


class PyAllgatherOutput(NamedTuple):
    """Result of an allgather."""

    output: Any
    rows: Any


class PyGroupedAllgatherOutput(NamedTuple):
    """Result of a grouped allgather."""

    outputs: list[Any]
    rows: Any


class PyAlltoallOutput(NamedTuple):
    """Result of an all-to-all."""

    output: Any
    received_splits: Any


def _find_process_set(number: int) -> ProcessSet:
    """Returns the process set of this number.

    Raises:
        ValueError: When there is none.
    """
    from farandole._native import engine  # noqa: PLC0415

    if number == 0:
        return global_process_set
    members = engine.process_sets()
    if number not in members:
        raise ValueError(f"no such process set: {number}")
    process_set = ProcessSet(members[number])
    process_set.process_set_id = number
    return process_set


def _usage_error(text: str) -> tf.errors.OpError:
    """Returns the native ops' error for a wrong call. The engine's error only differs in its
    text.
    """
    if text.startswith("Mismatched ") or "has not been initialized" in text:
        return tf.errors.FailedPreconditionError(None, None, text)
    if _UNSUPPORTED_DTYPE_PATTERN.search(text):
        return tf.errors.AbortedError(None, None, text)
    return tf.errors.InvalidArgumentError(None, None, text)


def _run_py_function(
    function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Runs `function` on arrays when the graph runs; in sequence in graphs that would not order
    the calls.
    """

    def run_on_arrays(*tensors: Any) -> list[Any]:
        # In a graph a ValueError becomes an InvalidArgumentError; what TensorFlow does not know, an
        # UnknownError.
        try:
            return function(*(tensor.numpy() for tensor in tensors))
        except FarandoleUsageError as error:
            raise ValueError(str(error)) from error
        except FarandoleInternalError as error:
            raise tf.errors.UnknownError(None, None, f"FarandolePython: {error}") from error

    if tf.executing_eagerly():
        try:
            return [
                tf.convert_to_tensor(value)
                for value in run_on_arrays(*map(tf.convert_to_tensor, inputs))
            ]
        except ValueError as error:
            raise _usage_error(str(error)) from error
    graph = tf.compat.v1.get_default_graph()
    last = (
        None
        if isinstance(graph, tf.__internal__.FuncGraph)
        else getattr(graph, _LAST_OP_ATTRIBUTE, None)
    )
    before = [] if last is None else [last]
    with tf.control_dependencies(before):
        results = tf.py_function(run_on_arrays, list(inputs), list(dtypes))
    results = results if isinstance(results, list) else [results]
    setattr(graph, _LAST_OP_ATTRIBUTE, results[0].op)
    return results


def _run_with_gradient(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    gradient: Callable[..., Any],
    *,
    rows_differ: bool = False,
    more: Sequence[Any] = (),
    more_dtypes: Sequence[Any] = (),
) -> list[Any]:
    """Runs `function` on tensors, with a custom gradient.

    Args:
        function: Takes one array for each of `tensors` and `more`, returns one for each tensor and
            of `more_dtypes`.
        tensors: The tensors to send.
        gradient: Takes the module, gradients of the results for `tensors`, and the further results;
            returns the gradients of `tensors`.
        rows_differ: Whether results have other numbers of rows.
        more: Further inputs, which have no gradient.
        more_dtypes: Data types of further results, which have no gradient either.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]

    @tf.custom_gradient
    def run_on_tensors(*values: Any) -> tuple[list[Any], Any]:
        results = _run_py_function(
            function, [*values, *more], [*(value.dtype for value in values), *more_dtypes]
        )
        for result, value in zip(results, values, strict=False):
            shape = value.shape
            if rows_differ and shape.rank:
                shape = tf.TensorShape([None]).concatenate(shape[1:])
            if not tf.executing_eagerly():
                result.set_shape(shape)

        def backward_pass(*grads: Any) -> list[Any]:
            return gradient(
                sys.modules[__name__], list(grads[: len(values)]), *results[len(values) :]
            )

        return results, backward_pass

    results = run_on_tensors(*tensors)
    return list(results) if isinstance(results, list | tuple) else [results]


def _import_gradients() -> Any:
    from farandole.tensorflow import _gradients  # noqa: PLC0415 - it asks whether these functions are needed

    return _gradients


def _differentiable_reduction(
    reduce: Callable[..., Any],
    gradient: str,
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001 - the native op's
    reduce_op: int = 0,
    prescale: int = ONE_BITS,
    postscale: int = ONE_BITS,
) -> list[Any]:
    """Returns a reduction of several tensors; `gradient` names its gradient."""
    attributes = {
        "tensor_name": tensor_name,
        "process_set": process_set,
        "reduce_op": reduce_op,
        "prescale": prescale,
        "postscale": postscale,
    }

    def reduce_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
        return reduce(
            list(arrays),
            name=tensor_name or None,
            op=op_of_engine_number(reduce_op),
            prescale_factor=double_from_bits(prescale),
            postscale_factor=double_from_bits(postscale),
            process_set=_find_process_set(process_set),
        )

    def reduction_gradient(ops: Any, grads: list[Any]) -> list[Any]:
        return getattr(_import_gradients(), gradient)(ops, grads, attributes)

    return _run_with_gradient(
        reduce_arrays, tensors, reduction_gradient, rows_differ=gradient == "reducescatter"
    )


def farandole_grouped_allreduce(tensors: Sequence[Any], **arguments: Any) -> list[Any]:
    """Combines several tensors as one unit."""
    return _differentiable_reduction(hvd.grouped_allreduce, "allreduce", tensors, **arguments)


def farandole_grouped_reducescatter(tensors: Sequence[Any], **arguments: Any) -> list[Any]:
    """Combines several tensors and keeps this rank's rows."""
    return _differentiable_reduction(
        hvd.grouped_reducescatter, "reducescatter", tensors, **arguments
    )


def farandole_grouped_broadcast(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
    root_rank: int = 0,
) -> list[Any]:
    """Returns the root's tensors on every rank."""

    def broadcast_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
        names = [f"{tensor_name}_{index}" if tensor_name else None for index in range(len(arrays))]
        handles = [
            hvd.broadcast_async(
                array, root_rank, name=name, process_set=_find_process_set(process_set)
            )
            for array, name in zip(arrays, names, strict=True)
        ]
        return [hvd.synchronize(handle) for handle in handles]

    attributes = {"tensor_name": tensor_name, "process_set": process_set, "root_rank": root_rank}
    return _run_with_gradient(
        broadcast_arrays,
        tensors,
        lambda ops, grads: _import_gradients().broadcast(ops, grads, attributes),
    )


def farandole_grouped_allgather(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
) -> PyGroupedAllgatherOutput:
    """Returns all ranks' tensors, and how many rows each rank gave of each."""

    def gather_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
        chosen = _find_process_set(process_set)
        counts = np.array([[len(array) if array.ndim else 0] for array in arrays], np.int64)
        name = f"{tensor_name}.rows" if tensor_name else None
        rows = hvd.allgather(counts.reshape(1, -1), name=name, process_set=chosen)
        gathered = hvd.grouped_allgather(list(arrays), name=tensor_name or None, process_set=chosen)
        return [*gathered, rows.T.copy()]

    attributes = {"tensor_name": tensor_name, "process_set": process_set}
    *outputs, rows = _run_with_gradient(
        gather_arrays,
        tensors,
        lambda ops, grads, rows: _import_gradients().allgather(ops, grads, attributes, rows),
        rows_differ=True,
        more_dtypes=[tf.int64],
    )
    return PyGroupedAllgatherOutput(outputs, rows)


def farandole_alltoall(
    tensor: Any,
    splits: Any,
    tensor_name: str = "",
    process_set: int = 0,
    attended: bool = False,  # noqa: ARG001
) -> PyAlltoallOutput:
    """Deals rows out to all ranks."""

    def exchange_rows(array: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
        chosen, sent = _find_process_set(process_set), splits.astype(np.int32)
        if not len(sent):
            size = chosen.size() or 1
            if not array.ndim or len(array) % size:
                raise ValueError(
                    f"rows must divide by the {format_counted_noun(size, 'rank')}: {array.shape}"
                )
            sent = np.full(size, len(array) // size, np.int32)
        output, received = hvd.alltoall(array, sent, name=tensor_name or None, process_set=chosen)
        return [output, np.asarray(received, np.int32)]

    attributes = {"tensor_name": tensor_name, "process_set": process_set}
    output, received = _run_with_gradient(
        exchange_rows,
        [tensor],
        lambda ops, grads, received: [
            _import_gradients().alltoall(ops, grads[0], attributes, received)
        ],
        rows_differ=True,
        more=[splits],
        more_dtypes=[tf.int32],
    )
    return PyAlltoallOutput(output, received)


def farandole_allreduce(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor."""
    return farandole_grouped_allreduce([tensor], **arguments)[0]


def farandole_reducescatter(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor and keeps this rank's rows."""
    return farandole_grouped_reducescatter([tensor], **arguments)[0]


def farandole_broadcast(tensor: Any, **arguments: Any) -> Any:
    """Returns the root's tensor on every rank."""
    return farandole_grouped_broadcast([tensor], **arguments)[0]


def farandole_allgather(tensor: Any, **arguments: Any) -> PyAllgatherOutput:
    """Returns all ranks' tensors."""
    outputs, rows = farandole_grouped_allgather([tensor], **arguments)
    return PyAllgatherOutput(outputs[0], rows)


def farandole_join(tensor_name: str = "", process_set: int = 0, attended: bool = False) -> Any:  # noqa: ARG001
    """Waits for all ranks to join."""
    return _run_py_function(lambda: [np.int32(hvd.join())], [], [tf.int32])[0]


def _process_set_fact_op(question: Callable[[ProcessSet], int], process_set: int) -> Any:
    return _run_py_function(
        lambda: [np.int32(question(_find_process_set(process_set)))], [], [tf.int32]
    )[0]


def farandole_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001 - the native op's
    """Returns the ranks in the set."""
    return _process_set_fact_op(lambda chosen: chosen.size() or 0, process_set)


def farandole_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns this rank's position in the set."""
    return _process_set_fact_op(lambda chosen: chosen.rank() or 0, process_set)


def farandole_local_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns the ranks on this host."""
    return _process_set_fact_op(lambda _: hvd.local_size(), process_set)


def farandole_local_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns this rank's position on its host."""
    return _process_set_fact_op(lambda _: hvd.local_rank(), process_set)


def farandole_included(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns whether this rank is in the set."""
    return _process_set_fact_op(lambda chosen: int(bool(chosen.included())), process_set)

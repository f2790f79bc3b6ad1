# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The collectives as TensorFlow ops on dense tensors; `farandole.tensorflow` adds slices,
compression and devices.

All work eagerly, in `tf.function`, in graphs of `tf.compat.v1` and in SavedModels. In a graph, the
ranks must build the same operations with the same names. Eager operations without a name match in
the order in which they are called.

On a CPU, a function with `jit_compile=True` may contain them if all shapes are known when it is
traced and all ranks have the same number of rows. XLA then calls the library directly. Otherwise,
for example on GPUs, the function is split, and the code between collectives is compiled.

Failures are TensorFlow errors: `InvalidArgumentError` for a wrong call, `FailedPreconditionError`
if ranks disagree or `init` is missing, `AbortedError` if a dtype does not support the operation,
`UnknownError` if a peer failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole.common.basics import (
    HorovodBasics,
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
from farandole.common.exceptions import HorovodInternalError
from farandole.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.common.timeline import start_timeline, stop_timeline
from farandole.common.util import Adasum, Average, Max, Min, Product, Sum, num_rank_is_power_2
from farandole.tensorflow import _eager_fast_path, _native_ops, xla, xla_function_splitting
from farandole.tensorflow._names import (
    collective_arguments,
    double_bits,
    eager_collective_arguments,
    registered_process_set_number,
    strip_name_scope,
)
from farandole.tensorflow._native_ops import ops
from farandole.tensorflow.util import (
    check_num_rank_power_of_2,
    gpu_available,
    handle_average_backwards_compatibility,
)

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
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
]


_also = (
    HorovodInternalError,
    add_process_set,
    check_num_rank_power_of_2,
    gpu_available,
    handle_average_backwards_compatibility,
    num_rank_is_power_2,
    remove_process_set,
    start_timeline,
    stop_timeline,
)
"""Names that Horovod has here, besides the ops."""

_basics = HorovodBasics()
"""The object that scripts for Horovod use as `mpi_ops._basics`."""

_fast_path_ops = (
    ops if _eager_fast_path.FAST_PATH_AVAILABLE and _native_ops.library is not None else None
)
"""The ops, where they are native and there is a shorter way to them."""


def as_tensor(value: Any) -> Any:
    """Converts a tensor, a TensorFlow or Keras variable, or any value that TensorFlow can
    convert, to a tensor.
    """
    if type(value) is _eager_fast_path.eager_tensor or isinstance(value, tf.Tensor):
        return value
    return tf.convert_to_tensor(unwrap_keras_variable(value))


def unwrap_keras_variable(value: Any) -> Any:
    """Returns TensorFlow's variable under a Keras variable; any other value unchanged."""
    inner = getattr(value, "value", None)
    return inner if isinstance(inner, tf.Variable) else value


def ops_for_context() -> Any:
    """Returns the ops for where one is about to be made: in a function that XLA will compile, or
    anywhere else.

    Where XLA cannot hold them, the function is split around them, if that can be.
    """
    if not xla.is_tracing_for_xla() or (
        xla.xla_unsupported_reason() is not None and xla_function_splitting.split_traced_function()
    ):
        return ops
    return xla


def grouped_reduce(
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float] = (1.0, 1.0),
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    scatter: bool = False,
) -> list[Any]:
    """Reduces several dense tensors, of any dtypes, as one unit."""
    tensors = [as_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    attributes = {
        "reduce_op": op,
        "prescale": double_bits(factors[0]),
        "postscale": double_bits(factors[1]),
    }
    kind = "Reducescatter" if scatter else "Allreduce"
    context_ops = ops_for_context()
    if len(tensors) == 1:
        arguments = collective_arguments(kind, tensors, name, process_set, ignore_name_scope)
        reduce_single = (
            context_ops.farandole_reducescatter if scatter else context_ops.farandole_allreduce
        )
        return [reduce_single(tensor=tensors[0], **attributes, **arguments)]
    arguments = collective_arguments(
        f"Grouped{kind}", tensors, name, process_set, ignore_name_scope
    )
    reduce_grouped = (
        context_ops.farandole_grouped_reducescatter
        if scatter
        else context_ops.farandole_grouped_allreduce
    )
    return _pass_through_identity(
        context_ops, reduce_grouped(tensors=tensors, **attributes, **arguments)
    )


def _pass_through_identity(used_ops: Any, results: Any) -> list[Any]:
    """Passes the results of an op of a graph through an identity op.

    Ops that wait for an asynchronous op go to TensorFlow's threads one by one. Ops that wait for a
    plain op continue on its thread. With many small gradients, the identity op saves half of the
    time of their reduction in a step.
    """
    if tf.executing_eagerly() or used_ops is not ops or _native_ops.library is None:
        return list(results)
    return list(tf.identity_n(results))


def allreduce_eager_tensor(
    tensor: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> Any:
    """Reduces one eager tensor, by the shortest way."""
    if ops is _fast_path_ops and prescale_factor == postscale_factor == 1.0:
        fast_attributes: tuple[Any, ...] = ("attended", True, "reduce_op", op)
        if name is not None:
            fast_attributes += (
                "tensor_name",
                f"Allreduce.{strip_name_scope(name, ignore_name_scope)}",
            )
        if process_set is not global_process_set:
            fast_attributes += ("process_set", registered_process_set_number(process_set))
        reduced = _eager_fast_path.run_fast_path("FarandoleAllreduce", tensor, fast_attributes)
        if reduced is not None:
            return reduced
    return ops.farandole_allreduce(
        tensor=tensor,
        reduce_op=op,
        prescale=double_bits(prescale_factor),
        postscale=double_bits(postscale_factor),
        **eager_collective_arguments("Allreduce", name, process_set, ignore_name_scope),
    )


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one dense tensor."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reduce([tensor], op, factors, name, process_set, ignore_name_scope)[0]


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces several dense tensors as one unit."""
    return grouped_reduce(
        tensors, op, (prescale_factor, postscale_factor), name, process_set, ignore_name_scope
    )


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates all ranks' tensors along the first dimension, in which they may differ.

    Args:
        tensor: At least one dimension.
        name: Names the operation across ranks.
        ignore_name_scope: Whether only the last part of the name counts.
        process_set: The ranks that take part.

    Returns:
        The ranks' tensors in rank order. Differentiable.
    """
    tensor = as_tensor(tensor)
    arguments = collective_arguments("Allgather", [tensor], name, process_set, ignore_name_scope)
    return ops_for_context().farandole_allgather(tensor=tensor, **arguments).output


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Like `allgather` for several tensors as one unit."""
    tensors = [as_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    arguments = collective_arguments(
        "GroupedAllgather", tensors, name, process_set, ignore_name_scope
    )
    return list(ops_for_context().farandole_grouped_allgather(tensors=tensors, **arguments).outputs)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor on every rank.

    Args:
        tensor: The same shape and dtype everywhere.
        root_rank: The rank that sends, a rank of the world also inside a process set.
        name: Names the operation across ranks.
        ignore_name_scope: Whether only the last part of the name counts.
        process_set: The ranks that take part.

    Returns:
        A new tensor. Differentiable.
    """
    tensor = as_tensor(tensor)
    arguments = collective_arguments("Broadcast", [tensor], name, process_set, ignore_name_scope)
    return ops_for_context().farandole_broadcast(tensor=tensor, root_rank=root_rank, **arguments)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrites variables with the root's, as one unit: each is read, sent and assigned.

    Args:
        variables: TensorFlow's, Keras's or `tf.compat.v1`'s reference variables.
        root_rank: The rank whose values count.
        name: Names the operation across ranks.
        process_set: The ranks that take part.

    Returns:
        The variables. In a graph of `tf.compat.v1`, a session that reads one of them runs its
        assignment first.
    """
    variables = list(variables)
    assignments = broadcast_assign_ops(variables, root_rank, name, process_set)
    if tf.compat.v1.executing_eagerly_outside_functions():
        return variables
    results = []
    for variable, assignment in zip(variables, assignments, strict=True):
        with tf.control_dependencies([assignment]):
            results.append(_read_after_dependencies(unwrap_keras_variable(variable)))
    return results


def _read_after_dependencies(variable: Any) -> Any:
    """Returns the value of a variable of a graph, after the control dependencies in force."""
    return variable.read_value() if isinstance(variable, tf.Variable) else tf.identity(variable)


def broadcast_assign_ops(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Like `broadcast_`, but returns the operations that assign; in eager mode, `None` for each."""
    targets = [unwrap_keras_variable(variable) for variable in variables]
    if not targets:
        return []
    tensors = [tf.convert_to_tensor(target) for target in targets]
    arguments = collective_arguments("Broadcast", tensors, name, process_set)
    values = ops_for_context().farandole_grouped_broadcast(
        tensors=tensors, root_rank=root_rank, **arguments
    )
    return [_assign_variable(target, value) for target, value in zip(targets, values, strict=True)]


def _assign_variable(target: Any, value: Any) -> Any:
    if isinstance(target, tf.Variable):
        return target.assign(value, read_value=False)
    return tf.compat.v1.assign(target, value)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of every rank's tensor to all ranks.

    Args:
        tensor: At least one dimension.
        splits: Rows for each rank, whole numbers that add up to all rows; `None` for equal parts.
        name: Names the operation across ranks.
        ignore_name_scope: Whether only the last part of the name counts.
        process_set: The ranks that take part.

    Returns:
        The rows dealt to this rank, in rank order; with `splits` also how many each rank sent.
        Differentiable.
    """
    tensor = as_tensor(tensor)
    arguments = collective_arguments("Alltoall", [tensor], name, process_set, ignore_name_scope)
    sent = (
        tf.constant([], tf.int64)
        if splits is None
        else tf.cast(tf.convert_to_tensor(splits), tf.int64)
    )
    output, received = ops_for_context().farandole_alltoall(tensor=tensor, splits=sent, **arguments)
    return output if splits is None else (output, received)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces one dense tensor and keeps this rank's rows."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reduce(
        [tensor], op, factors, name, process_set, ignore_name_scope, scatter=True
    )[0]


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduces several dense tensors as one unit and keeps this rank's rows."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reduce(tensors, op, factors, name, process_set, ignore_name_scope, scatter=True)


def join() -> Any:
    """Takes part in the operations of the other ranks with neutral values, until all have joined.

    Returns:
        The rank that joined last, the same on all.
    """
    arguments = {} if tf.executing_eagerly() else {"tensor_name": "join"}
    return ops_for_context().farandole_join(**arguments)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of ranks in a process set, as an int32 that is read when the graph
    runs.
    """
    return ops_for_context().farandole_size(process_set=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 if this rank is a member of a process set, else 0, as an int32 that is read when
    the graph runs.
    """
    return ops_for_context().farandole_included(process_set=process_set_id, name=name)


def rank_op(name: str | None = None) -> Any:
    """This rank, as an int32 that is read when the graph runs."""
    return ops_for_context().farandole_rank(name=name)


def local_rank_op(name: str | None = None) -> Any:
    """This rank's number on its host, as an int32 that is read when the graph runs."""
    return ops_for_context().farandole_local_rank(name=name)


def local_size_op(name: str | None = None) -> Any:
    """Returns the number of ranks on this host, as an int32 that is read when the graph runs."""
    return ops_for_context().farandole_local_size(name=name)

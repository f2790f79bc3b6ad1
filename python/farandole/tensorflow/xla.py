# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Substitutes for the native ops in functions that XLA compiles for the CPU: custom calls into the
same library.

XLA does not compile unknown ops, but it calls functions by name. Everything that a call needs
except addresses, mainly shapes, is in a text that is fixed when the function is traced. So shapes
must be known at that time.

Calls block the thread that runs the program. XLA runs independent operations in any order, also in
parallel. So every call takes a token from the one before it; otherwise ranks could wait for each
other in different calls. A token cannot leave a branch, a loop or a function, so the next call
takes one of its results.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

# the only function that reports whether XLA will compile a graph
from tensorflow.python.ops import control_flow_util

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.common.counted_noun import format_counted_noun
from farandole.tensorflow import _gradients, _native_ops
from farandole.tensorflow._names import ONE_BITS, unique_operation_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

try:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # custom calls are in no public module
    from tensorflow.python.ops import control_flow_v2_func_graphs as _func_graphs

    _BRANCH_GRAPH_TYPES: Any = (
        _func_graphs.CondBranchFuncGraph,
        _func_graphs.WhileCondFuncGraph,
        _func_graphs.WhileBodyFuncGraph,
    )
except (ImportError, AttributeError):
    gen_xla_ops = None
    _BRANCH_GRAPH_TYPES = ()

CUSTOM_CALL_TARGET = "farandole"
"""Name of the custom call, which crates/tensorflow/src/xla implements."""
ALLREDUCE, BROADCAST, ALLGATHER, ALLTOALL, REDUCESCATTER = range(5)
SIZE, RANK, LOCAL_SIZE, LOCAL_RANK, INCLUDED = range(100, 105)
PROBE_CALL = 200

_LAST_CALL_ATTRIBUTE = "_farandole_after"
"""Attribute of a graph: the token that its last call gave, and how many ops the graph had then."""
_FUNCTION_OP_TYPES = frozenset(
    (
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "While",
        "StatelessWhile",
        "PartitionedCall",
        "StatefulPartitionedCall",
    )
)
"""Ops whose functions may hold calls."""


class XlaAllgatherOutput(NamedTuple):
    """Result of an allgather."""

    output: Any
    rows: Any


class XlaGroupedAllgatherOutput(NamedTuple):
    """Result of a grouped allgather."""

    outputs: list[Any]
    rows: Any


class XlaAlltoallOutput(NamedTuple):
    """Result of an all-to-all."""

    output: Any
    received_splits: Any


class _XlaFunctionContext:
    """Context that stands for every function that XLA compiles, when TensorFlow asks for the
    enclosing context of a trace.
    """

    def RequiresUniqueFunctionRetracing(self) -> bool:  # noqa: N802 - TensorFlow's name
        """Returns whether a function in this context is traced separately."""
        return True


_xla_function_context = _XlaFunctionContext()


def _trace_compiled_separately() -> None:
    """Traces a function separately for compiled and for other callers, because they need different
    calls.

    TensorFlow separates the traces for TPUs only. If a later TensorFlow does not call the replaced
    function, nothing changes: the first trace of a function then serves all callers.
    """
    try:
        asked: Any = importlib.import_module(
            "tensorflow.python.eager.polymorphic_function.function_context"
        )
        enclosing = asked._enclosing_xla_context  # noqa: SLF001
    except (ImportError, AttributeError):
        return

    def enclosing_xla_context(*args: Any, **kwargs: Any) -> Any:
        context = enclosing(*args, **kwargs)
        return (
            context
            if context is None or context.RequiresUniqueFunctionRetracing()
            else _xla_function_context
        )

    asked._enclosing_xla_context = enclosing_xla_context  # noqa: SLF001


_trace_compiled_separately()


def is_tracing_for_xla() -> bool:
    """Returns whether the function that is being traced is one that XLA will compile."""
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _missing_xla_requirement() -> str | None:
    """Returns the missing requirement."""
    if not read_setting(variables.ENABLE_XLA_OPS):
        return f"{variables.ENABLE_XLA_OPS} is off"
    if _native_ops.library is None:
        return "the native ops are not in use"
    if gen_xla_ops is None:
        return f"TensorFlow {tf.__version__} has no custom calls"
    if tf.config.list_physical_devices("GPU"):
        return "on a GPU, XLA would need the collectives to be kernels of the GPU's"
    return None


@functools.cache
def xla_unsupported_reason() -> str | None:
    """Returns the reason why compiled functions cannot hold collectives; `None` if they can.
    Tries it once.
    """
    missing = _missing_xla_requirement()
    if missing is not None or _native_ops.library is None:
        return missing
    reason = _native_ops.library.farandole_tensorflow_register_xla()
    if reason is not None:
        return reason.decode()

    def call_probe(number: Any) -> Any:
        return _ordered_custom_call(
            _encode_call_config(PROBE_CALL), [number], [tf.TensorSpec([], tf.int32)]
        )[0]

    try:
        with tf.init_scope(), tf.device("CPU:0"):
            result = tf.function(call_probe, jit_compile=True)(tf.constant(21))
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return f"a compiled custom call failed: {error}"
    return None if int(result) == 42 else (f"a compiled custom call returned {result!r}")  # noqa: PLR2004 - twice 21


def require_xla_support() -> None:
    """Refuses to put a collective into a compiled function where that cannot be.

    Raises:
        NotImplementedError: With the reason.
    """
    reason = xla_unsupported_reason()
    if reason is not None:
        raise NotImplementedError(
            f"collectives cannot be in a function with jit_compile=True here, for {reason}; "
            "reduce outside of it"
        )


def _encode_call_config(
    kind: int,
    process_set: int = 0,
    name: str = "",
    *,
    op: int = 0,
    factors: Any = (ONE_BITS, ONE_BITS),
    root: int = 0,
    ranks: int = 0,
) -> str:
    return f"{kind},{op},{factors[0]},{factors[1]},{root},{process_set},{ranks},{name}"


def _tokens_to_wait_for(graph: Any) -> list[Any]:
    """Returns the operation for which a call in this graph must wait."""
    token, seen = getattr(graph, _LAST_CALL_ATTRIBUTE, (None, 0))
    before = [] if token is None else [token]
    for op in graph.get_operations()[seen:]:
        results = (
            [result for result in op.outputs if _is_numeric(result.dtype)]
            if op.type in _FUNCTION_OP_TYPES
            else []
        )
        if results:
            # The first of a loop counts its turns, the others may be its inputs.
            before.append(
                tf.stop_gradient(
                    results[0] if op.type.endswith("While") else min(results, key=_element_count)
                )
            )
    # A branch or a loop runs where it stands; a function may also be called from elsewhere.
    if not before and isinstance(graph, _BRANCH_GRAPH_TYPES):
        return _tokens_to_wait_for(graph.outer_graph)
    return before


def _is_numeric(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex


def _element_count(tensor: Any) -> int:
    return tensor.shape.num_elements() or sys.maxsize


def _ordered_custom_call(
    text: str, tensors: Sequence[Any], results: Sequence[tf.TensorSpec]
) -> list[Any]:
    """Returns the results of a custom call that runs after the graph's earlier calls."""
    graph: Any = tf.compat.v1.get_default_graph()
    calls: Any = gen_xla_ops
    *values, token = calls.xla_custom_call_v2(
        operands=[*tensors, *(_tokens_to_wait_for(graph) or [tf.constant(0)])],
        call_target_name=CUSTOM_CALL_TARGET,
        backend_config=text,
        has_side_effect=True,
        result_dtypes=[*(result.dtype for result in results), tf.int32],
        result_shapes=[*(result.shape for result in results), tf.TensorShape([])],
    )
    setattr(graph, _LAST_CALL_ATTRIBUTE, (token, len(graph.get_operations())))
    return values


def _byte_size(spec: Any) -> int:
    return math.prod(spec.shape) * (1 if spec.dtype == tf.bool else spec.dtype.size)


def _add_collective(
    head: str,
    tensors: Sequence[Any],
    shape_of: Callable[[tf.TensorShape], tf.TensorShape],
    gradient: Callable[..., Sequence[Any]],
) -> list[Any]:
    """Returns a call on tensors; `shape_of` maps shapes to the results', `gradient` takes the
    results' gradients.

    Raises:
        NotImplementedError: When this TensorFlow cannot carry it.
        ValueError: When a shape is not known.
    """
    require_xla_support()
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                "a collective in a compiled function needs shapes that are known when it is "
                f"traced: {tensor!r}"
            )
    results = [tf.TensorSpec(shape_of(tensor.shape), tensor.dtype) for tensor in tensors]
    parts = [
        f"{tensor.dtype.as_datatype_enum}:{_byte_size(result)}:{','.join(map(str, tensor.shape))}"
        for tensor, result in zip(tensors, results, strict=True)
    ]

    @tf.custom_gradient
    def run_on_tensors(*values: Any) -> tuple[list[Any], Any]:
        return _ordered_custom_call(";".join([head, *parts]), values, results), gradient

    reduced = run_on_tensors(*tensors)
    return list(reduced) if isinstance(reduced, list | tuple) else [reduced]


def _this_module() -> Any:
    return sys.modules[__name__]


def _unchanged_shape(shape: tf.TensorShape) -> tf.TensorShape:
    return shape


def _query_process_set_fact(question: int, process_set: int) -> Any:
    require_xla_support()
    return _ordered_custom_call(
        _encode_call_config(question, process_set), [], [tf.TensorSpec([], tf.int32)]
    )[0]


def _traced_process_set_size(process_set: int) -> int:
    """Returns the size of a set at the time of the trace, because result shapes depend on it."""
    with tf.init_scope():
        return int(_native_ops.ops.farandole_size(process_set=process_set))


def farandole_grouped_allreduce(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    reduce_op: int = 0,
    prescale: int = ONE_BITS,
    postscale: int = ONE_BITS,
) -> list[Any]:
    """Combines several tensors as one unit."""
    attributes = {
        "tensor_name": tensor_name,
        "process_set": process_set,
        "reduce_op": reduce_op,
        "prescale": prescale,
        "postscale": postscale,
    }
    head = _encode_call_config(
        ALLREDUCE, process_set, tensor_name, op=reduce_op, factors=(prescale, postscale)
    )
    return _add_collective(
        head,
        tensors,
        _unchanged_shape,
        lambda *grads: _gradients.allreduce(_this_module(), list(grads), attributes),
    )


def farandole_allreduce(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor."""
    return farandole_grouped_allreduce([tensor], **arguments)[0]


def farandole_grouped_broadcast(
    tensors: Sequence[Any], tensor_name: str = "", process_set: int = 0, root_rank: int = 0
) -> list[Any]:
    """Returns the root's tensors on every rank."""
    attributes = {"tensor_name": tensor_name, "process_set": process_set, "root_rank": root_rank}
    head = _encode_call_config(BROADCAST, process_set, tensor_name, root=root_rank)
    return _add_collective(
        head,
        tensors,
        _unchanged_shape,
        lambda *grads: _gradients.broadcast(_this_module(), list(grads), attributes),
    )


def farandole_broadcast(tensor: Any, **arguments: Any) -> Any:
    """Returns the root's tensor on every rank."""
    return farandole_grouped_broadcast([tensor], **arguments)[0]


def farandole_grouped_allgather(
    tensors: Sequence[Any], tensor_name: str = "", process_set: int = 0
) -> XlaGroupedAllgatherOutput:
    """Returns all ranks' tensors, which must have the same number of rows."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    size = _traced_process_set_size(process_set)
    rows = [_row_count(tensor.shape) for tensor in tensors]

    def allgather_gradient(*grads: Any) -> list[Any]:
        summed = farandole_grouped_allreduce(
            grads,
            unique_operation_name(f"{tensor_name}_grad"),
            process_set,
            _gradients.op_for_broadcast_gradients(),
        )
        # Evaluated when it runs: in the next world of an elastic job the rank may be another one.
        rank = farandole_rank(process_set)
        parts = []
        for total, count in zip(summed, rows, strict=True):
            begin = tf.concat([[rank * count], [0] * (total.shape.rank - 1)], 0)
            parts.append(tf.slice(total, begin, [count, *total.shape[1:]]))
        return parts

    outputs = _add_collective(
        _encode_call_config(ALLGATHER, process_set, tensor_name, ranks=size),
        tensors,
        lambda shape: _with_row_count(shape, _row_count(shape) * size),
        allgather_gradient,
    )
    return XlaGroupedAllgatherOutput(
        outputs, tf.constant([[count] * size for count in rows], tf.int64)
    )


def farandole_allgather(tensor: Any, **arguments: Any) -> XlaAllgatherOutput:
    """Returns all ranks' tensors, which must have the same number of rows."""
    outputs, rows = farandole_grouped_allgather([tensor], **arguments)
    return XlaAllgatherOutput(outputs[0], rows)


def _row_count(shape: tf.TensorShape) -> int:
    if not shape.rank:
        raise ValueError("a tensor of at least one dimension is needed")
    return int(shape[0] or 0)


def _with_row_count(shape: tf.TensorShape, rows: int) -> tf.TensorShape:
    return tf.TensorShape([rows, *shape[1:]])


def farandole_grouped_reducescatter(
    tensors: Sequence[Any],
    tensor_name: str = "",
    process_set: int = 0,
    reduce_op: int = 0,
    prescale: int = ONE_BITS,
    postscale: int = ONE_BITS,
) -> list[Any]:
    """Combines several tensors and keeps this rank's rows; all ranks get the same number of
    them.
    """
    size = _traced_process_set_size(process_set)

    def scattered_shape(shape: tf.TensorShape) -> tf.TensorShape:
        rows = _row_count(shape)
        if rows % size:
            raise ValueError(
                "in a compiled function rows must divide by the "
                f"{format_counted_noun(size, 'rank')}: {rows}"
            )
        return _with_row_count(shape, rows // size)

    attributes = {
        "tensor_name": tensor_name,
        "process_set": process_set,
        "reduce_op": reduce_op,
        "prescale": prescale,
        "postscale": postscale,
    }

    def reducescatter_gradient(*grads: Any) -> list[Any]:
        return _gradients.reducescatter(_this_module(), list(grads), attributes)

    head = _encode_call_config(
        REDUCESCATTER,
        process_set,
        tensor_name,
        op=reduce_op,
        factors=(prescale, postscale),
        ranks=size,
    )
    return _add_collective(head, tensors, scattered_shape, reducescatter_gradient)


def farandole_reducescatter(tensor: Any, **arguments: Any) -> Any:
    """Combines one tensor and keeps this rank's rows."""
    return farandole_grouped_reducescatter([tensor], **arguments)[0]


def farandole_alltoall(
    tensor: Any, splits: Any, tensor_name: str = "", process_set: int = 0
) -> XlaAlltoallOutput:
    """Deals rows out to all ranks in equal parts."""
    known = tf.get_static_value(splits)
    size = _traced_process_set_size(process_set)
    if known is None or len(known):
        raise NotImplementedError("a compiled function can only send equal parts: omit splits")
    tensor = tf.convert_to_tensor(tensor)

    def alltoall_gradient(grad: Any) -> list[Any]:
        name = unique_operation_name(f"{tensor_name}_grad")
        return [farandole_alltoall(grad, tf.constant([], tf.int64), name, process_set).output]

    [output] = _add_collective(
        _encode_call_config(ALLTOALL, process_set, tensor_name, ranks=size),
        [tensor],
        _unchanged_shape,
        alltoall_gradient,
    )
    return XlaAlltoallOutput(output, tf.fill([size], _row_count(tensor.shape) // size))


def farandole_join(tensor_name: str = "", process_set: int = 0) -> Any:
    """Refuses: a rank that has joined would hold up everything else that its program does."""
    raise NotImplementedError("join cannot be in a function with jit_compile=True")


def farandole_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001 - the native op's
    """Returns the ranks in the set."""
    return _query_process_set_fact(SIZE, process_set)


def farandole_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001 - the native op's
    """Returns this rank's position in the set."""
    return _query_process_set_fact(RANK, process_set)


def farandole_local_size(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns the ranks on this host."""
    return _query_process_set_fact(LOCAL_SIZE, process_set)


def farandole_local_rank(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns this rank's position on its host."""
    return _query_process_set_fact(LOCAL_RANK, process_set)


def farandole_included(process_set: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Returns whether this rank is in the set."""
    return _query_process_set_fact(INCLUDED, process_set)

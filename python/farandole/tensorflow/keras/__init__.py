# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data-parallel Keras on TensorFlow; `farandole.keras` is for all Keras backends.

Example:
    import farandole.tensorflow.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""  # noqa: E501

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from farandole._keras import GradientReductionSettings, distribute_optimizer
from farandole._keras import value_collectives as _values
from farandole._keras.shared_functions import (
    allgather,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from farandole.common.basics import (
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
from farandole.common.gradient_grouping import resolve_groups_argument
from farandole.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.common.timeline import start_timeline, stop_timeline
from farandole.common.util import Average, Sum, is_version_greater_equal_than, resolve_op_argument
from farandole.tensorflow.compression import Compression

if TYPE_CHECKING:
    from farandole.tensorflow.keras import callbacks, elastic

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_version_greater_equal_than",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Loads the requested name."""
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"farandole.tensorflow.keras.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wraps a Keras optimizer so that its gradients are reduced over all ranks.

    Gradients are reduced once an update: after accumulation, before clipping; a
    `LossScaleOptimizer` may be in it or around it.

    Args:
        optimizer: A Keras optimizer. The distributed optimizer takes over its state; do not use the
            original any more.
        name: A new name, if any; it names the reductions, too, which optimizers that train at the
            same time in several threads need.
        device_dense: Device of the ops for dense gradients, on TensorFlow.
        device_sparse: Device of the ops for slices, on TensorFlow.
        compression: Compresses the gradients for transport.
        sparse_as_dense: Whether `IndexedSlices` become tensors first, on TensorFlow; else they are
            gathered.
        gradient_predivide_factor: For `Average`, gradients are divided by it before and multiplied
            after the sum.
        op: `Average` or `Sum`.
        backward_passes_per_step: Gradients of this many steps are accumulated, and reduced and
            applied once.
        average_aggregated_gradients: Whether accumulated gradients are averaged rather than summed.
        num_groups: Deprecated; use `groups`.
        groups: A number of consecutive units, or lists of variables that form units; one unit by
            default.
        process_set: The ranks that take part; others keep their gradients.
        scale_local_gradients: Whether gradients of variables given to `register_local_var` are
            divided by the number of ranks.

    Returns:
        An optimizer of the same kind, whose class keeps its name, so that saved models load without
        Farandole.

    Raises:
        ValueError: If arguments contradict each other.
    """
    settings = GradientReductionSettings(
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        resolve_groups_argument(groups, num_groups),
        process_set,
        scale_local_gradients,
    )
    return distribute_optimizer(optimizer, settings)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a value over all ranks.

    Args:
        value: A tensor, a variable, an array or a number.
        name: Names the operation across ranks.
        average: Deprecated; use `op`.
        prescale_factor: Multiplies every rank's value before the reduction.
        postscale_factor: Multiplies the result.
        op: `Average` (the default), `Sum`, ...
        compression: Compresses the value for transport.

    Returns:
        A NumPy array.

    Raises:
        ValueError: When both `average` and `op` are given.
    """
    chosen = resolve_op_argument(op, average)
    return _values.allreduce_value(
        value, name, chosen, prescale_factor, postscale_factor, compression
    )

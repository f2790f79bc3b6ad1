# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data-parallel TensorFlow: collectives as ops, distributed tapes and optimizers, broadcast of
variables.

Example:
    import farandole.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
"""  # noqa: E501

from importlib.util import find_spec as _find_spec

if _find_spec("tensorflow") is None:
    raise ImportError(
        "farandole.tensorflow needs TensorFlow: pip install farandole[tensorflow]",
        name="tensorflow",
    )

import importlib
from typing import TYPE_CHECKING, Any

from farandole.common.exceptions import (
    FarandoleInternalError,
    FarandoleUsageError,
    HorovodInternalError,
)
from farandole.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.common.timeline import start_timeline, stop_timeline
from farandole.common.util import check_extension
from farandole.tensorflow._collectives import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from farandole.tensorflow._optimizer import DistributedOptimizer
from farandole.tensorflow._tape import DistributedGradientTape, PartialDistributedGradientTape
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from farandole.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from farandole.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
)
from farandole.tensorflow.util import (
    check_num_rank_power_of_2,
    gpu_available,
    handle_average_backwards_compatibility,
    refs_to_vars,
    split_list,
    vars_to_refs,
)

if TYPE_CHECKING:
    from farandole.tensorflow import elastic
    from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FarandoleInternalError",
    "FarandoleUsageError",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
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
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "vars_to_refs",
]

_LAZY_ATTRIBUTES = {
    "SyncBatchNormalization": ("farandole.tensorflow.sync_batch_norm", "SyncBatchNormalization"),
}


def __getattr__(name: str) -> Any:
    """Loads modules that need Keras at first use, because Keras may run on another backend."""
    if name in _LAZY_ATTRIBUTES:
        module, attribute = _LAZY_ATTRIBUTES[name]
        return getattr(importlib.import_module(module), attribute)
    if name in ("elastic", "keras"):
        return importlib.import_module(f"farandole.tensorflow.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

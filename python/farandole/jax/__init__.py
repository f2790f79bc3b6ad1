# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives on JAX arrays, outside and inside `jax.jit`, and data-parallel training.

Outside jit an operation runs at once. Inside, it is an ordered host callback: callbacks of a
process run one after the other, in the order of the program, so ranks that run the same program
meet. This has consequences:

- All ranks run the same compiled functions in the same order. If ranks may take different branches
  (`jax.lax.cond`), the branches must contain no operation.
- `jax.vmap` and several devices in one process (`shard_map`) refuse ordered callbacks: one process
  drives one device.
- An error inside jit is raised as `jax.errors.JaxRuntimeError`, with the original text, when the
  result is used.
- Arrays go through host memory.

Example:
    import farandole.jax as hvd

    hvd.init()
    params = hvd.broadcast_parameters(params, root_rank=0)
    step = jax.jit(hvd.distributed_value_and_grad(loss))
"""

from importlib.util import find_spec as _find_spec

if _find_spec("jax") is None:
    raise ImportError("farandole.jax needs JAX: pip install farandole[jax]", name="jax")

from farandole.common.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
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
from farandole.common.util import Adasum, Average, Max, Min, Product, Sum
from farandole.jax._operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allreduce,
    reducescatter,
)
from farandole.jax._training import (
    DistributedOptimizer,
    GradientTransformation,
    allreduce_gradients,
    broadcast_parameters,
    distributed_value_and_grad,
)
from farandole.numpy import barrier, join
from farandole.numpy.functions import allgather_object, broadcast_object

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "FarandoleInternalError",
    "FarandoleUsageError",
    "GradientTransformation",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_gradients",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "distributed_value_and_grad",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]

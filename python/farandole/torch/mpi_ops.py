# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All operations under the module name that Horovod scripts import."""

from farandole.common import basics
from farandole.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
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
from farandole.common.util import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    gpu_available,
    num_rank_is_power_2,
)
from farandole.common.util import resolve_op_argument as handle_average_backwards_compatibility
from farandole.torch._allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from farandole.torch._allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from farandole.torch._alltoall import alltoall, alltoall_async
from farandole.torch._barrier_and_join import barrier, join
from farandole.torch._broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from farandole.torch._gpu_selection import init
from farandole.torch._handles import poll, synchronize
from farandole.torch._reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from farandole.torch._sparse import sparse_allreduce_async
from farandole.torch.compression import Compression

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_also = (
    Compression,
    HorovodInternalError,
    gpu_available,
    handle_average_backwards_compatibility,
    num_rank_is_power_2,
)
"""Names that Horovod has here and not in `horovod.torch`."""

_basics = basics.HorovodBasics()
"""The object that scripts for Horovod use as `mpi_ops._basics`."""

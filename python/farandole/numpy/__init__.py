# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives on NumPy arrays, without any framework.

Names and signatures are the same as in `farandole.torch`. Arrays that are contiguous, aligned and
in native byte order are used without a copy. Others are copied, and in-place operations write the
result back. Results are contiguous and in native byte order. Read-only arrays may be sent but not
overwritten. `bfloat16`, `float8_e4m3fn` and `float8_e5m2` of ml_dtypes are supported; masked
arrays, objects, strings and dates are refused.

Example:
    import numpy as np
    import farandole.numpy as hvd

    hvd.init()
    print(hvd.allreduce(np.arange(3.0), op=hvd.Sum))
"""

from importlib.util import find_spec as _find_spec

if _find_spec("numpy") is None:
    raise ImportError("farandole.numpy needs NumPy: pip install farandole[numpy]", name="numpy")

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
from farandole.numpy._allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from farandole.numpy._arrays import poll, synchronize
from farandole.numpy._rank_synchronization import barrier, join
from farandole.numpy._reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from farandole.numpy.data_movement import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from farandole.numpy.functions import allgather_object, broadcast_object

__all__ = [
    "Adasum",
    "Average",
    "FarandoleInternalError",
    "FarandoleUsageError",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
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
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]

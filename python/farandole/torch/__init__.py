# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data-parallel PyTorch: collectives on tensors, a distributed optimizer, broadcast of parameters
and objects.

Example:
    import farandole.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from importlib.util import find_spec as _find_spec

if _find_spec("torch") is None:
    raise ImportError("farandole.torch needs PyTorch: pip install farandole[torch]", name="torch")

from farandole.common.exceptions import (
    FarandoleInternalError,
    FarandoleUsageError,
    HorovodInternalError,
)
from farandole.common.util import check_extension
from farandole.torch import elastic, mpi_ops
from farandole.torch.compression import Compression
from farandole.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.torch.local_sgd import DiLoCo, LocalSGD
from farandole.torch.loss_sums import loss_sum_and_count
from farandole.torch.mpi_ops import *  # noqa: F403 - one list of the operations is enough
from farandole.torch.optimizer import DistributedOptimizer
from farandole.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "FarandoleInternalError",
    "FarandoleUsageError",
    "HorovodInternalError",
    "LocalSGD",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
    "elastic",
    "loss_sum_and_count",
]
__all__ += mpi_ops.__all__

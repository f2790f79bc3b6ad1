# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Objects, groups, handles, gradients, a timeline, and errors of ranks that disagree."""

import json
import os
import sys

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (_basics.rank(), _basics.size()) == (rank, size)
timeline = os.path.join(sys.argv[1], "timeline.json")
hvd.start_timeline(timeline)

assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
assert hvd.allgather_object(["x"] * rank) == [["x"] * other for other in range(size)]
first, second = hvd.grouped_allreduce(
    [torch.ones(2) * rank, torch.ones(3)], op=hvd.Sum, name="pair"
)
assert first.tolist() == [1.0, 1.0]
assert second.tolist() == [2.0] * 3
handles = [hvd.allreduce_async(torch.ones(4) * index, name=f"async.{index}") for index in range(3)]
assert [hvd.synchronize(handle).tolist() for handle in handles] == [
    [float(index)] * 4 for index in range(3)
]
received, splits = hvd.alltoall(
    torch.arange(3), splits=torch.tensor([1, 2] if rank == 0 else [2, 1])
)
assert received.tolist() == ([0, 0, 1] if rank == 0 else [1, 2, 2])
assert splits.tolist() == ([1, 2] if rank == 0 else [2, 1])
assert hvd.reducescatter(torch.arange(4.0), op=hvd.Sum).tolist() == (
    [0.0, 2.0] if rank == 0 else [4.0, 6.0]
)

sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,))
assert hvd.sparse_allreduce_async(sparse, "sparse", op=hvd.Sum)().to_dense().tolist() == [1.0, 1.0]

x = torch.full((2,), float(rank), requires_grad=True)
(hvd.allgather(x) * (rank + 1)).sum().backward()
assert x.grad.tolist() == [1.5, 1.5], "the average of what the ranks derive"

try:
    hvd.allreduce(torch.ones(2 + rank), name="shapes differ")
except HorovodInternalError as error:
    assert isinstance(error, RuntimeError)
else:
    raise AssertionError("tensors of different shapes were added")
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size

hvd.stop_timeline()
if rank == 0:
    with open(timeline) as file:
        events = json.load(file)
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {event.get("name") for event in events}
hvd.barrier()
print("done", rank)

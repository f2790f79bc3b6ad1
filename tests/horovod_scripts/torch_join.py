# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks with different amounts of data end by join."""

import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for _ in range(2 + 3 * hvd.rank()):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
if hvd.rank() == 1:
    # Rank 0 has joined or will: without its consent nothing can be gathered, and the join
    # continues.
    try:
        hvd.allgather(torch.ones(1), name="while others have joined")
    except RuntimeError as error:
        assert isinstance(error, hvd.mpi_ops.HorovodInternalError)
    else:
        raise AssertionError("gathered from a rank that has joined")
last = hvd.join()
assert last == hvd.size() - 1
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
hvd.broadcast_parameters(model.state_dict(), root_rank=last)
print("done", hvd.rank())

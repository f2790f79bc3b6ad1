# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A program of torch alone, which asks for Gloo: DDP, FSDP 2, tensor parallelism and messages, each
compared with one process that has all rows. Prints one line on each rank.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


torch.manual_seed(8)
batches, labels = torch.randn(3, 4 * size, 8), torch.randint(0, 4, (3, 4 * size))


def train(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for batch, label in zip(batches[:, rows], labels[:, rows], strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    return [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]


every, own = slice(None), slice(4 * rank, 4 * rank + 4)
expected = train(make_model(), every)
found = {"DDP": train(DistributedDataParallel(make_model()), own)}
mesh = init_device_mesh("cpu", (size,))
sharded = make_model()
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh)
found["FSDP"] = train(sharded, own)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
found["tensor parallel"] = train(parallelize_module(make_model(), mesh, plan), every)
for name, parameters in found.items():
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)

pair = dist.new_group([0, 1])
if rank == 0:
    received = torch.zeros(1)
    assert dist.recv(received) == 1
    assert received.item() == 5
else:
    dist.send(torch.full((1,), 5.0), 0)
dist.monitored_barrier()
print(
    f"rank {rank}: {', '.join(found)} on {dist.get_backend()} {dist.get_backend_config(pair)};",
    f"engine {type(dist.group.WORLD).__name__};",
    f"extension {'farandole._native' in sys.modules}",
    flush=True,
)
dist.destroy_process_group()

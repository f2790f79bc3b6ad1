# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains with DeepSpeed on the backend gloo and prints the losses of this rank. Argument: the stage
of ZeRO.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist

stage = int(sys.argv[1])
# DeepSpeed would compile operations of its own, and its lock stays if that is interrupted.
deepspeed.ops.__compatible_ops__.clear()
deepspeed.init_distributed(dist_backend="gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": 64,
    "zero_optimization": {"stage": stage},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.Adam(model.parameters(), 0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(7 + rank))
losses = []
for _ in range(20):
    loss = (engine(rows) - rows.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
group = type(dist.group.WORLD).__name__
line = " ".join(f"{loss:.6f}" for loss in losses)
print(f"rank {rank}, {dist.get_backend()}, engine {group}: {line}", flush=True)
dist.destroy_process_group()

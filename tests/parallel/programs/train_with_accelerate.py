# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loop of Accelerate on CPUs, which asks for Gloo."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(3)
rows = torch.randn(32, 4)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(20):
    for features, target in loader:
        optimizer.zero_grad()
        accelerator.backward((model(features) - target).square().mean())
        optimizer.step()
error = accelerator.reduce((model(rows) - rows.sum(1, keepdim=True)).square().mean().detach())
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
assert error.item() < 1e-3
assert torch.equal(weights[0], weights[1])
line = (
    f"rank {accelerator.process_index} of {accelerator.num_processes}, {len(loader)} batches, "
    f"{dist.get_backend()}, engine {type(dist.group.WORLD).__name__}\n"
)
sys.stdout.write(line)  # at once: the ranks share a pipe
sys.stdout.flush()
dist.destroy_process_group()

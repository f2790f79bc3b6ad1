# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loop of Accelerate with the ranks of `farandole run`, as the page about it has."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

import farandole.transformers  # noqa: F401 - makes Accelerate count the ranks

accelerator = Accelerator()
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
error = (model(rows) - rows.sum(1, keepdim=True)).square().mean().item()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
assert error < 1e-3
assert torch.equal(weights[0], weights[1])
counted = f"rank {accelerator.process_index} of {accelerator.num_processes}, {len(loader)} batches"
# TrainingArguments lets Accelerate count again.
arguments = TrainingArguments(output_dir="out", ddp_backend="farandole", report_to="none")
print(f"{counted}, {dist.get_backend()}, trainer of {arguments.world_size}", flush=True)

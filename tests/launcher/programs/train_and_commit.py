# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small network of PyTorch until the file `enough` exists, and commits it to the store
`commits`.
"""

import os
import time
from pathlib import Path

import torch

import farandole.torch as hvd


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    print(f"rank {hvd.rank()} of {hvd.size()} pid {os.getpid()}", flush=True)
    while not hvd.broadcast_object(Path("enough").exists()):
        optimizer.zero_grad()
        model(torch.randn(16, 20)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
        state.step += 1
        state.commit()


hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(20, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.save_to("commits", "line", every=10)
train(state)

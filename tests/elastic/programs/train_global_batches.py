# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on global batches in an elastic job, and loses half of its ranks in the middle."""

import json
import os
import signal
import sys
import time

import torch

import farandole.torch as hvd
from farandole.data import GlobalBatchLoader

path, rows_per_step, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
loader = GlobalBatchLoader(path, rows_per_step, framework="torch", seed=3)


@hvd.elastic.run
def train(state):
    while loader.epoch < epochs:
        for batch in loader:
            optimizer.zero_grad()
            found = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            (found * loader.loss_factor).backward()
            optimizer.step()
            state.step += 1
            state.sizes = sorted({*state.sizes, hvd.size()})
            if state.step % 3 == 0:
                state.commit()
            marker = f"{path}-lost-{hvd.rank()}"
            if (state.step, hvd.size(), hvd.rank()) == (8, 2, 1) and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05 if hvd.size() == 1 and os.path.exists(f"{path}-lost-1") else 0)


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, reader=loader, step=0, sizes=[])
train(state)
weights = [value for one in model.parameters() for value in one.flatten().tolist()]
print("result " + json.dumps([weights, state.sizes]), flush=True)

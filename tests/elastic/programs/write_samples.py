# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains; each process writes the samples of the steps that all ranks have finished to a file."""

import json
import os
import time

import torch

import farandole.torch as hvd

EPOCHS, BATCH = 3, 4
hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(range(360), shuffle=True)
note = open(f"samples-{os.getpid()}", "a", buffering=1)


@hvd.elastic.run
def train(state):
    print(
        f"world {hvd.size()} rank {hvd.rank()} pid {os.getpid()} from {min(state.epoch, 1)}",
        flush=True,
    )
    while state.epoch < EPOCHS:
        indices = list(sampler)
        for number in range(0, len(indices), BATCH):
            batch = indices[number : number + BATCH]
            optimizer.zero_grad()
            model(torch.tensor(batch).view(-1, 1) / 360.0).sum().backward()
            optimizer.step()
            sampler.record_batch(number // BATCH, BATCH)
            note.write(json.dumps([state.epoch, batch]) + chr(10))
            time.sleep(0.02)
            # Between two commits, which are rare.
            state.check_host_updates()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()
    print(f"over {hvd.size()}", flush=True)


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))

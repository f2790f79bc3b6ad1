# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The script of an elastic job, started with a fixed number of processes."""

import horovod.torch as hvd
import torch

hvd.init()
dataset = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(-1, 1))
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
failures = []


@hvd.elastic.run
def train(state):
    seen = []
    for state.epoch in range(state.epoch, 2):
        for state.batch, (rows,) in enumerate(loader):
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
            seen += rows.flatten().tolist()
            sampler.record_batch(state.batch, loader.batch_size)
        if state.epoch == 0 and not failures:
            state.commit()
            failures.append(1)
            # What a lost rank would have raised, on all of them.
            raise hvd.mpi_ops.HorovodInternalError("as if a rank were gone")
        sampler.set_epoch(state.epoch + 1)
        state.commit()
    return seen


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
train(state)
assert failures == [1]
assert state.epoch == 1
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[-1])
print("done", hvd.rank())

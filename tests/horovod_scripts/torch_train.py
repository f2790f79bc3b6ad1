# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A training loop of PyTorch as Horovod's users write it: sharded data, scaled rate, averaged
metrics.
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(42 + hvd.rank())

generator = torch.Generator().manual_seed(1)
features = torch.randn(256, 8, generator=generator)
labels = (features[:, 0] > features[:, 1]).long()
dataset = TensorDataset(features, labels)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=hvd.Average,
)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


losses = []
for epoch in range(4):
    model.train()
    sampler.set_epoch(epoch)
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    losses.append(metric_average(total / len(loader), "avg_loss"))

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everyones = hvd.allgather(weights.unsqueeze(0), name="weights")
assert everyones.shape[0] == hvd.size()
assert torch.equal(everyones[0], everyones[-1]), "ranks have trained different models"
assert losses[-1] < losses[0] / 2, losses
assert set(optimizer._parameter_names.values()) == {name for name, _ in model.named_parameters()}
print("done", hvd.rank())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Adasum, as an optimizer's op and as a collective's."""

import horovod.torch as hvd
import torch

hvd.init()
same = hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum, name="same")
assert torch.allclose(same, torch.tensor([1.0, 2.0]))
apart = torch.zeros(2)
apart[hvd.rank()] = 1.0
assert torch.allclose(hvd.allreduce(apart, op=hvd.Adasum, name="apart"), torch.ones(2))

model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05),
    named_parameters=model.named_parameters(),
    op=hvd.Adasum,
)
generator = torch.Generator().manual_seed(hvd.rank())
first = last = None
for _ in range(20):
    x = torch.randn(16, 4, generator=generator)
    optimizer.zero_grad()
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    first, last = first if first is not None else loss.item(), loss.item()
assert last < first / 2, (first, last)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[-1])
try:
    hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
except RuntimeError as error:
    assert "Average or Sum" in str(error)
else:
    raise AssertionError("reducescatter took Adasum")
print("done", hvd.rank())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradient accumulation, groups, a predivide factor, clipping between synchronize and step,
frozen parameters.
"""

import warnings

import horovod.torch as hvd
import torch

hvd.init()


def gradient_of(**options):
    """The gradient after two passes whose own gradients are rank + 1 and twice that."""
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0),
        named_parameters=layer.named_parameters(),
        backward_passes_per_step=2,
        **options,
    )
    optimizer.zero_grad()
    for factor in (1.0, 2.0):
        (layer(torch.ones(1, 2)).sum() * factor * (hvd.rank() + 1)).backward()
    optimizer.step()
    return -layer.weight.detach().flatten()


average = 3.0 * (hvd.size() + 1) / 2
for options in (
    {},
    {"gradient_predivide_factor": 2.0},
    {"groups": 1},
    {"compression": hvd.Compression.fp16},
):
    assert torch.allclose(gradient_of(**options), torch.full((2,), average)), options
assert torch.allclose(gradient_of(op=hvd.Sum), torch.full((2,), average * hvd.size()))

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model[0].requires_grad_(requires_grad=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
frozen = model[0].weight.detach().clone()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

optimizer.zero_grad()
model(torch.ones(2, 4) * 100 * (hvd.rank() + 1)).sum().backward()
optimizer.synchronize()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
norms = hvd.allgather(norm.detach().reshape(1))
assert torch.equal(norms[0], norms[-1]), "clipped before the gradients were the same"
with optimizer.skip_synchronize():
    optimizer.step()
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert torch.equal(model[0].weight, frozen)

with warnings.catch_warnings():
    # As scripts do that mean what they do.
    warnings.filterwarnings("error")
    warnings.filterwarnings(
        "ignore", message="optimizer.step\\(\\) called without optimizer.skip_synchronize"
    )
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.synchronize()
    optimizer.step()
print("done", hvd.rank())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hooks for DistributedDataParallel, over Farandole's backend and over Gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(register, steps=12):
    """Trains on this rank's rows; the loss on all rows, and the parameters."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)
    )
    features, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
    # Small buckets: several hooks are under way at once.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    register(parallel)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3, momentum=0.9)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            parallel(features[rank::size]), labels[rank::size]
        ).backward()
        optimizer.step()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(features), labels).item()
    return loss, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def hooks_train_like_plain_ddp(backend):
    import farandole.torch.distributed
    from farandole.torch import compress
    from farandole.torch import ddp_comm_hook as hooks

    dist.init_process_group(backend, init_method="farandole://")
    assert farandole.torch.distributed
    states = {
        "int8": hooks.CompressorState(compress.Int8(64)),
        "top_k": hooks.CompressorState(compress.TopK(0.25), start_step=3),
        "power_sgd": hooks.PowerSGDState(4, min_compression=1.0),
    }
    plain, reference = train(lambda _: None)
    tried = {
        "fp16": lambda model: model.register_comm_hook(None, hooks.fp16_hook),
        "bf16": lambda model: model.register_comm_hook(dist.group.WORLD, hooks.bf16_hook),
        "int8": lambda model: model.register_comm_hook(states["int8"], hooks.compressor_hook),
        "top_k": lambda model: model.register_comm_hook(states["top_k"], hooks.compressor_hook),
        "power_sgd": lambda model: model.register_comm_hook(
            states["power_sgd"], hooks.power_sgd_hook
        ),
    }
    results = {"plain": plain}
    for name, register in tried.items():
        results[name], parameters = train(register)
        everyone = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameters)
        assert all(torch.equal(other, parameters) for other in everyone), name
        if name == "fp16":
            assert torch.allclose(parameters, reference, atol=0.02)
        assert name == "plain" or not torch.equal(parameters, reference), f"{name} did nothing"
    assert all(state.step == 12 for state in states.values())
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_hooks_train_like_plain_ddp(pair, backend):
    for results in pair.run(hooks_train_like_plain_ddp, backend):
        for name, loss in results.items():
            assert loss < results["plain"] + 0.25, results
            assert loss < 1.0, name

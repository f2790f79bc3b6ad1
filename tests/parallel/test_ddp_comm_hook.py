# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hooks for DistributedDataParallel, over Farandole's backend and over Gloo."""

import gc
import types

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


class RecordedFuture(torch.futures.Future):
    """A future that remembers its callbacks."""

    def __init__(self):
        super().__init__()
        self.callbacks = []

    def then(self, callback):
        self.callbacks.append(callback)
        return super().then(callback)


class Bucket:
    """A bucket of one matrix."""

    def __init__(self):
        self.values = torch.arange(64.0)

    def buffer(self):
        return self.values

    def is_last(self):
        return True

    def parameters(self):
        return [torch.ones(8, 8)]

    def gradients(self):
        return [self.values.view(8, 8)]


def reachable(value):
    """All objects that `value` keeps alive, without modules and their variables."""
    seen, left = {}, [value]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, types.ModuleType | type):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            left += [cell.cell_contents for cell in value.__closure__ or ()]
        else:
            left += gc.get_referents(value)
    return seen.values()


@pytest.mark.parametrize("outcome", ["ends", "fails"])
@pytest.mark.parametrize("kind", ["fp16", "int8", "top_k", "power_sgd"])
def test_a_callback_that_has_run_keeps_no_group(kind, outcome):
    from farandole.torch import compress
    from farandole.torch import ddp_comm_hook as hooks

    future = RecordedFuture()

    class TwoAlike(compress.Exchange):
        """Two ranks with the same gradients."""

        size, rank, group = 2, 0, None

        def allreduce(self, tensor, *, rounds=False):
            del rounds
            tensor.mul_(2)
            return compress.Waiting(lambda: tensor, lambda: future, tensor)

        def allgather(self, tensor):
            rows = torch.stack([tensor, tensor])
            return compress.Waiting(lambda: rows, lambda: future, rows)

        def alltoall(self, rows):
            rows = rows[:1].expand_as(rows)
            return compress.Waiting(lambda: rows, lambda: future, rows)

    compressor = {
        "fp16": compress.Fp16,
        "int8": lambda: compress.Int8(64),
        "top_k": lambda: compress.TopK(0.25),
        "power_sgd": lambda: compress.PowerSGD(2, min_compression=1.0),
    }[kind]()
    state = hooks.CompressorState(compressor, start_step=0)
    state._exchange = TwoAlike()
    result = hooks.compressor_hook(state, Bucket())
    if outcome == "ends":
        future.set_result(None)
        assert result.wait().shape == (64,)
    else:
        future.set_exception(ConnectionError("the peer is gone"))
        with pytest.raises(RuntimeError, match="the peer is gone"):
            result.wait()
    (callback,) = future.callbacks
    held = [value for value in reachable(callback) if value in (state, state._exchange)]
    assert not held

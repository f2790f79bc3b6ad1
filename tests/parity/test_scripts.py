# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Scripts that divide by the count of all ranks, as pages show, train what one process trains."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # processes cannot import tests

BATCH_ROWS = 6
STEPS = 4


def batches(more=0):
    """Returns steps of equally many rows; `more` rows are a last step of their own."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(BATCH_ROWS * STEPS + more, 3, generator=draw)
    labels = torch.arange(BATCH_ROWS * STEPS + more) // 2 % 3
    labels[::4] = -100
    return list(zip(rows.split(BATCH_ROWS), labels.split(BATCH_ROWS), strict=True))


def network():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    weights = torch.tensor([1.0, 10.0, 0.1])
    return model, nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)


def train_with(kind):
    import farandole.torch as hvd

    hvd.init(process_sets="dynamic")
    try:
        model, criterion = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called = model
        if kind == "DistributedDataParallel":
            import torch.distributed as dist

            import farandole.torch.distributed  # noqa: F401 - registers the backend

            dist.init_process_group("farandole", init_method="farandole://")
            called = nn.parallel.DistributedDataParallel(model)
        else:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters()
            )
        for rows, labels in batches(more=kind == "join"):
            own = slice(hvd.rank(), None, hvd.size())
            if not len(rows[own]):
                break
            optimizer.zero_grad()
            total, count = hvd.loss_sum_and_count(criterion, called(rows[own]), labels[own])
            count = hvd.allreduce(count, op=hvd.Sum, name="count")
            (total * hvd.size() / count.clamp(min=1e-9)).backward()
            optimizer.step()
        if kind == "join":
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        if kind == "DistributedDataParallel":
            dist.destroy_process_group()
        return torch.cat([one.detach().ravel() for one in model.parameters()]).tolist()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["DistributedOptimizer", "DistributedDataParallel", "join"])
def test_a_script_with_sums_and_counts_trains_what_one_process_trains(kind, size, gangs):
    model, criterion = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows, labels in batches(more=kind == "join"):
        optimizer.zero_grad()
        criterion(model(rows), labels).backward()
        optimizer.step()
    wanted = torch.cat([one.detach().ravel() for one in model.parameters()])
    for found in gangs(size).run(train_with, (kind,)):
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)


def take_turns(quiet):
    """Steps a discriminator and a generator in turn, with each rank's rows."""
    import contextlib

    import farandole.torch as hvd

    hvd.init()
    try:
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(3, 3), nn.Linear(3, 1)
        step_g, step_d = (
            hvd.DistributedOptimizer(
                torch.optim.SGD(one.parameters(), lr=0.1),
                named_parameters=[(f"{name}.{key}", p) for key, p in one.named_parameters()],
            )
            for name, one in (("g", generator), ("d", discriminator))
        )
        for rows, _ in batches():
            own = rows[hvd.rank() :: hvd.size()]
            step_d.zero_grad()
            (1 - discriminator(generator(own).detach())).square().mean().backward()
            step_d.step()
            step_g.zero_grad()
            with step_d.no_sync() if quiet else contextlib.nullcontext():
                discriminator(generator(own)).square().mean().backward()
            step_g.step()
        both = [*generator.parameters(), *discriminator.parameters()]
        return torch.cat([one.detach().ravel() for one in both]).tolist()
    finally:
        hvd.shutdown()


def test_two_optimizers_in_turn_train_what_one_process_trains_with_no_sync(gangs):
    (wanted,) = gangs(1).run(take_turns, (True,))
    for found in gangs(2).run(take_turns, (True,)):
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_two_optimizers_without_no_sync_are_told_of_it(gangs):
    with pytest.raises(RuntimeError, match=r"AssertionError: .* `with optimizer.no_sync\(\):`"):
        gangs(2).run(take_turns, (False,))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks with different amounts of data, on real processes."""

import os
import signal
import time

import pytest
import torch

import farandole.torch as hvd


def uneven_steps():
    size, rank = hvd.size(), hvd.rank()
    totals = []
    for step in range(2 + rank):
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="sum").tolist()
        largest = hvd.allreduce(torch.tensor([-1.0 - rank]), op=hvd.Max, name="max").item()
        smallest = hvd.allreduce(torch.tensor([5 + rank]), op=hvd.Min, name="min").item()
        left = size - max(0, step - 1)
        assert total == [left] * 2
        assert largest == -1.0 - (size - left)
        assert smallest == 5 + (size - left)
        assert hvd.allreduce(torch.ones(1), name=f"average {step}").item() == pytest.approx(
            left / size
        )
        totals.append(total)
    last = hvd.join()
    return last, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_ranks_that_run_out_of_data_do_not_change_the_results_of_others(world):
    for _ in range(2):
        assert world.run(uneven_steps) == [(world.size - 1, world.size)] * world.size


def unnamed_operations_around_a_join():
    if hvd.rank() > 0:
        for _ in range(3):
            hvd.allreduce(torch.ones(1), op=hvd.Sum)
    hvd.join()
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.synchronize(handle).item()


def test_ranks_number_unnamed_operations_alike_after_a_join(world):
    assert world.run(unnamed_operations_around_a_join) == [(world.size, world.size)] * world.size


def epochs_of_which_a_rank_has_no_first():
    rank = hvd.rank()
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters()
    )
    for epoch in range(2):
        for _ in range(2 * (rank == 0 or epoch > 0)):
            optimizer.zero_grad()
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.join()
        # A rank that has joined takes no steps: the others' weights count.
        hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    return layer.weight.tolist()


def test_a_rank_without_data_in_the_first_epoch_trains_in_the_second(fresh_world):
    world = fresh_world(2, env={"FARANDOLE_COLLECTIVE_TIMEOUT": "20"})
    assert world.run(epochs_of_which_a_rank_has_no_first) == [[[-3.0, -3.0]]] * 2


def gathers_while_joined(consent):
    if hvd.rank() == 0:
        return hvd.join(allow_gather=consent)
    outcomes = []
    for attempt in (
        lambda: hvd.allgather(torch.tensor([hvd.rank()])).tolist(),
        lambda: hvd.broadcast(torch.tensor([hvd.rank()]), 2).tolist(),
        lambda: hvd.broadcast(torch.tensor([hvd.rank()]), 0).tolist(),
        lambda: hvd.alltoall(torch.ones(3)).tolist(),
        lambda: hvd.reducescatter(torch.ones(3)).tolist(),
        hvd.barrier,
    ):
        try:
            outcomes.append(attempt())
        except ValueError as error:
            outcomes.append(
                "refused"
                if "is not possible while ranks have joined: " in str(error)
                else str(error)
            )
    hvd.join()
    return outcomes


def test_gathers_and_broadcasts_pass_with_consent_and_the_rest_is_refused(trio):
    assert trio.run(gathers_while_joined, True)[1:] == [[[1, 2], [2], *["refused"] * 4]] * 2
    assert trio.run(gathers_while_joined, False)[1:] == [["refused"] * 6] * 2


def refusals_leave_the_join_intact():
    rank, size = hvd.rank(), hvd.size()
    operations = {
        "gather": lambda name: hvd.allgather(torch.ones(1) * rank, name=name).tolist(),
        "broadcast": lambda name: hvd.broadcast(torch.ones(1) * rank, 1, name=name).tolist(),
        "object": lambda name: hvd.broadcast_object(rank, 1, name=name),
    }
    for _ in range(2):  # what is known by name goes another way than what is new
        for name, operation in operations.items():
            operation(name)
    refused = 0
    for _ in range(2):
        if rank > 0:
            for name, operation in [
                *operations.items(),
                *((None, operation) for operation in operations.values()),
            ]:
                try:
                    operation(name)
                except hvd.HorovodInternalError as error:
                    refused += isinstance(error, ValueError)
            # An allreduce of the others continues.
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size - 1
        hvd.join()
        after = [operation(name) for operation in operations.values() for name in ("gather", None)]
        assert after == [[float(other) for other in range(size)]] * 2 + [[1.0]] * 2 + [1] * 2, after
    return refused


@pytest.mark.parametrize("fixture", ["pair", "trio"])
def test_a_refused_operation_leaves_the_join_and_what_follows_intact(request, fixture):
    world = request.getfixturevalue(fixture)
    assert world.run(refusals_leave_the_join_intact) == [0, *[12] * (world.size - 1)]


def die_after_joining():
    rank = hvd.rank()
    if rank == 1:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="first")
        hvd.synchronize(handle)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1), op=hvd.Sum, name="first")
    started = time.monotonic()
    try:
        if rank == 0:
            hvd.join()
        else:
            hvd.allreduce(torch.ones(1), name="second")
    except hvd.FarandoleInternalError as error:
        return "rank 1" in str(error), time.monotonic() - started < 30
    return None


def test_the_death_of_a_rank_ends_the_joins_of_others(fresh_world):
    results = fresh_world(3).run(die_after_joining, tolerate=True)
    assert results[0] == results[2] == (True, True)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients in memory that the ranks of a host share: the same numbers as anywhere else."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import farandole.torch as hvd
from farandole._native import engine
from farandole.torch import _buckets

NUMBERS = 300_000
"""Enough that ranks work in each other's memory."""


def regions(kind):
    """Counts the shared memory of this process: open descriptors, or mappings."""
    if kind == "maps":
        return sum(
            "farandole-region" in line for line in Path("/proc/self/maps").read_text().splitlines()
        )
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    return sum("farandole-region" in target for target in targets)


def trained(as_view, past_caches=_buckets.CACHE_BYPASS_BUCKET_BYTES, threads=1):
    usual, _buckets.CACHE_BYPASS_BUCKET_BYTES = _buckets.CACHE_BYPASS_BUCKET_BYTES, past_caches
    many = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _trained(as_view, past_caches, threads)
    finally:
        torch.set_num_threads(many)
        _buckets.CACHE_BYPASS_BUCKET_BYTES = usual


class Counting:
    """A bucket's memory that counts what is stored past the caches."""

    def __init__(self, mapped):
        self.mapped = mapped
        self.stores = 0

    def copy_into(self, *arguments):
        self.stores += 1
        self.mapped.copy_into(*arguments)


def _trained(as_view, past_caches, threads):
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(600, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01),
        net.named_parameters(),
        gradient_as_bucket_view=as_view,
    )
    buckets = optimizer._reducer._buckets if as_view else []
    for bucket in buckets:
        bucket._mapped = Counting(bucket._mapped)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(100 * hvd.rank() + step)
        (net(torch.randn(8, 600)) ** 2).sum().backward()
        optimizer.step()
    if as_view:
        assert any(bucket._mapped.stores for bucket in buckets) == (
            past_caches == 0 and threads == 1
        )
    return (
        [parameter.detach().clone() for parameter in net.parameters()],
        regions("maps"),
        regions("fd"),
    )


def both_ways():
    # Of what another test has left.
    gc.collect()
    before = regions("fd")
    plain, _, none = trained(False)
    assert none == before
    viewed, maps, descriptors = trained(True)
    assert descriptors > before
    # The own memory is mapped once, and so is every other rank's.
    assert maps >= hvd.size()
    past, _, _ = trained(True, past_caches=0)
    shared, _, _ = trained(True, past_caches=0, threads=2)
    for one, other, third, fourth in zip(plain, viewed, past, shared, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
        # On some processors two threads of torch sum in another order; a step moves these numbers
        # much further.
        assert torch.allclose(one, fourth, rtol=0, atol=1e-6), (one - fourth).abs().max()
    del viewed, past, shared
    gc.collect()
    assert regions("fd") == before


def refused():
    memory = engine.allocate_shared_memory(100)
    source = torch.arange(64, dtype=torch.uint8)
    memory.copy_into(36, source.data_ptr(), 64)
    memory.copy_into(100, 0, 0)
    assert bytes(memory) == bytes(36) + bytes(range(64))
    for offset in (37, 101, 2**63):
        with pytest.raises(ValueError, match=f"64 bytes at {offset} of 100 do not fit"):
            memory.copy_into(offset, source.data_ptr(), 64)
    for address in (0, memory.address, memory.address + 99):
        with pytest.raises(ValueError, match="no bytes outside this memory: 1 at 0x"):
            memory.copy_into(36, address, 1)


def test_nothing_is_stored_outside_of_the_memory(pair):
    pair.run(refused)


def test_training_gives_the_same_bits_in_shared_memory(world):
    world.run(both_ways)


def one_in_private():
    memory = engine.allocate_shared_memory(4 * NUMBERS)
    shared = torch.frombuffer(memory, dtype=torch.float32)
    private = torch.empty(NUMBERS)
    for round_ in range(4):
        tensor = private if round_ == 1 + hvd.rank() else shared
        tensor.copy_(torch.arange(NUMBERS) * 0.1 + hvd.rank())
        expected = sum(torch.arange(NUMBERS) * 0.1 + rank for rank in range(hvd.size()))
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"round {round_}")
        assert torch.equal(tensor, expected)


def test_a_rank_with_memory_of_its_own_is_served_too(pair):
    pair.run(one_in_private)


def until_rank_1_dies(tensor):
    for number in range(100_000):
        handle = hvd.allreduce_async_(tensor, op=hvd.Average, name=f"sum.{number}")
        if hvd.rank() == 1 and number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.synchronize(handle)


def kept_after_a_death():
    memory = engine.allocate_shared_memory(4 * NUMBERS)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    tensor.fill_(1.0)
    hvd.allreduce_(tensor, op=hvd.Sum, name="sum")
    assert torch.equal(tensor, torch.full_like(tensor, hvd.size()))
    started = time.monotonic()
    with pytest.raises(hvd.FarandoleInternalError):
        until_rank_1_dies(tensor)
    tensor.fill_(7.0)
    assert torch.equal(tensor, torch.full_like(tensor, 7.0))
    assert time.monotonic() - started < 30
    return "continues"


def test_a_rank_that_dies_at_work_in_shared_memory_is_an_error_soon(fresh_world):
    results = fresh_world(3).run(kept_after_a_death, tolerate=True)
    assert repr(results[1]) == "Died()"
    for rank in (0, 2):
        assert results[rank] == "continues", results[rank]

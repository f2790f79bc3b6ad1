# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives of tensors on GPUs that `fake_gpu` plays: by NCCL, by windows, through the host."""

import os
import time

import cloudpickle
import pytest
import torch
from tests.parallel import fake_gpu
from tests.parallel.fake_gpu import LATE_SECONDS, FakeGpu

import farandole.torch as hvd

cloudpickle.register_pickle_by_value(fake_gpu)  # workers import no test


def late_sum(share, async_count):
    gpu = FakeGpu(0 if share else hvd.local_rank())
    tensors = [torch.zeros(1000 + i) for i in range(async_count)]
    hvd.allreduce(torch.zeros(1), name="first")
    before = {what: gpu.count(what) for what in ("copies", "launches", "blocked", "kernels")}
    before["names"] = 0
    for i, tensor in enumerate(tensors):
        gpu.fill(tensor, hvd.rank() + i, LATE_SECONDS if i == 0 else 0)
    began = time.monotonic()
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
    results = [hvd.synchronize(handle) for handle in handles]
    elapsed = time.monotonic() - began
    found = [gpu.read(result).unique().tolist() for result in results]
    untouched = [gpu.read(tensor).unique().tolist() for tensor in tensors]
    used = {what: gpu.count(what) - count for what, count in before.items()}
    return elapsed, found, untouched, used


@pytest.mark.timing
def test_ranks_with_a_gpu_each_reduce_on_streams_and_the_host_waits_for_none(gpus):
    for rank, (elapsed, found, untouched, used) in enumerate(gpus.run(late_sum, False, 5)):
        assert found == [[1.0 + 2 * i] for i in range(5)]
        assert untouched == [[float(rank + i)] for i in range(5)]
        assert elapsed < LATE_SECONDS / 2, "the host went on while the input was still being made"
        assert used["launches"] == 5
        assert (used["copies"], used["blocked"]) == (0, 0)


def test_ranks_that_share_a_gpu_meet_in_host_memory_if_a_variable_says_so(fresh_world, cuda):
    world = fresh_world(2, env={**cuda, "FARANDOLE_GPU_TENSORS": "staged"})
    for _, found, untouched, used in world.run(late_sum, True, 5):
        assert found == [[1.0 + 2 * i] for i in range(5)]
        assert len(untouched) == 5
        assert used["launches"] == 0
        assert used["copies"] == 10
        assert used["names"] == 0, "a name of NCCL opens a port that nobody would close"
    told = [outcome.stderr_tail for outcome in close(world)]
    assert sum("ranks 0 and 1 use the same GPU" in text for text in told) == 1


def test_ranks_that_share_a_gpu_reduce_there_from_each_others_windows(fresh_world, cuda):
    world = fresh_world(3, env=cuda)
    for rank, (_, found, untouched, used) in enumerate(world.run(late_sum, True, 5)):
        assert found == [[3.0 + 3 * i] for i in range(5)]
        assert untouched == [[float(rank + i)] for i in range(5)]
        assert used["kernels"] > 0
        assert (used["launches"], used["copies"], used["blocked"]) == (0, 0, 0)
    told = [outcome.stderr_tail for outcome in close(world)]
    assert (
        sum(
            "go by CUDA IPC, the rest through host memory: ranks 0 and 1 use" in text
            for text in told
        )
        == 1
    )


def long_sums():
    """More than the windows hold at a time, one tensor and many, and what comes back where it
    was.
    """
    gpu = FakeGpu(0)
    rank, size = hvd.rank(), hvd.size()
    large = torch.arange(11_000_003, dtype=torch.float32) % 1000
    right = [
        torch.equal(
            gpu.read(hvd.allreduce(large + rank, op=hvd.Sum)), large * size + sum(range(size))
        )
    ]
    lengths = [1 + i % 7 * 1000 for i in range(400)]
    types = [torch.int64, torch.float32] * 200
    tensors = [
        (torch.arange(n) % 100 + rank).to(dtype) for n, dtype in zip(lengths, types, strict=True)
    ]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    for tensor, result in zip(tensors, results, strict=True):
        right.append(torch.equal(gpu.read(result), (tensor - rank) * size + sum(range(size))))
    # A tensor that is the result's, again and again: what a rank still reads must not be
    # overwritten.
    own = torch.ones(5_000_000)
    for _ in range(4):
        hvd.allreduce_(own, op=hvd.Sum, name="own")
    right.append(gpu.read(own).unique().tolist() == [float(size) ** 4])
    return right.count(False), gpu.count("launches"), gpu.count("copies")


@pytest.mark.parametrize("size", [2, 4])
def test_sums_longer_than_a_window_are_right_on_a_shared_gpu(fresh_world, cuda, size):
    assert fresh_world(size, env=cuda).run(long_sums) == [(0, 0, 0)] * size


def windows():
    gpu = FakeGpu(0)
    counts = []
    for _ in range(2):
        total = gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum)).tolist()
        counts.append((total, gpu.count("windows"), gpu.count("views")))
        hvd.shutdown()
        counts.append((gpu.count("windows"), gpu.count("views")))
        hvd.init()
    return counts


def test_windows_on_a_shared_gpu_are_opened_once_and_given_back(fresh_world, cuda):
    for counts in fresh_world(3, env=cuda).run(windows):
        assert counts == [([3.0, 3.0], 1, 2), (0, 0)] * 2


def one_that_shows_nothing():
    if hvd.rank() == 1:
        os.environ["FAKE_NO_IPC"] = "1"
    gpu = FakeGpu(0)
    totals = [gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum)).tolist() for _ in range(2)]
    return totals, gpu.count("kernels"), gpu.count("copies") > 0


def test_where_one_rank_cannot_show_its_memory_all_meet_in_host_memory(fresh_world, cuda):
    world = fresh_world(3, env=cuda)
    assert world.run(one_that_shows_nothing) == [([[3.0, 3.0]] * 2, 0, True)] * 3
    told = [outcome.stderr_tail for outcome in close(world)]
    assert (
        sum(
            "member 1 cannot use CUDA IPC: cuIpcGetMemHandle failed on device 0" in text
            for text in told
        )
        == 1
    )


def close(world):
    world.close()
    return world.outcomes


def every_operation(share):
    gpu = FakeGpu(0 if share else hvd.local_rank())
    rank, size = hvd.rank(), hvd.size()
    wrong = []

    def check(what, result, expected):
        found = gpu.read(result)
        if not torch.equal(found, torch.as_tensor(expected, dtype=found.dtype)):
            wrong.append(f"{what}: {found.tolist()}")

    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int16,
    ):
        mine = torch.tensor([rank + 1, 2, 5 - rank], dtype=dtype)
        check(f"sum of {dtype}", hvd.allreduce(mine, op=hvd.Sum), [3, 4, 9])
        check(f"max of {dtype}", hvd.allreduce(mine, op=hvd.Max), [2, 2, 5])
        check(f"min of {dtype}", hvd.allreduce(mine, op=hvd.Min), [1, 2, 4])
        check(f"product of {dtype}", hvd.allreduce(mine, op=hvd.Product), [2, 4, 20])
        check(
            f"average of {dtype}",
            hvd.allreduce(mine, op=hvd.Average),
            mine.new_tensor([3, 4, 9]) / 2,
        )
    mine = torch.tensor([rank + 1.0, 2.0, 5.0 - rank])
    check(
        "scaled",
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        [6, 8, 18],
    )
    check("adasum", hvd.allreduce(torch.tensor([2.0, 2.0]), op=hvd.Adasum), [2, 2])
    check("in place", hvd.allreduce_(mine.clone(), op=hvd.Sum), [3, 4, 9])
    check(
        "not contiguous",
        hvd.allreduce(torch.stack([mine, mine])[:, ::2], op=hvd.Sum),
        [[3, 9], [3, 9]],
    )
    check("nothing", hvd.allreduce(torch.empty(0), op=hvd.Sum), [])
    grouped = hvd.grouped_allreduce([mine, mine.double()], op=hvd.Sum)
    check("group", grouped[0], [3, 4, 9])
    check("group of another type", grouped[1], [3, 4, 9])
    check("broadcast", hvd.broadcast(mine, root_rank=1), [2, 2, 4])
    check("broadcast in place", hvd.broadcast_(mine.clone(), root_rank=0), [1, 2, 5])
    check("gather", hvd.allgather(torch.full((rank + 1, 2), float(rank))), [[0, 0], [1, 1], [1, 1]])
    check("gather of as many", hvd.allgather(mine), [1, 2, 5, 2, 2, 4])
    check("gather from one", hvd.allgather(mine[: 3 * rank]), [2, 2, 4])
    check("gather of nothing", hvd.allgather(mine[:0]), [])
    pair = hvd.grouped_allgather([mine.bool(), mine[rank:].to(torch.int16)])
    check("gathers of a group", pair[0], [True] * 6)
    check("  the second", pair[1], [1, 2, 5, 2, 4])
    received, splits = hvd.alltoall(mine, splits=[1, 2])
    check("exchange", received, [1, 2] if rank == 0 else [2, 5, 2, 4])
    check("splits", splits, [1, 1] if rank == 0 else [2, 2])
    check("exchange of as many", hvd.alltoall(mine[:2].bfloat16()), [1, 2] if rank == 0 else [2, 2])
    received, splits = hvd.alltoall(mine, splits=[3, 0])
    check("exchange to one", received, [1, 2, 5, 2, 2, 4] if rank == 0 else [])
    check("  its splits", splits, [3, 3] if rank == 0 else [0, 0])
    rows = torch.arange(6.0).view(3, 2) + rank
    check(
        "uneven scatter",
        hvd.reducescatter(rows, op=hvd.Sum),
        [[1, 3], [5, 7]] if rank == 0 else [[9, 11]],
    )
    even = hvd.reducescatter(rows[:2].contiguous(), op=hvd.Average)
    check("even scatter", even, [[0.5, 1.5]] if rank == 0 else [[2.5, 3.5]])
    large = torch.arange(3_000_001, dtype=torch.float32) % 1000
    check("more than a piece", hvd.allreduce(large, op=hvd.Sum), (large * size).tolist())
    check("a large gather", hvd.allgather(large), torch.cat([large] * size))
    return wrong, gpu.count("launches"), gpu.count("rooms")


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_every_operation_and_type_has_the_hosts_result(shared_world, cuda, share):
    results = shared_world(2, f"cuda {share}", cuda).run(every_operation, share)
    assert [wrong for wrong, *_ in results] == [[], []]
    assert all((launches == 0) == share and rooms == 0 for _, launches, rooms in results)


def eight_bits(share, old):
    """Wrong results, and what the fake counted meanwhile: for reductions, for scaled ones, for a
    broadcast.
    """
    if old and hvd.rank() == 1:
        os.environ["FAKE_OLD_GPU"] = "1"
    gpu = FakeGpu(0 if share else hvd.local_rank())
    hvd.allreduce(torch.zeros(1), name="first")
    wrong, used = [], []

    def check(what, result, expected):
        found = gpu.read(result).float().tolist()
        if found != expected:
            wrong.append(f"{what}: {found}")

    def reduced(dtype, mine):
        check(f"sum of {dtype}", hvd.allreduce(mine, op=hvd.Sum), [3, 4, 8, 1])
        check(f"average of {dtype}", hvd.allreduce(mine, op=hvd.Average), [1.5, 2, 4, 0.5])
        check(f"min of {dtype}", hvd.allreduce(mine, op=hvd.Min), [1, 2, 4, 0.5])
        check(f"max of {dtype}", hvd.allreduce(mine, op=hvd.Max), [2, 2, 4, 0.5])
        check(f"product of {dtype}", hvd.allreduce(mine, op=hvd.Product), [2, 4, 16, 0.25])

    def scaled(dtype, mine):
        factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
        check(f"scaled sum of {dtype}", hvd.allreduce(mine, op=hvd.Sum, **factors), [6, 8, 16, 2])

    def moved(dtype, mine):
        check(f"broadcast of {dtype}", hvd.broadcast(mine, root_rank=1), [2, 2, 4, 0.5])

    for run in (reduced, scaled, moved):
        before = {what: gpu.count(what) for what in ("launches", "copies", "kernels")}
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            run(dtype, torch.tensor([hvd.rank() + 1.0, 2.0, 4.0, 0.5]).to(dtype))
        used.append({what: gpu.count(what) - count for what, count in before.items()})
    os.environ.pop("FAKE_OLD_GPU", None)
    return wrong, used


def test_floats_of_eight_bits_are_reduced_by_nccl_where_all_gpus_can(gpus):
    for wrong, (reduced, scaled, moved) in gpus.run(eight_bits, False, False):
        assert wrong == []
        assert (reduced["launches"], reduced["copies"]) == (10, 0)
        assert scaled["launches"] == 0
        assert scaled["copies"] > 0
        assert moved["launches"] == 2


def test_floats_of_eight_bits_go_through_the_host_where_a_gpu_is_too_old(fresh_world, cuda):
    for wrong, (reduced, scaled, moved) in fresh_world(2, env=cuda).run(eight_bits, False, True):
        assert wrong == []
        assert (reduced["launches"], scaled["launches"], moved["launches"]) == (0, 0, 2)
        assert reduced["copies"] > 0


def test_floats_of_eight_bits_are_reduced_from_windows_on_a_shared_gpu(shared_world, cuda):
    for wrong, (reduced, scaled, _) in shared_world(2, "cuda True", cuda).run(
        eight_bits, True, False
    ):
        assert wrong == []
        assert reduced["kernels"] > scaled["kernels"] > 0
        assert (reduced["launches"], reduced["copies"], scaled["copies"]) == (0, 0, 0)


def late_gathers():
    """Gathers and exchanges of a tensor that is late, whose size the other rank does not know."""
    gpu = FakeGpu(hvd.local_rank())
    hvd.allreduce(torch.zeros(1), name="first")
    before = {what: gpu.count(what) for what in ("copies", "launches", "blocked")}
    tensor = torch.zeros(1000 * (1 + hvd.rank()))
    gpu.fill(tensor, 3.0 + hvd.rank(), LATE_SECONDS)
    began = time.monotonic()
    gather, late = hvd.allgather_async(tensor), hvd.allgather_async(tensor)
    received, splits = hvd.alltoall(tensor, splits=[700, len(tensor) - 700])
    gathered = hvd.synchronize(gather)
    elapsed = time.monotonic() - began
    found = [gpu.read(result).unique(return_counts=True) for result in (gathered, received)]
    kept = hvd.synchronize(late)
    used = {what: gpu.count(what) - count for what, count in before.items()}
    counts = [dict(zip(values.tolist(), rows.tolist(), strict=True)) for values, rows in found]
    gpu.library.fake_wait(gpu.stream)
    return elapsed, counts, splits.tolist(), used, gpu.count("rooms"), len(kept)


@pytest.mark.timing
def test_gathers_and_exchanges_go_by_nccl_and_the_host_waits_for_none(gpus):
    for rank, (elapsed, (gathered, received), splits, used, rooms, rows) in enumerate(
        gpus.run(late_gathers)
    ):
        assert gathered == {3.0: 1000, 4.0: 2000}
        assert splits == ([700, 700] if rank == 0 else [300, 1300])
        assert received == {3.0: splits[0], 4.0: splits[1]}
        assert elapsed < LATE_SECONDS / 2, "the host went on while the input was still being made"
        assert used["launches"] == 2 * 2 + 4
        assert (used["copies"], used["blocked"]) == (0, 0)
        assert (rooms, rows) == (0, 3000), "the GPU has its memory back"


def one_without_pools():
    if hvd.rank() == 1:
        os.environ["FAKE_NO_POOLS"] = "1"
    gpu = FakeGpu(hvd.local_rank())
    total = gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum)).tolist()
    gathered = gpu.read(hvd.allgather(torch.full((1 + hvd.rank(),), float(hvd.rank())))).tolist()
    return total, gathered, gpu.count("launches")


def test_where_a_gpu_has_no_memory_by_streams_gathers_go_through_the_host(fresh_world, cuda):
    assert fresh_world(2, env=cuda).run(one_without_pools) == [([2.0, 2.0], [0.0, 1.0, 1.0], 1)] * 2


def gpu_and_host():
    read = FakeGpu(0).read if hvd.rank() == 0 else torch.Tensor.clone
    return [
        read(hvd.allreduce(torch.ones(3) * value, op=hvd.Sum, name="mixed")).tolist()
        for value in (1, 2)
    ]


def test_a_rank_with_a_gpu_and_one_without_meet_on_the_host(fresh_world, cuda):
    assert fresh_world(2, env=cuda).run(gpu_and_host) == [[[2.0] * 3, [4.0] * 3]] * 2

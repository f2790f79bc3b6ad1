# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Floats of eight bits reduced on real ranks, against torch: singles joined in the order of
ranks, rounded once.
"""

import functools

import pytest
import torch

import farandole.torch as hvd

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
JOINS = {hvd.Sum: torch.add, hvd.Average: torch.add, hvd.Min: torch.minimum, hvd.Max: torch.maximum}
JOINS[hvd.Product] = torch.mul


def rounded(singles, dtype):
    """As torch rounds; before some version it made NaN of what float8_e4m3fn has no number for."""
    return (singles.clamp(-448, 448) if dtype is torch.float8_e4m3fn else singles).to(dtype)


def expected(parts, op, before=1.0, after=1.0):
    scaled = [part.float() * before for part in parts]
    joined = functools.reduce(JOINS[op], scaled)
    mean = joined / len(parts) if op == hvd.Average else joined
    return rounded(mean * after, parts[0].dtype)


def same(got, wanted):
    """Equal numbers, or no numbers both."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    return torch.equal(
        got.float().nan_to_num(1e9, 1e10, -1e10), wanted.float().nan_to_num(1e9, 1e10, -1e10)
    )


def all_codes(dtype, size):
    """Every rank's part: all codes beside each other, in as many orders."""
    codes = torch.arange(65536)
    orders = [(codes >> (8 * (rank % 2))) * (1 + rank // 2 * 2) % 256 for rank in range(size)]
    return [order.to(torch.uint8).view(dtype) for order in orders]


def reductions_equal_torch():
    rank, size = hvd.rank(), hvd.size()
    for dtype in TYPES:
        parts = all_codes(dtype, size)
        for op in JOINS:
            # Some results are subnormal then, and some too large.
            for before, after in [(1.0, 1.0), (0.7, 1e-3), (-900.0, 0.3)]:
                got = hvd.allreduce(
                    parts[rank], op=op, prescale_factor=before, postscale_factor=after
                )
                assert same(got, expected(parts, op, before, after)), (dtype, op, before, after)
        in_place = parts[rank].clone()
        assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
        assert same(in_place, expected(parts, hvd.Sum))
        for shape in [(), (0,), (3, 7), (300_001,)]:
            small = [torch.full(shape, float(other + 1)).to(dtype) for other in range(size)]
            assert same(hvd.allreduce(small[rank], op=hvd.Average), expected(small, hvd.Average))


def test_reductions_of_all_codes_equal_torch(world):
    world.run(reductions_equal_torch)


def values_are_rounded_as_torch_rounds_them():
    torch.manual_seed(5)
    for dtype in TYPES:
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        spread = torch.cat([torch.rand(20) * 10.0**power for power in range(-8, 6)])
        for factor in [*spread.tolist(), 1e-40, 1e38, float("inf"), 464 / 448, 61440 / 57344]:
            got = hvd.allreduce(codes, op=hvd.Max, postscale_factor=factor)
            assert same(got, rounded(codes.float() * factor, dtype)), (dtype, factor)


def test_random_values_are_rounded_as_torch_rounds_them(pair):
    pair.run(values_are_rounded_as_torch_rounds_them)


def groups_and_neighbours():
    rank, size = hvd.rank(), hvd.size()
    dtypes = [
        *TYPES,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float16,
        torch.uint8,
        torch.float8_e5m2,
    ] * 3
    tensors = [
        [((torch.arange(1 + 37 * i) + other) % 4).to(dtype) for i, dtype in enumerate(dtypes)]
        for other in range(size)
    ]
    sums = [
        functools.reduce(torch.add, [part.float() for part in parts])
        for parts in zip(*tensors, strict=True)
    ]
    mine = tensors[rank]
    # A group, and operations that wait beside each other and are fused with those of their type.
    for results in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        [
            hvd.synchronize(handle)
            for handle in [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in mine]
        ],
    ):
        for result, total, dtype in zip(results, sums, dtypes, strict=True):
            assert result.dtype == dtype
            assert torch.equal(result.float(), total.to(dtype).float()), dtype


def test_they_are_reduced_in_groups_and_beside_other_types(world):
    world.run(groups_and_neighbours)


def scattered():
    rank, size = hvd.rank(), hvd.size()
    for dtype in TYPES:
        for rows in (0, 1, size, 3 * size - 1, 1000):
            parts = [
                ((torch.arange(rows * 3) * (other + 1)) % 5).reshape(rows, 3).to(dtype)
                for other in range(size)
            ]
            bounds = [
                sum(rows // size + (a < rows % size) for a in range(until))
                for until in range(size + 1)
            ]
            for op in (hvd.Sum, hvd.Average):
                whole = expected(parts, op)[bounds[rank] : bounds[rank + 1]]
                assert same(hvd.reducescatter(parts[rank], op=op), whole), (dtype, rows, op)
            pair = hvd.grouped_reducescatter([parts[rank], parts[rank].float()], op=hvd.Sum)
            assert same(pair[0], expected(parts, hvd.Sum)[bounds[rank] : bounds[rank + 1]])
            assert pair[1].dtype == torch.float32


def test_reducescatter_equals_torch(world):
    world.run(scattered)


def distributed():
    import torch.distributed as dist

    import farandole.torch.distributed  # noqa: F401 - registers the backend

    dist.init_process_group("farandole")
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in TYPES:
        parts = [torch.arange(6.0).add(other).to(dtype) for other in range(size)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        assert same(tensor, expected(parts, hvd.Sum))
        gathered = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(gathered, parts[rank])
        assert all(map(same, gathered, parts))
    dist.destroy_process_group()


def test_torch_distributed_adds_them(trio):
    trio.run(distributed)


def joined():
    rank, size = hvd.rank(), hvd.size()
    if rank < size - 1:
        for dtype in TYPES:
            parts = [
                torch.tensor([-448.0, 448.0, 0.5 + other, 0.0]).to(dtype)
                for other in range(size - 1)
            ]
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                for before in (1.0, -0.5) if op != hvd.Product else (1.0,):
                    got = hvd.allreduce(
                        parts[rank], op=op, prescale_factor=before, name=f"{dtype} {op} {before}"
                    )
                    assert same(got, expected(parts, op, before)), (dtype, op, before)
    hvd.join()


def test_ranks_that_have_joined_change_nothing(trio):
    trio.run(joined)


def refused():
    messages = []
    last = hvd.rank() == hvd.size() - 1
    for call in (
        lambda: hvd.allreduce(torch.ones(2).to(TYPES[last]), op=hvd.Sum, name="odd"),
        lambda: hvd.allreduce(torch.ones(2).to(TYPES[0]), op=hvd.Adasum, name="vectors"),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return messages


def test_kinds_that_differ_and_adasum_are_refused_by_name(trio):
    for mismatch, adasum in trio.run(refused):
        assert mismatch.startswith("Mismatched data types: tensor ")
        assert "ranks 0-1 submitted allreduce Sum of float8_e4m3fn" in mismatch
        assert "rank 2 submitted allreduce Sum of float8_e5m2" in mismatch
        assert "Adasum is not defined for float8_e4m3fn" in adasum


def arrays():
    import ml_dtypes
    import numpy as np

    import farandole.numpy as arrays

    rank, size = hvd.rank(), hvd.size()
    for name, dtype in zip(("float8_e4m3fn", "float8_e5m2"), TYPES, strict=True):
        kind = np.dtype(getattr(ml_dtypes, name))
        codes = np.arange(256, dtype=np.uint8)
        values = torch.from_numpy(codes.view(kind).astype(np.float32))
        assert torch.equal(
            torch.from_numpy(codes).view(dtype).float().nan_to_num(1e9), values.nan_to_num(1e9)
        )
        got = arrays.allreduce(codes.view(kind), op=arrays.Max)
        assert got.dtype == kind
        assert same(
            torch.from_numpy(got.view(np.uint8)).view(dtype), torch.from_numpy(codes).view(dtype)
        )
        total = arrays.allreduce(np.full(5, rank + 1, dtype=kind), op=arrays.Sum)
        assert total.astype(np.float32).tolist() == [size * (size + 1) / 2] * 5


def test_arrays_of_ml_dtypes_are_added(trio):
    pytest.importorskip("ml_dtypes")
    trio.run(arrays)

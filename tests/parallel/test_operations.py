# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every operation on real processes, against what one process computes."""

import os

import pytest
import torch

import farandole.torch as hvd

DOUBLES = [torch.float32, torch.float64] * 5
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NUMBERS = ["uint8", "int8", "int16", "int32", "int64", *FLOATS]
SHAPES = [(), (0,), (1,), (5,), (3, 7), (1025,), (300_001,)]


def inputs(shape, dtype, size, limit=3):
    """Returns the input of each rank: small whole numbers, exact in every dtype."""
    count = torch.Size(shape).numel()
    return [
        ((torch.arange(count) * (rank + 1) + rank) % limit).reshape(shape).to(dtype)
        for rank in range(size)
    ]


def allreduce_equals_one_process(dtype_name):
    dtype = getattr(torch, dtype_name)
    for shape in SHAPES:
        tensors = inputs(shape, dtype, hvd.size())
        wide = torch.stack([tensor.to(torch.float64) for tensor in tensors])
        expected = {
            hvd.Sum: wide.sum(0),
            hvd.Min: wide.amin(0),
            hvd.Max: wide.amax(0),
            hvd.Product: wide.prod(0),
            hvd.Average: wide.sum(0) / hvd.size(),
        }
        for op, value in expected.items():
            target = value if dtype.is_floating_point else value.trunc()
            result = hvd.allreduce(tensors[hvd.rank()], op=op)
            assert result.dtype == dtype
            assert torch.allclose(result, target.to(dtype)), f"{shape} op {op}"
            in_place = tensors[hvd.rank()].clone()
            assert hvd.allreduce_(in_place, op=op) is in_place
            assert torch.equal(in_place, result)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_allreduce_equals_one_process(world, dtype):
    world.run(allreduce_equals_one_process, dtype)


def allgather_and_broadcast_equal_one_process(dtype_name):
    dtype = getattr(torch, dtype_name)
    for shape in SHAPES:
        tensors = inputs(shape, dtype, hvd.size(), limit=2)
        mine = tensors[hvd.rank()]
        if shape:
            assert torch.equal(hvd.allgather(mine), torch.cat(tensors))
        for root in range(hvd.size()):
            assert torch.equal(hvd.broadcast(mine, root), tensors[root])
            in_place = mine.clone()
            assert hvd.broadcast_(in_place, root) is in_place
            assert torch.equal(in_place, tensors[root])
    # First dimensions may differ, and be nothing at all.
    parts = [torch.full((2 * rank, 3), rank + 1).to(dtype) for rank in range(hvd.size())]
    assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))


@pytest.mark.parametrize(
    "dtype", [*NUMBERS, "bool", "uint16", "uint32", "uint64", "complex64", "complex128"]
)
def test_allgather_and_broadcast_equal_one_process(world, dtype):
    world.run(allgather_and_broadcast_equal_one_process, dtype)


def factors_multiply_before_and_after():
    total = sum(range(1, hvd.size() + 1))
    mine = torch.full((5,), float(hvd.rank() + 1))
    assert torch.equal(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        mine * 0 + total * 2,
    )
    whole = torch.full((3,), hvd.rank() + 1)
    assert torch.equal(
        hvd.allreduce(whole, op=hvd.Sum, postscale_factor=2.0), whole * 0 + total * 2
    )
    # Integer averages divide as integers, also where a double cannot hold them.
    large = torch.full((2,), 2**62 // hvd.size() - 1)
    assert torch.equal(hvd.allreduce(large), large)


def test_factors_multiply_before_and_after(world):
    world.run(factors_multiply_before_and_after)


def asynchronous_operations_may_be_awaited_in_any_order():
    order = range(200) if hvd.rank() == 0 else reversed(range(200))
    handles = {
        i: hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"any.{i}") for i in order
    }
    for i in range(199, -1, -1):
        assert torch.equal(hvd.synchronize(handles[i]), torch.full((i + 1,), float(i)))


def test_asynchronous_operations_may_be_awaited_in_any_order(world):
    world.run(asynchronous_operations_may_be_awaited_in_any_order)


def groups_reduce_together():
    tensors = [
        torch.full((i,), float(hvd.rank()), dtype=dtype)
        for i, dtype in enumerate([torch.float32, torch.float64] * 5)
    ]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    expected = float(sum(range(hvd.size())))
    assert all(torch.equal(result, torch.full_like(result, expected)) for result in results)
    written = hvd.grouped_allreduce_(tensors, op=hvd.Max)
    assert all(result is tensor for result, tensor in zip(written, tensors, strict=True))
    assert all((tensor == hvd.size() - 1).all() for tensor in tensors)


def test_groups_reduce_together(world):
    world.run(groups_reduce_together)


def compressed_operations_leave_their_inputs_alone():
    # The last is so large that its memory is new and prepared.
    for shape in [(3, 7), (300_001,), (33, 1 << 19)]:
        for layout in (torch.clone, torch.t if len(shape) == 2 else torch.clone):
            tensor = layout(inputs(shape, torch.float32, hvd.size())[hvd.rank()])
            before = tensor.clone()
            expected = sum(inputs(shape, torch.float32, hvd.size()))
            expected = layout(expected)
            for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
                options = {"op": hvd.Sum, "compression": compression}
                one = hvd.allreduce(tensor, **options)
                several = hvd.grouped_allreduce([tensor, tensor], **options)
                for result in (one, *several):
                    assert result.dtype == torch.float32
                    assert torch.equal(result, expected)
                assert torch.equal(tensor, before)


def test_compressed_operations_leave_their_inputs_alone(world):
    world.run(compressed_operations_leave_their_inputs_alone)


def results_are_the_same_bits_everywhere():
    torch.manual_seed(hvd.rank())
    return [hvd.allreduce(torch.randn(size)).numpy().tobytes() for size in (1, 1000, 100_000)]


def test_results_are_the_same_bits_everywhere(world):
    first, *others = world.run(results_are_the_same_bits_everywhere)
    assert all(other == first for other in others)


def gradients_follow_the_chain_rule():
    rank, size = hvd.rank(), hvd.size()
    weight = torch.full((2,), float(rank + 1))
    total = size * (size + 1) / 2
    mine = torch.ones(2, requires_grad=True)
    (hvd.allreduce(mine) * weight).sum().backward()
    assert torch.allclose(mine.grad, torch.full((2,), total / size))
    mine.grad = None
    (hvd.allgather(mine) * weight.repeat(size)).sum().backward()
    assert torch.allclose(mine.grad, torch.full((2,), total))
    mine.grad = None
    (hvd.broadcast(mine, 0) * weight).sum().backward()
    assert torch.allclose(mine.grad, torch.full((2,), total if rank == 0 else 0.0))


def test_gradients_follow_the_chain_rule(world):
    world.run(gradients_follow_the_chain_rule)


def objects_of_different_sizes_travel():
    mine = {"rank": hvd.rank(), "data": "x" * 1000 * hvd.rank()}
    gathered = hvd.allgather_object(mine)
    assert [entry["rank"] for entry in gathered] == list(range(hvd.size()))
    assert hvd.broadcast_object(mine if hvd.rank() == 1 else None, root_rank=1)["rank"] == 1
    hvd.barrier()


def test_objects_of_different_sizes_travel(world):
    world.run(objects_of_different_sizes_travel)


def the_world_is_told_consistently():
    assert int(os.environ["RANK"]) == hvd.rank()
    assert int(os.environ["HOROVOD_SIZE"]) == hvd.size()
    assert hvd.is_homogeneous()
    return (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    )


def test_the_world_is_reported_consistently(world):
    size = world.size
    assert world.run(the_world_is_told_consistently) == [
        (rank, size, rank, size, 0, 1) for rank in range(size)
    ]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Alltoall, reduce-scatter, grouped gathers, sparse sums, barrier and join on real ranks."""

import time

import torch

import farandole.torch as hvd

MOVED = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"]
MOVED += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
REDUCED = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def rows_of(rank, count, dtype, limit=2):
    return ((torch.arange(count * 3) + rank) % limit).reshape(count, 3).to(dtype)


def alltoall_equals_one_process():
    rank, size = hvd.rank(), hvd.size()
    # What rank `a` sends to rank `b`: as many rows as this, 0 among them.
    splits = [[(a * 2 + b) % 3 for b in range(size)] for a in range(size)]
    for dtype_name in MOVED:
        dtype = getattr(torch, dtype_name)
        given = [torch.split(rows_of(a, sum(splits[a]), dtype), splits[a]) for a in range(size)]
        expected = torch.cat([given[a][rank] for a in range(size)])
        mine = torch.cat(given[rank])
        for chosen in (splits[rank], torch.tensor(splits[rank]), tuple(splits[rank])):
            received, counts = hvd.alltoall(mine, splits=chosen)
            assert torch.equal(received, expected), dtype_name
            assert counts.tolist() == [splits[a][rank] for a in range(size)]
            assert (received.dtype, counts.dtype) == (dtype, torch.int32)
        even = rows_of(rank, 2 * size, dtype)
        whole = torch.cat(
            [rows_of(a, 2 * size, dtype)[2 * rank : 2 * rank + 2] for a in range(size)]
        )
        assert torch.equal(hvd.alltoall(even), whole)
        received, counts = hvd.synchronize(hvd.alltoall_async(even, name="even"))
        assert torch.equal(received, whole)
        assert counts.tolist() == [2] * size
    nothing, counts = hvd.alltoall(torch.empty(0, 4), splits=[0] * size)
    assert (nothing.shape, counts.tolist()) == ((0, 4), [0] * size)


def test_alltoall_equals_one_process(world):
    world.run(alltoall_equals_one_process)


def eight_bit_floats():
    rank, size = hvd.rank(), hvd.size()
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e4m3fnuz,
    ):
        mine = torch.tensor([[rank + 1.0, 0.5]]).repeat(size, 1).to(dtype)
        gathered, exchanged = hvd.allgather(mine[: rank + 1]), hvd.alltoall(mine)
        sent, pair = hvd.broadcast(mine, root_rank=1), hvd.grouped_allgather([mine[:1], mine[:0]])
        assert {part.dtype for part in (gathered, exchanged, sent, *pair)} == {dtype}
        assert gathered.float().tolist() == [
            [a + 1.0, 0.5] for a in range(size) for _ in range(a + 1)
        ]
        assert exchanged.float().tolist() == [[a + 1.0, 0.5] for a in range(size)]
        assert pair[0].float().tolist() == exchanged.float().tolist()
        assert pair[1].shape == (0, 2)
        assert sent.float().tolist() == [[2.0, 0.5]] * size
        hvd.broadcast_(mine, root_rank=0)
        assert mine.float().tolist() == [[1.0, 0.5]] * size
    try:
        hvd.allreduce(mine, op=hvd.Sum)
    except ValueError as error:
        return str(error)
    return None


def test_floats_of_eight_bits_are_moved_and_some_not_added(world):
    message = (
        "dtype is not supported: torch.float8_e4m3fnuz; it can be broadcast, gathered and exchanged"
    )
    assert set(world.run(eight_bit_floats)) == {message}


def splits_are_checked():
    size = hvd.size()
    tensor = torch.ones(size + 1, 2)
    messages = []
    for splits in (
        None,
        [1] * size,
        [1] * (size - 1),
        [size + 2] + [0] * (size - 2) + [-1],
        torch.ones(size),
    ):
        try:
            hvd.alltoall(tensor, splits=splits)
        except ValueError as error:
            messages.append(str(error))
    for scalar in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
        try:
            scalar(torch.tensor(1.0))
        except ValueError as error:
            messages.append(str(error))
    try:
        hvd.reducescatter(tensor, op=hvd.Max)
    except ValueError as error:
        messages.append(str(error))
    assert hvd.allreduce(torch.ones(1)).item() == 1
    return messages


def test_wrong_splits_are_refused_where_they_are_given(pair):
    parts = ["divide evenly", "add up", "one entry for each", "add up", "whole numbers"]
    parts += ["at least one dimension"] * 3 + ["Average or Sum"]
    for messages in pair.run(splits_are_checked):
        assert len(messages) == len(parts)
        assert all(part in message for part, message in zip(parts, messages, strict=True)), messages


def reducescatter_equals_one_process():
    rank, size = hvd.rank(), hvd.size()
    for dtype_name in REDUCED:
        dtype = getattr(torch, dtype_name)
        for count in (0, 1, size, size + 1, 3 * size - 1, 1000):
            inputs = [rows_of(a, count, dtype, limit=3) for a in range(size)]
            total = torch.stack([tensor.double() for tensor in inputs]).sum(0)
            bounds = [
                sum(count // size + (a < count % size) for a in range(until))
                for until in range(size + 1)
            ]
            mine = slice(bounds[rank], bounds[rank + 1])
            for op, value in {hvd.Sum: total, hvd.Average: total / size}.items():
                whole = value if dtype.is_floating_point else value.trunc()
                part = hvd.reducescatter(inputs[rank], op=op)
                assert part.dtype == dtype
                assert torch.allclose(part, whole[mine].to(dtype)), f"{dtype_name} {count} op {op}"
    scaled = hvd.reducescatter(
        torch.ones(size), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25
    )
    assert scaled.tolist() == [size / 2]
    halved = hvd.reducescatter(torch.full((size,), 0.5), compression=hvd.Compression.bf16)
    assert (halved.dtype, halved.tolist()) == (torch.float32, [0.5])


def test_reducescatter_equals_one_process(world):
    world.run(reducescatter_equals_one_process)


def groups_equal_their_members():
    rank, size = hvd.rank(), hvd.size()
    tensors = [
        rows_of(rank, rank + i, dtype)
        for i, dtype in enumerate([torch.float32, torch.int64, torch.bool])
    ]
    gathered = hvd.grouped_allgather(tensors, name="gathered")
    assert all(
        torch.equal(one, hvd.allgather(tensor))
        for one, tensor in zip(gathered, tensors, strict=True)
    )
    again = hvd.synchronize(hvd.grouped_allgather_async(tensors))
    assert all(torch.equal(one, other) for one, other in zip(gathered, again, strict=True))
    tensors = [
        rows_of(rank, size + i, dtype)
        for i, dtype in enumerate([torch.float32, torch.int64, torch.float64])
    ]
    parts = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    ones = [hvd.reducescatter(tensor, op=hvd.Sum) for tensor in tensors]
    assert all(torch.equal(part, one) for part, one in zip(parts, ones, strict=True))
    again = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, name="parts", op=hvd.Sum))
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


def test_groups_equal_their_members(world):
    world.run(groups_equal_their_members)


def sparse_sums():
    rank, size = hvd.rank(), hvd.size()
    # Index 0 appears twice on every rank, the last rank has nothing at all.
    count = 0 if rank == size - 1 else 3
    indices = torch.tensor([[0, 0, rank + 1]])[:, :count]
    tensor = torch.sparse_coo_tensor(indices, torch.ones(count, 2) * (rank + 1), (size + 1, 2))
    dense = hvd.allreduce(tensor.to_dense(), op=hvd.Sum)
    finish = hvd.sparse_allreduce_async(tensor, "sparse", hvd.Sum)
    assert torch.equal(finish().to_dense(), dense)
    assert finish() is finish()
    average = hvd.sparse_allreduce_async(tensor, "sparse", hvd.Average)()
    assert torch.allclose(average.to_dense(), dense / size)
    refused = []
    for wrong, op in ((tensor, hvd.Max), (tensor.to_dense(), hvd.Sum)):
        try:
            hvd.sparse_allreduce_async(wrong, "sparse", op)
        except ValueError as error:
            refused.append(str(error))
    return refused


def test_sparse_tensors_are_summed_and_averaged(world):
    for messages in world.run(sparse_sums):
        assert "Average or Sum" in messages[0]
        assert "must be sparse" in messages[1]


def barrier_waits():
    if hvd.rank() == 0:
        time.sleep(0.2)
    come = time.time()
    hvd.barrier()
    return come, time.time()


def test_all_ranks_leave_a_barrier_after_the_last_one_came(world):
    times = world.run(barrier_waits)
    assert min(left for _, left in times) >= max(come for come, _ in times)


def uneven_data():
    rank, size = hvd.rank(), hvd.size()
    found = []
    for step in range(2 + rank):
        mine = torch.full((3,), float(rank + 1))
        left = range(max(0, step - 1), size)
        assert torch.allclose(
            hvd.allreduce(mine, name="sum", op=hvd.Sum),
            torch.full((3,), sum(r + 1.0 for r in left)),
        )
        assert hvd.allreduce(mine, name="min", op=hvd.Min)[0] == left[0] + 1
        assert hvd.allreduce(-mine, name="max", op=hvd.Max)[0] == -left[0] - 1
        product = torch.tensor([r + 1.0 for r in left]).prod()
        assert hvd.allreduce(mine, name="product", op=hvd.Product)[0] == product
        average = hvd.allreduce(mine, name="average")
        assert torch.allclose(average, torch.full((3,), sum(r + 1.0 for r in left) / size))
        found.append(len(left))
    return hvd.join(), hvd.join()


def test_ranks_without_data_join_and_leave_no_trace_in_results(world):
    # All end with the rank that had most data; the second join finds all ranks at once.
    assert {last for last, _ in world.run(uneven_data)} == {world.size - 1}


def gathers_while_somebody_has_joined(allow):
    rank, size = hvd.rank(), hvd.size()
    results = []
    if rank:
        try:
            results.append(hvd.allgather(torch.full((2,), rank), name="late").tolist())
            results.append(hvd.broadcast(torch.full((2,), rank), size - 1, name="late").tolist())
        except (ValueError, RuntimeError) as error:
            results.append(str(error))
    last = hvd.join(allow_gather=allow)
    return results, last > 0 or size == 1


def test_gathers_beside_a_joined_rank_fail_unless_it_allows_them(trio):
    for rank, (results, _) in enumerate(trio.run(gathers_while_somebody_has_joined, False)):
        assert bool(results) == bool(rank)
        assert all("join" in result for result in results)
    for rank, (results, _) in enumerate(trio.run(gathers_while_somebody_has_joined, True)):
        assert results == ([[1, 1, 2, 2], [2, 2]] if rank else [])

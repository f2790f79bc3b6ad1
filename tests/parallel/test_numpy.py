# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""farandole.numpy on real processes, against what one process computes."""

import subprocess
import sys

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole.numpy._arrays import table

NUMBERS = [
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]
SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
SHAPES = [(), (0,), (1,), (3, 7), (1025,)]


def dtype_of(name):
    if name in SMALL:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def inputs(shape, dtype, size):
    """Returns the input of each rank: small whole numbers, exact in every dtype."""
    count = int(np.prod(shape))
    return [
        ((np.arange(count) * (rank + 1) + rank) % 3).reshape(shape).astype(dtype)
        for rank in range(size)
    ]


def reductions_equal_one_process(names):
    for name in names:
        dtype = dtype_of(name)
        for shape in SHAPES:
            arrays = inputs(shape, dtype, hvd.size())
            mine = arrays[hvd.rank()]
            before = mine.copy()
            wide = np.stack([array.astype(np.float64) for array in arrays])
            expected = {
                hvd.Sum: wide.sum(0),
                hvd.Min: wide.min(0),
                hvd.Max: wide.max(0),
                hvd.Product: wide.prod(0),
                hvd.Average: wide.sum(0) / hvd.size(),
            }
            for op, value in expected.items():
                exact = (np.trunc(value) if dtype.kind in "iu" else value).astype(dtype)
                result = hvd.allreduce(mine, op=op)
                assert (result.dtype, result.shape) == (dtype, shape)
                assert np.allclose(
                    result.astype(np.float64), exact.astype(np.float64), rtol=1e-2
                ), (name, shape, op)
                assert np.array_equal(mine, before)
                in_place = mine.copy()
                assert hvd.allreduce_(in_place, op=op) is in_place
                assert in_place.tobytes() == result.tobytes()


def test_reductions_equal_one_process(trio):
    pytest.importorskip("ml_dtypes")
    trio.run(reductions_equal_one_process, [*NUMBERS, *SMALL])


def movements_equal_one_process(names):
    for name in names:
        dtype = dtype_of(name)
        for shape in SHAPES:
            arrays = inputs(shape, dtype, hvd.size())
            mine = arrays[hvd.rank()]
            if shape:
                assert np.array_equal(hvd.allgather(mine), np.concatenate(arrays))
            for root in range(hvd.size()):
                assert np.array_equal(hvd.broadcast(mine, root), arrays[root])
                in_place = mine.copy()
                assert hvd.broadcast_(in_place, root) is in_place
                assert np.array_equal(in_place, arrays[root])
        parts = [np.full((2 * rank, 3), rank + 1).astype(dtype) for rank in range(hvd.size())]
        whole = hvd.allgather(parts[hvd.rank()])
        assert whole.dtype == dtype
        assert np.array_equal(whole, np.concatenate(parts))


def test_movements_equal_one_process(trio):
    pytest.importorskip("ml_dtypes")
    trio.run(movements_equal_one_process, [*NUMBERS, *SMALL, "bool", "complex64", "complex128"])


def arrays_of_any_layout_have_defined_results():
    total = hvd.size() * (hvd.size() + 1) // 2
    base = np.arange(24, dtype=np.float32).reshape(4, 6) * (hvd.rank() + 1)
    plain = np.arange(24, dtype=np.float32).reshape(4, 6) * total
    unaligned = np.frombuffer(
        bytearray(1 + base.nbytes), dtype=np.float32, offset=1, count=24
    ).reshape(4, 6)
    unaligned[:] = base
    layouts = {
        "slice": (np.repeat(base, 2, axis=1)[:, ::2], plain),
        "transposed": (base.T, plain.T),
        "fortran": (np.asfortranarray(base), plain),
        "reversed": (base[::-1], plain[::-1]),
        "big-endian": (base.astype(">f4"), plain),
        "unaligned": (unaligned, plain),
    }
    for layout, (array, expected) in layouts.items():
        result = hvd.allreduce(array, op=hvd.Sum)
        assert result.flags.c_contiguous, layout
        assert result.dtype.isnative, layout
        assert np.array_equal(result, expected), layout
        assert np.array_equal(hvd.broadcast(array, 0), expected / total), layout
        assert np.array_equal(hvd.allgather(array)[: len(expected)], expected / total), layout
        work = array.copy(order="K") if layout != "unaligned" else array
        dtype = work.dtype
        assert hvd.allreduce_(work, op=hvd.Sum) is work
        assert work.dtype == dtype, layout
        assert np.array_equal(work, expected), layout
    # A slice of a larger array is overwritten, its neighbours are not.
    whole = np.ones((4, 4))
    hvd.allreduce_(whole[1:3, ::2], op=hvd.Sum)
    assert whole.sum() == 12 + 4 * hvd.size()
    # What is no array becomes one.
    assert np.array_equal(hvd.allreduce([1, 2], op=hvd.Sum), np.array([1, 2]) * hvd.size())
    assert hvd.allreduce(2.5).shape == ()
    # Read-only arrays may be sent.
    frozen = np.broadcast_to(np.float32(1), (3,))
    assert np.array_equal(hvd.allreduce(frozen, op=hvd.Sum), frozen * hvd.size())


def test_arrays_of_any_layout_have_defined_results(pair):
    pair.run(arrays_of_any_layout_have_defined_results)


def wrong_arguments_are_refused_and_the_engine_goes_on():
    frozen = np.ones(3)
    frozen.flags.writeable = False
    wrong = [
        ("writable", lambda: hvd.allreduce_(frozen)),
        ("writable", lambda: hvd.broadcast_(frozen, 0)),
        ("NumPy array", lambda: hvd.allreduce_([1.0])),
        ("masked", lambda: hvd.allreduce(np.ma.masked_array([1.0], [True]))),
        ("not supported: object", lambda: hvd.allreduce(np.array([None]))),
        ("not supported: datetime64", lambda: hvd.broadcast(np.zeros(1, "datetime64[s]"), 0)),
        ("at least one dimension", lambda: hvd.allgather(np.float32(1))),
        ("at least one dimension", lambda: hvd.alltoall(np.float32(1))),
        ("at least one dimension", lambda: hvd.reducescatter(np.float32(1))),
        ("at least one", lambda: hvd.grouped_allreduce([])),
        ("root_rank", lambda: hvd.broadcast(np.ones(1), hvd.size())),
        ("splits", lambda: hvd.alltoall(np.ones(4), splits=[1.5, 1])),
        ("splits", lambda: hvd.alltoall(np.ones(4), splits=[-1, 1])),
        ("add up to the 4 rows", lambda: hvd.alltoall(np.ones(4), splits=[1, 1])),
        ("2 numbers", lambda: hvd.alltoall(np.ones(4), splits=[1, 1, 2])),
        ("divide evenly", lambda: hvd.alltoall(np.ones(3))),
        ("Average or Sum", lambda: hvd.reducescatter(np.ones(4), op=hvd.Max)),
        ("Average or Sum", lambda: hvd.grouped_reducescatter([np.ones(4)], op=hvd.Max)),
        ("handle", lambda: hvd.synchronize(123456789)),
        ("not registered", lambda: hvd.allreduce(np.ones(1), process_set=hvd.ProcessSet([0, 1]))),
    ]
    family, first = table.operation_name("probe", None).rsplit(".", 1)
    for text, call in wrong:
        with pytest.raises(ValueError, match=text):
            call()
    # A rank that alone was refused something still matches the others.
    assert table.operation_name("probe", None) == f"{family}.{int(first) + 1}"
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.alltoall(np.arange(4), splits=[])[0].tolist() == hvd.alltoall(np.arange(4)).tolist()


def test_wrong_arguments_are_refused_and_the_engine_continues(pair):
    pair.run(wrong_arguments_are_refused_and_the_engine_goes_on)


def asynchronous_operations_and_groups_complete_in_any_order():
    size, rank = hvd.size(), hvd.rank()
    handles = [hvd.allreduce_async(np.full(i + 1, float(i)), name=f"any.{i}") for i in range(50)]
    for i in reversed(range(50)):
        assert np.array_equal(hvd.synchronize(handles[i]), np.full(i + 1, float(i)))
    handle = hvd.broadcast_async_(work := np.full(3, rank), 1)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is work
    assert work.tolist() == [1, 1, 1]
    arrays = [np.full(i, rank, dtype=dtype) for i, dtype in enumerate(["f4", "f8", "i8", ">f4"])]
    results = hvd.grouped_allreduce(arrays, op=hvd.Sum)
    expected = sum(range(size))
    for result, array in zip(results, arrays, strict=True):
        assert result.dtype == array.dtype.newbyteorder("=")
        assert (result == expected).all()
    written = hvd.grouped_allreduce_(arrays, op=hvd.Max)
    assert all(result is array for result, array in zip(written, arrays, strict=True))
    assert all((array == size - 1).all() for array in arrays)
    # Memory without a waiter is kept until the engine is done with it.
    hvd.allreduce_async(np.ones(1 << 20), name="dropped")
    hvd.barrier()


def test_asynchronous_operations_and_groups_complete_in_any_order(trio):
    trio.run(asynchronous_operations_and_groups_complete_in_any_order)


def objects_travel():
    mine = {"rank": hvd.rank(), "data": "x" * 1000 * hvd.rank()}
    gathered = hvd.allgather_object(mine)
    assert [entry["rank"] for entry in gathered] == list(range(hvd.size()))
    assert [len(entry["data"]) for entry in gathered] == [1000 * rank for rank in range(hvd.size())]
    assert hvd.broadcast_object(mine if hvd.rank() == 1 else None, root_rank=1)["rank"] == 1


def test_objects_travel(trio):
    trio.run(objects_travel)


def one_name_in_two_frameworks_is_one_operation():
    import torch

    import farandole.torch

    if hvd.rank() == 0:
        return hvd.allreduce(np.ones(3, dtype=np.float32), name="shared", op=hvd.Sum).tolist()
    return farandole.torch.allreduce(torch.ones(3), name="shared", op=hvd.Sum).tolist()


def test_one_name_in_two_frameworks_is_one_operation(pair):
    assert pair.run(one_name_in_two_frameworks_is_one_operation) == [[2.0] * 3] * 2


def every_other_operation_equals_one_process():
    size, rank = hvd.size(), hvd.rank()
    for dtype in map(dtype_of, ["float32", "int64", "bfloat16", ">f8"]):
        rows = 2 * size + 1
        arrays = [(np.arange(rows * 2).reshape(rows, 2) % 5 + r).astype(dtype) for r in range(size)]
        whole = sum(array.astype(np.float64) for array in arrays)
        parts = np.array_split(whole, size)
        assert np.array_equal(hvd.reducescatter(arrays[rank], op=hvd.Sum), parts[rank])
        first, second = hvd.grouped_reducescatter([arrays[rank], arrays[rank][:1]], op=hvd.Sum)
        assert np.array_equal(first, parts[rank])
        assert np.array_equal(second, whole[:1] if rank == 0 else whole[:0])
        gathered = hvd.grouped_allgather([arrays[rank][: rank + 1], arrays[rank][:0]])
        assert np.array_equal(
            gathered[0], np.concatenate([array[: r + 1] for r, array in enumerate(arrays)])
        )
        assert gathered[1].shape == (0, 2)
        # Rank r sends one row to rank 0, two to rank 1, ...
        splits = [to + 1 if to < size - 1 else rows - sum(range(size)) for to in range(size)]
        received, counts = hvd.alltoall(arrays[rank], splits)
        start = sum(splits[:rank])
        expected = np.concatenate([array[start : start + splits[rank]] for array in arrays])
        assert np.array_equal(received, expected)
        assert counts.tolist() == [splits[rank]] * size
        assert counts.dtype == np.int32
        even = hvd.alltoall(arrays[rank][: 2 * size])
        assert np.array_equal(
            even, np.concatenate([array[2 * rank : 2 * rank + 2] for array in arrays])
        )
    handle = hvd.alltoall_async(np.ones((size, 1)))
    assert hvd.synchronize(handle)[0].shape == (size, 1)
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(np.ones(4), [5] * size)
    # A rank without data takes part with nothing until all have joined.
    for step in range(rank):
        assert hvd.allreduce(np.ones(3), name=f"left.{step}", op=hvd.Min).tolist() == [1.0] * 3
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * size


def test_every_other_operation_equals_one_process(trio):
    pytest.importorskip("ml_dtypes")
    trio.run(every_other_operation_equals_one_process)


def process_sets_work_apart():
    rank = hvd.rank()
    first, second = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])
    for members in (first, second):
        if not members.included():
            with pytest.raises(ValueError, match="member"):
                hvd.allreduce(np.ones(1), process_set=members)
            continue
        assert (
            hvd.allreduce(np.full(2, rank), op=hvd.Sum, process_set=members).tolist()
            == [sum(members.ranks)] * 2
        )
        assert hvd.allgather(np.full(1, rank), process_set=members).tolist() == members.ranks
        assert hvd.broadcast(np.full(1, rank), 2, process_set=members).tolist() == [2]
        assert hvd.allgather_object(rank, process_set=members) == members.ranks
        assert len(hvd.reducescatter(np.ones(3), process_set=members)) == 2 - members.rank()
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(np.ones(1), 1 - members.ranks[0], process_set=members)
        hvd.barrier(members)
    assert hvd.remove_process_set(first)
    hvd.barrier()


def test_process_sets_work_apart(fresh_world):
    fresh_world(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}).run(process_sets_work_apart)


def test_numpy_alone_is_enough():
    code = (
        "import sys, farandole.numpy; print(sorted({'torch', 'jax', 'tensorflow', 'ml_dtypes'} & "
        "set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches on their way to the loop: functions of the user, threads, values in place of nulls."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

from farandole.data import AsyncDataLoaderMixin, BaseDataLoader, ParquetLoader, SqlExpressions

ROWS = 500


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("transform")
    ids = np.arange(ROWS)
    table = pa.table(
        {
            "id": ids,
            "x": ids.astype(np.float32),
            "v": np.stack([ids, ids], 1).astype(np.float32).tolist(),
            "even": ids % 2 == 0,
        }
    )
    pq.write_table(table, directory / "f.parquet", row_group_size=120)
    return directory


def doubled(batch):
    """A record batch in, a record batch out, with a column more."""
    twice = pc.multiply(batch.column("x"), 2)
    where = pa.array([os.getpid()] * len(batch))
    return pa.record_batch(
        [*batch.columns, twice, where], [*batch.schema.names, "twice", "process"]
    )


@pytest.mark.parametrize(
    ("pool", "framework"),
    [("thread", "numpy"), ("thread", "torch"), ("process", "numpy"), ("dummy", "numpy")],
)
def test_a_function_works_on_whole_batches_in_order(path, pool, framework):
    plain = ParquetLoader(path, 32, framework=framework)
    loader = ParquetLoader(
        path, 32, framework=framework, transformation_fn=doubled, transform_pool=pool
    )
    try:
        pairs = list(zip(plain, loader, strict=True))
    finally:
        loader.close()
    for before, after in pairs:
        assert before["id"].tolist() == after["id"].tolist()
        assert (before["x"] * 2).tolist() == after["twice"].tolist()
        assert before["v"].tolist() == after["v"].tolist()
        assert before["even"].tolist() == after["even"].tolist()
        after["x"][0] = 7  # not the read-only memory of Arrow
        assert type(before["x"]) is type(after["x"])
    elsewhere = {process for _, after in pairs for process in after["process"].tolist()} - {
        os.getpid()
    }
    assert bool(elsewhere) == (pool == "process")


def test_a_function_may_return_a_dict_and_other_rows(path):
    loader = ParquetLoader(
        path, 50, transformation_fn=lambda batch: {"s": batch.column("x").to_numpy()[::2]}
    )
    assert [len(batch["s"]) for batch in loader] == [25] * 10
    padded = ParquetLoader(path, 50, tail="pad", transformation_fn=lambda _: {"s": np.zeros(3)})
    with pytest.raises(ValueError, match='must keep the 50 rows of a batch with tail="pad"'):
        list(padded)
    padded = ParquetLoader(
        path, 60, tail="pad", transformation_fn=lambda batch: batch.select(["id"])
    )
    assert [int(batch["_weights"].sum()) for batch in padded] == [60] * 8 + [20]


def lists(batch):
    """A column of lists whose type has no length."""
    made = [[float(one)] * 3 for one in batch.column("id").to_pylist()]
    return pa.record_batch(
        [batch.column("id"), pa.array(made, pa.list_(pa.float32()))], ["id", "v"]
    )


def arrays(batch):
    """An array whose second axis is lost without rows."""
    return {"v": np.array([[one, one, one] for one in batch.column("id").to_pylist()])}


@pytest.mark.parametrize("function", [lists, arrays])
@pytest.mark.parametrize(("pool", "framework"), [("thread", "numpy"), ("dummy", "torch")])
def test_a_batch_without_rows_has_the_shapes_and_types_of_others(
    tmp_path, function, pool, framework
):
    pq.write_table(pa.table({"id": np.arange(5)}), tmp_path / "f.parquet")
    found = []
    for rank in (0, 5):
        options = {"transformation_fn": function, "transform_pool": pool, "framework": framework}
        loader = ParquetLoader(tmp_path, 2, rank=rank, size=6, **options)
        try:
            (batch,) = loader
        finally:
            loader.close()
        assert len(batch["v"]) == (1 if rank == 0 else 0)
        found.append({name: (values.shape[1:], values.dtype) for name, values in batch.items()})
    assert found[0] == found[1]
    assert found[0]["v"][0] == (3,)


def filter_rows(function):
    """A function that makes columns of the rows above 2 alone."""

    def some(batch):
        return function(batch.filter(pc.greater(batch.column("id"), 2)))

    return some


@pytest.mark.parametrize("function", [lists, arrays])
@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 4, 0, 1, 2]])
def test_a_batch_whose_rows_are_all_filtered_out_has_the_shapes_and_types_of_others(
    tmp_path, function, pool, order
):
    pq.write_table(pa.table({"id": order}), tmp_path / "f.parquet")
    options = {"shuffle": False, "transformation_fn": filter_rows(function), "transform_pool": pool}
    with contextlib.closing(ParquetLoader(tmp_path, 1, **options)) as loader:
        found = [batch["v"] for batch in loader]
    assert [len(values) for values in found] == [int(one > 2) for one in order]
    assert {(values.shape[1:], values.dtype) for values in found} == {
        ((3,), found[order.index(3)].dtype)
    }


def test_a_rank_whose_rows_are_all_filtered_out_has_the_shapes_of_the_others(tmp_path):
    pq.write_table(pa.table({"id": np.arange(4)}), tmp_path / "f.parquet")
    options = {"shuffle": False, "transformation_fn": filter_rows(lists)}
    shapes = [
        [batch["v"].shape for batch in ParquetLoader(tmp_path, 1, rank=rank, size=4, **options)]
        for rank in (0, 3)
    ]
    assert shapes == [[(0, 3)], [(1, 3)]]


def test_a_function_that_filters_every_row_out_is_called_with_each_batch_twice_at_most(path):
    seen = []

    def none(batch):
        seen.append(len(batch))
        return lists(batch.slice(0, 0))

    loader = ParquetLoader(path, 50, transformation_fn=none)
    assert [batch["v"].shape for batch in loader] == [(0, 0)] * 10
    assert seen == [50] * 20
    assert len(list(loader)) == 10
    assert seen == [50] * 30


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_an_exception_of_the_function_arrives(path, pool):
    def broken(batch):
        raise RuntimeError(f"no good: {len(batch)}")

    loader = ParquetLoader(path, 50, transformation_fn=broken, transform_pool=pool)
    with pytest.raises(RuntimeError, match="no good: 50"):
        list(loader)
    loader.close()


def test_results_that_are_no_batches_are_refused(path):
    def run(function):
        list(ParquetLoader(path, 50, transformation_fn=function))

    with pytest.raises(TypeError, match="it returned int"):
        run(lambda _: 7)
    with pytest.raises(ValueError, match="left 50 nulls in column n"):
        run(lambda _: pa.table({"n": pa.nulls(50, pa.int64())}))
    with pytest.raises(ValueError, match="made column s of string"):
        run(lambda _: pa.table({"s": ["a"] * 50}))
    with pytest.raises(ValueError, match="lists of different lengths in column r"):
        run(lambda _: pa.table({"r": [[1], [1, 2]]}))
    with pytest.raises(ValueError, match="columns of different lengths"):
        run(lambda _: {"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="transform_pool must be one of"):
        ParquetLoader(path, 50, transformation_fn=doubled, transform_pool="gpu")


def test_threads_of_a_function_end_with_their_epoch(path):
    before = threading.active_count()
    epoch = iter(ParquetLoader(path, 10, transformation_fn=doubled, transform_workers=3))
    next(epoch)
    assert threading.active_count() > before
    epoch.close()
    assert threading.active_count() == before


class Numbers(BaseDataLoader):
    """0, 1, 2, ... and an error where it is told."""

    def __init__(self, count, error_at=None):
        self.count, self.error_at, self.made = count, error_at, 0

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.error_at:
                raise KeyError(number)
            self.made += 1
            yield number

    def _process_batch(self, batch):
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("size", [0, 1, 4, 64])
def test_batches_made_ahead_come_in_order_and_epoch_after_epoch(size):
    loader = AsyncNumbers(size, False, 10)
    before = threading.active_count()
    for _ in range(3):
        assert list(loader) == [number * 10 for number in range(10)]
    assert threading.active_count() == before
    loader.close_async_loader()


def test_batches_are_made_ahead_up_to_the_size_of_the_queue():
    loader = AsyncNumbers(4, False, 100)
    epoch = iter(loader)
    next(epoch)
    (run,) = loader._prefetch_threads
    assert run._queue.maxsize == 4
    loader.close_async_loader()
    assert list(epoch) == []
    assert loader.made <= 7


def test_an_epoch_that_is_left_early_leaves_nothing_for_the_next_one():
    loader = AsyncNumbers(async_loader_queue_size=2, count=5)
    for batch in loader:
        if batch == 10:
            break
    assert list(loader) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("size", [0, 8])
def test_an_error_arrives_after_the_batches_before_it(size):
    seen = []
    with pytest.raises(KeyError):
        seen.extend(AsyncNumbers(size, True, 10, error_at=3))
    assert seen == [0, 10, 20]
    with pytest.raises(ValueError, match="async_loader_queue_size must not be negative"):
        AsyncNumbers(-1, False, 1)


def holes(tmp_path):
    table = pa.table(
        {
            "f": pa.array([1.0, None, float("nan"), 4.0], pa.float32()),
            "i": pa.array([1, 2, None, 4], pa.int32()),
            "v": pa.array(
                [[1.0, 2.0], [3.0, None], [float("nan"), 6.0], [7.0, 8.0]], pa.list_(pa.float64())
            ),
            "d": pa.array([1, None, 3, 4]).cast(pa.decimal128(22, 2)),
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    return tmp_path


def test_nulls_and_nan_are_errors_that_name_the_column_and_the_file(tmp_path):
    path = holes(tmp_path)
    for column, text in {"i": "1 nulls", "f": "1 nulls", "v": "1 nulls", "d": "1 nulls"}.items():
        with pytest.raises(
            ValueError, match=rf"column {column} has {text} in row group 0 of .*f\.parquet"
        ):
            list(ParquetLoader(path, 4, columns=[column]))
    pq.write_table(pa.table({"f": [1.0, float("nan")]}), tmp_path / "f.parquet")
    with pytest.raises(
        ValueError, match=r"column f has 1 NaN in row group 0 of .*f\.parquet; fill or allow_nan"
    ):
        list(ParquetLoader(tmp_path, 4))
    (batch,) = ParquetLoader(tmp_path, 4, allow_nan=True, shuffle=False)
    assert np.isnan(batch["f"]).tolist() == [False, True]


def test_infinities_are_errors_that_no_fill_takes_the_place_of(tmp_path):
    pq.write_table(
        pa.table({"f": [1.0, float("-inf"), float("nan"), float("inf")]}), tmp_path / "f.parquet"
    )
    for fill in (None, {"f": 0.0}):
        told = (
            r"column f has 2 infinite values in row group 0 of .*f\.parquet; allow_nan says what "
            r"to do"
        )
        with pytest.raises(ValueError, match=told):
            list(ParquetLoader(tmp_path, 4, fill=fill))
    (batch,) = ParquetLoader(tmp_path, 4, allow_nan=True, fill={"f": 0.0}, shuffle=False)
    assert batch["f"].tolist() == [1.0, float("-inf"), 0.0, float("inf")]


def test_nulls_and_nan_are_filled_on_request(tmp_path):
    loader = ParquetLoader(holes(tmp_path), 4, shuffle=False, fill={"*": -1.0, "i": 9, "d": 0.5})
    (batch,) = loader
    assert batch["f"].tolist() == [1, -1, -1, 4]
    assert batch["i"].tolist() == [1, 2, 9, 4]
    assert batch["v"].tolist() == [[1, 2], [3, -1], [-1, 6], [7, 8]]
    assert batch["d"].tolist() == [1, 0.5, 3, 4]
    with pytest.raises(ValueError, match="it is filled but not selected"):
        ParquetLoader(tmp_path, 4, columns=["f"], fill={"i": 0})
    for wrong, shown in ((0.5, "0.5"), (3e9, "3000000000"), (float("nan"), "NaN")):
        with pytest.raises(
            ValueError, match=f"column i .*: its int32 cannot be filled with {shown}"
        ):
            ParquetLoader(tmp_path, 4, fill={"i": wrong})
    with pytest.raises(ValueError, match="column i has 1 nulls"):
        list(ParquetLoader(tmp_path, 4, fill={"*": 0.5}))


# In a process of its own: one that has TensorFlow may not load all of torch afterwards.
TENSORFLOW = program_path(__file__, "read_as_tensorflow")


def test_tensorflow_takes_the_batches(path, tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    pq.write_table(pa.table({"s": ["a", "ü"], "b": [b"\0", b""]}), tmp_path / "f.parquet")
    command = [sys.executable, TENSORFLOW, str(path), str(tmp_path), str(ROWS)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}  # see test_ragged
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "all of it\n", done.stderr


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_sql_expressions_are_a_function(path, pool):
    columns = SqlExpressions("id", "id * 2 + 1 as odd", "cast(id as float) / 4 as quarter")
    with contextlib.closing(
        ParquetLoader(path, 64, transformation_fn=columns, transform_pool=pool)
    ) as loader:
        plain = ParquetLoader(path, 64)
        for batch, expected in zip(loader, plain, strict=True):
            assert list(batch) == ["id", "odd", "quarter"]
            assert batch["id"].tolist() == expected["id"].tolist()
            assert (batch["odd"] == 2 * batch["id"] + 1).all()
            assert (batch["quarter"] == batch["id"] / 4).all()


def test_sql_expressions_keep_some_rows_and_say_what_does_not_fit(path):
    even = ParquetLoader(path, 64, transformation_fn=SqlExpressions("id", where="id % 2 = 0"))
    got = np.concatenate([batch["id"] for batch in even])
    assert sorted(got.tolist()) == list(range(0, even.dataset.rows, 2))
    with pytest.raises(ValueError, match=r"'select nothing from batch' failed: .*nothing"):
        next(iter(ParquetLoader(path, 64, transformation_fn=SqlExpressions("nothing"))))
    with pytest.raises(ValueError, match="expressions are needed"):
        SqlExpressions()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Streams: dealt by time to all ranks, shuffled in windows, resumed, and without an end."""

from __future__ import annotations

import itertools
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

from farandole.data import StreamLoader


def endless(start, most=None):
    """Rows of 7 each, from any row on."""
    for first in itertools.count(start, 7):
        ids = range(first, first + 7 if most is None else min(most, first + 7))
        if not ids:
            return
        yield pa.record_batch(
            {
                "id": list(ids),
                "x": [[row / 2, 0.5] for row in ids],
                "name": [str(row) for row in ids],
            }
        )


def finite(start):
    return endless(start, 50)


def stream(source=endless, batch_size=4, **options):
    return StreamLoader(source, batch_size, ["id", "x"], seed=5, **options)


def seen(batches):
    return [batch["id"].tolist() for batch in batches]


def test_ranks_share_each_step_in_the_order_of_time_and_epochs_continue():
    ranks = [stream(size=2, rank=rank, steps_per_epoch=3) for rank in range(2)]
    assert [len(one) for one in ranks] == [3, 3]
    for epoch in range(3):
        rows = [seen(one) for one in ranks]
        for step in range(3):
            first = (epoch * 3 + step) * 8
            assert rows[0][step] == list(range(first, first + 8, 2))
            assert rows[1][step] == list(range(first + 1, first + 8, 2))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_window_is_shuffled_the_same_way_at_every_size(framework):
    one = stream(batch_size=8, shuffle_rows=24, steps_per_epoch=6, framework=framework)
    whole = list(one)
    assert isinstance(whole[0]["x"], torch.Tensor if framework == "torch" else np.ndarray)
    assert whole[0]["x"].shape == (8, 2)
    rows = seen(whole)
    for window in range(2):
        inside = [row for step in rows[window * 3 : window * 3 + 3] for row in step]
        assert sorted(inside) == list(range(window * 24, window * 24 + 24)) != inside
    others = [
        seen(stream(size=2, rank=rank, shuffle_rows=24, steps_per_epoch=6)) for rank in range(2)
    ]
    assert [sorted(a + b) for a, b in zip(*others, strict=True)] == [sorted(step) for step in rows]


def test_a_stream_that_ends_ends_the_epoch_on_all_ranks():
    ranks = [stream(finite, size=3, rank=rank) for rank in range(3)]
    with pytest.raises(TypeError, match="a stream has no length: set steps_per_epoch"):
        len(ranks[0])
    for _ in range(2):
        rows = [seen(one) for one in ranks]
        assert [len(one) for one in rows] == [5, 5, 5]
        assert rows[2][-1] == []
        assert sorted(row for one in rows for step in one for row in step) == list(range(50))
    # 50 rows are 13 steps of 4: an iteration that ends with the stream is followed by one of the
    # next pass.
    loader = stream(finite, steps_per_epoch=13)
    assert [len(seen(loader)) for _ in range(3)] == [13, 13, 13]
    assert [len(seen(stream(lambda _: [])))] == [0]


@pytest.mark.parametrize("options", [{"shuffle_rows": 16}, {}, {"steps_per_epoch": 5}])
def test_a_state_resumes_after_any_batch_and_in_another_world(options):
    loader, whole, states = stream(finite, **options), [], []
    for _ in range(2):
        for batch in loader:
            whole.append(batch["id"].tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    steps = options.get("steps_per_epoch", 13)
    for done in range(1, len(whole)):
        again = stream(finite, **options)
        again.load_state_dict(states[done - 1])
        left = (-done) % steps or steps
        assert seen(again) == whole[done : done + left]
        halves = [stream(finite, 2, size=2, rank=rank, **options) for rank in range(2)]
        for half in halves:
            half.load_state_dict(states[done - 1])
        both = [sorted(a + b) for a, b in zip(*(seen(half) for half in halves), strict=True)]
        assert both == [sorted(step) for step in whole[done : done + left]]
    left_early = stream(**options)
    first = next(iter(left_early))["id"].tolist()
    left_early.close()
    assert seen(itertools.islice(left_early, 1)) != [first]


def test_frames_and_files_are_streams_in_their_order(tmp_path):
    table = pa.table({"id": range(100), "x": np.arange(100) / 10})
    loader = StreamLoader(
        table, 16, transformation_fn=lambda batch: {"y": batch.column("id").to_numpy() * 2}
    )
    assert [one for batch in loader for one in batch["y"].tolist()] == list(range(0, 200, 2))
    (tmp_path / "a.csv").write_text("id,word\n1,a\n2,b\n3,c\n")
    rows = StreamLoader(str(tmp_path / "a.csv"), 2, ["id"])
    next(iter(rows))
    state = rows.state_dict()
    again = StreamLoader(str(tmp_path / "a.csv"), 2, ["id"])
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == [[3]]
    once = StreamLoader(table.to_reader(), 60, ["id"])
    assert [len(batch["id"]) for batch in once] == [60, 40]
    with pytest.raises(
        ValueError, match="the stream can be read once: pass a function that opens it again"
    ):
        list(once)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    "transformation_fn", [None, lambda batch: batch, lambda batch: {"x": [[1.0, 2.0]] * len(batch)}]
)
def test_a_rank_without_rows_has_the_shapes_and_types_of_the_others(transformation_fn, framework):
    def last(most, rank):
        options = {
            "size": 2,
            "rank": rank,
            "framework": framework,
            "transformation_fn": transformation_fn,
        }
        return list(StreamLoader(lambda start: endless(start, most), 4, ["id", "x"], **options))[-1]

    for most in (1, 9):  # of the first step, and of a later one, one row is left
        full, empty = last(most, 0), last(most, 1)
        assert full["x"].shape == (1, 2)
        assert empty["x"].shape == (0, 2)
        assert {name: value.dtype for name, value in full.items()} == {
            name: one.dtype for name, one in empty.items()
        }


def late(batch):
    """Lists of the rows from 3 on alone, in a column whose type has no length."""
    kept = [one for one in batch.column("id").to_pylist() if one >= 3]
    return pa.record_batch(
        [pa.array([[row / 2, 0.5] for row in kept], pa.list_(pa.float32()))], ["x"]
    )


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_whose_rows_are_all_filtered_out_has_the_shapes_and_types_of_others(
    rank, framework
):
    options = {
        "size": 2,
        "rank": rank,
        "framework": framework,
        "transformation_fn": late,
        "shuffle_rows": 4,
    }
    found = [
        batch["x"] for batch in StreamLoader(lambda start: endless(start, 6), 1, ["id"], **options)
    ]
    assert min(map(len, found)) == 0
    assert {tuple(one.shape[1:]) for one in found} == {(2,)}
    assert len({one.dtype for one in found}) == 1


def test_after_an_error_the_next_iteration_reads_on_from_there():
    wrong = {20}

    def broken(start):
        for batch in endless(start, 50):
            if wrong & set(batch["id"].to_pylist()):
                raise OSError("the stream is away")
            yield batch

    def refused(batch):
        if wrong & set(batch["id"].to_pylist()):
            raise OSError("the stream is away")
        return batch

    for loader in (stream(broken), stream(finite, transformation_fn=refused)):
        rows = []
        for _ in range(2):
            with pytest.raises(OSError, match="the stream is away"):
                rows.extend(batch["id"].tolist() for batch in loader)
        wrong.clear()
        rows += seen(loader)
        wrong.add(20)
        assert [row for step in rows for row in step] == list(range(50))


def test_a_source_without_an_order_has_one_rank():
    rows = pl.LazyFrame({"id": range(20)})
    told = (
        r"the source, polars\.lazyframe\.frame\.LazyFrame, may return its rows in a different "
        r"order on each"
    )
    for rank in range(2):
        with pytest.raises(ValueError, match=told):
            StreamLoader(rows, 4, size=2, rank=rank)
    assert sorted(
        row for step in seen(StreamLoader(rows, 4, size=1, rank=0)) for row in step
    ) == list(range(20))


def test_an_invalid_argument_names_the_column_or_the_option():
    with pytest.raises(
        ValueError, match="shuffle_rows must be a multiple of size \\* batch_size, which is 8: 12"
    ):
        stream(size=2, rank=0, shuffle_rows=12)
    with pytest.raises(ValueError, match="steps_per_epoch must be a whole number, 1 or more: 0"):
        stream(steps_per_epoch=0)
    with pytest.raises(ValueError, match="the stream has no column 'age': id, x, name"):
        next(iter(StreamLoader(endless, 4, ["age"])))
    with pytest.raises(ValueError, match="the source has no column 'age': id"):
        StreamLoader(pa.table({"id": [1]}), 4, ["age"])
    with pytest.raises(
        ValueError, match="the stream made column name of string, which is neither a number"
    ):
        next(iter(StreamLoader(endless, 4)))
    with pytest.raises(ValueError, match="the stream left 1 nulls in column id"):
        next(iter(StreamLoader(pa.table({"id": [1, None]}), 4)))
    with pytest.raises(
        TypeError, match="a stream must return pyarrow record batches or tables: dict"
    ):
        next(iter(StreamLoader(lambda _: [{"id": 1}], 4)))
    with pytest.raises(ValueError, match="the state has shuffle_rows=8, this loader 0"):
        stream().load_state_dict(stream(shuffle_rows=8).state_dict())

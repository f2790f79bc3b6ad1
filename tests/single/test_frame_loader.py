# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders of frames: their rows, their files, and their place in jobs of torch.distributed."""

from __future__ import annotations

import gc
import os
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from farandole.data import ParquetLoader, frame_loader, prepare_data
from farandole.data.loaders.frames import _expect, _remove

ROWS = 500


def table():
    return pa.table({"id": range(ROWS), "x": np.arange(ROWS) / 4, "word": [str(row) for row in range(ROWS)]})


def ids(loader):
    return [row for batch in loader for row in batch["id"].tolist()]


@pytest.mark.parametrize("make", [table, lambda: table().to_pandas(), lambda: pl.from_arrow(table()).lazy()])
def test_a_frame_becomes_batches_and_leaves_no_files(tmp_path, make):
    loader = frame_loader(make(), 64, cache=tmp_path, framework="torch", seed=4)
    assert isinstance(loader, ParquetLoader)
    batches = list(loader)
    assert all(set(batch) == {"id", "x"} for batch in batches)
    assert all(torch.equal(batch["x"], batch["id"] / 4) for batch in batches)
    assert sorted(ids(batches)) == list(range(ROWS)) != ids(batches)
    state = loader.state_dict()
    again = pickle.loads(pickle.dumps(loader))
    again.load_state_dict(state)
    assert ids(again) == ids(loader)
    del again
    gc.collect()
    assert list(tmp_path.iterdir()), "a copy does not own the files"
    _remove(next(tmp_path.iterdir()), os.getpid() + 1)  # as in a process that was forked from this one
    assert sorted(ids(loader)) == list(range(ROWS))
    del loader
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_ranks_are_those_of_torch_distributed(tmp_path):
    loader = frame_loader(table(), 10, ["id"], cache=tmp_path)
    assert (loader.rank, loader.size, len(loader)) == (0, 1, 50)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        loader.follow_world()
        assert (loader.rank, loader.size, len(loader)) == (1, 2, 25)
        other = ParquetLoader(loader.dataset, 10, ["id"], rank=0, size=2)
        assert sorted(ids(loader) + ids(other)) == list(range(ROWS))
    finally:
        torch.distributed.destroy_process_group()


def test_invalid_arguments_are_refused_and_leave_no_files(tmp_path):
    with pytest.raises(ValueError, match="the frame has no column 'age': id, x, word"):
        frame_loader(table(), 10, ["age"], cache=tmp_path)
    with pytest.raises(ValueError, match="the frame has no rows"):
        frame_loader(table().slice(0, 0), 10, cache=tmp_path)
    with pytest.raises(ValueError, match=r"column b "):
        frame_loader(pd.DataFrame({"a": [1], "b": [None]}), 10, ["a", "b"], cache=tmp_path)
    with pytest.raises(TypeError, match=r"a source must be a path .*: builtins\.int"):
        frame_loader(5, 10, cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_two_columns_of_one_name_are_refused(tmp_path, columns):
    frame = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ValueError, match="more than one column 'x'"):
        frame_loader(frame, 1, columns, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_dates_are_days_and_times_are_in_their_unit(tmp_path):
    day, second = 7 * 24 * 3600 * 1000, 12_000
    frame = pa.table(
        {
            "date": pa.array([7], pa.int32()).cast(pa.date32()),
            "date64": pa.array([day], pa.int64()).cast(pa.date64()),
            "time": pa.array([second], pa.int32()).cast(pa.time32("ms")),
        }
    )
    prepare_data(frame, tmp_path / "prepared")
    for loader in (frame_loader(frame, 1, cache=tmp_path / "cache"), ParquetLoader(tmp_path / "prepared", 1)):
        (batch,) = loader
        assert {name: values.tolist() for name, values in batch.items()} == {
            "date": [7],
            "date64": [7],
            "time": [second],
        }


@pytest.mark.parametrize("cache", ["s3://bucket/rows", "abfss://a@b/c", "dbfs:/rows", "file://host/rows"])
def test_a_cache_that_is_no_directory_is_refused(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"cache must be a directory .*{cache}"):
        frame_loader(table(), 10, cache=cache)
    assert not list(tmp_path.iterdir())


def test_a_cache_may_be_a_url_of_a_directory(tmp_path):
    cache = tmp_path / "a b"
    loader = frame_loader(table(), 10, ["id"], cache=cache.as_uri())
    assert list(cache.iterdir())
    assert sorted(ids(loader)) == list(range(ROWS))


def test_rows_that_executors_of_other_hosts_keep_for_themselves_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"Spark wrote 9 rows to .*, and 4 of them are here: .* give cache= a dir"):
        _expect(9, 4, tmp_path)
    _expect(9, 9, tmp_path)

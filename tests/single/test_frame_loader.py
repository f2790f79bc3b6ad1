# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders of frames: their rows, their files, and their place in jobs of torch.distributed."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from tests.programs import program_path
from torch.testing._internal.distributed.fake_pg import FakeStore

from farandole.data import Nested, Pad, ParquetLoader, frame_loader, prepare_data
from farandole.data.inputs.sources import open_source
from farandole.data.loaders import frames
from farandole.data.loaders.frames import _check_row_count, _remove_rows_of_process

ROWS = 500


def table():
    return pa.table(
        {"id": range(ROWS), "x": np.arange(ROWS) / 4, "word": [str(row) for row in range(ROWS)]}
    )


def ids(loader):
    return [row for batch in loader for row in batch["id"].tolist()]


@pytest.mark.parametrize(
    "make", [table, lambda: table().to_pandas(), lambda: pl.from_arrow(table()).lazy()]
)
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
    # as in a process that was forked from this one
    _remove_rows_of_process(next(tmp_path.iterdir()), os.getpid() + 1)
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


def test_dates_are_days_and_times_are_microseconds(tmp_path):
    day, second = 7 * 24 * 3600 * 1000, 12_000
    frame = pa.table(
        {
            "date": pa.array([7], pa.int32()).cast(pa.date32()),
            "date64": pa.array([day], pa.int64()).cast(pa.date64()),
            "time": pa.array([second], pa.int32()).cast(pa.time32("ms")),
        }
    )
    prepare_data(frame, tmp_path / "prepared")
    for loader in (
        frame_loader(frame, 1, cache=tmp_path / "cache"),
        ParquetLoader(tmp_path / "prepared", 1),
    ):
        (batch,) = loader
        assert {name: values.tolist() for name, values in batch.items()} == {
            "date": [7],
            "date64": [7],
            "time": [second * 1000],
        }


@pytest.mark.parametrize(
    "cache", ["s3://bucket/rows", "abfss://a@b/c", "dbfs:/rows", "file://host/rows"]
)
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
    with pytest.raises(
        ValueError, match=r"Spark wrote 9 rows to .*, and 4 of them are here: .* give cache= a dir"
    ):
        _check_row_count(9, 4, tmp_path)
    _check_row_count(9, 9, tmp_path)


def mixed():
    """Columns of every kind that a batch of numbers cannot hold."""
    return pa.table(
        {
            "id": range(3),
            "pair": [[1, 2]] * 3,
            "word": ["a", "b", "c"],
            "blob": [b"x"] * 3,
            "tokens": [[1], [1, 2], []],
            "point": [{"x": 1}] * 3,
            "deep": [[[1.0]]] * 3,
            "tags": [["a"]] * 3,
        }
    )


LEFT = (
    "word (texts), blob (bytes), tokens (lists of int64 of different lengths), "
    'point (Struct("x": Int64)), deep (List(List(Float64'
)


@pytest.mark.parametrize("kind", ["frame", "files"])
def test_columns_that_are_left_out_are_named_once_with_their_types(tmp_path, caplog, kind):
    pq.write_table(mixed(), tmp_path / "rows.parquet")

    def made(columns=None, **options):
        if kind == "frame":
            return frame_loader(mixed(), 3, columns, cache=tmp_path / "cache", **options)
        return ParquetLoader(tmp_path / "rows.parquet", 3, columns, **options)

    with caplog.at_level(logging.WARNING):
        loader = made()
        for _ in range(2):
            assert set(next(iter(pickle.loads(pickle.dumps(loader))))) == {"id", "pair"}
            assert set(next(iter(loader))) == {"id", "pair"}
    (told,) = caplog.messages
    assert told.startswith("frame_loader: " if kind == "frame" else f"file://{tmp_path}: ")
    assert f"cannot hold these columns, which are left out: {LEFT}" in told
    assert "tags (a list of utf8)" in told
    assert (
        "Pad lists of different lengths with ragged={...: Pad()} of frame_loader or "
        "prepare_data; name texts"
    ) in told
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        made(["id", "word"])
        made(rank=1, size=2)
    assert not caplog.messages, "the columns are chosen, and rank 0 has told"
    for column, expected in (
        (
            "tokens",
            "column tokens cannot be read into batches: its rows have different lengths: pad lists",
        ),
        (
            "point",
            (
                r"column point cannot be read into batches: it is Struct.*: turn nested and other "
                r"values into"
            ),
        ),
    ):
        with pytest.raises(ValueError, match=expected):
            made(["id", column])


def test_run_ends_are_read_as_the_values_that_they_stand_for(tmp_path):
    runs = pc.run_end_encode(pa.array([1.5, 1.5, None, 2.5]))
    frame = pa.table(
        {"id": range(4), "level": runs, "word": pc.run_end_encode(pa.array(["a", "a", "b", "b"]))}
    )
    loader = frame_loader(
        frame,
        4,
        ["id", "level", "word"],
        cache=tmp_path / "cache",
        fill={"level": 0},
        shuffle=False,
    )
    (batch,) = loader
    assert batch["level"].tolist() == [1.5, 1.5, 0, 2.5]
    assert batch["word"].tolist() == ["a", "a", "b", "b"]
    (batch,) = frame_loader(
        frame.slice(1, 2), 4, ["level"], cache=tmp_path / "cache", fill={"level": 0}, shuffle=False
    )
    assert batch["level"].tolist() == [1.5, 0]
    data = prepare_data(frame, tmp_path / "store", categories=["word"], fill={"level": 0})
    (batch,) = ParquetLoader(data.train_url, 4, shuffle=False)
    assert batch["word"].tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("columns", [None, ["id", "age"]])
def test_a_column_that_parquet_cannot_hold_is_named(tmp_path, columns):
    frame = pa.table({"id": range(2), "age": pa.array([pa.MonthDayNano([1, 2, 3])] * 2)})
    told = (
        r"column 'age' of the frame is month_day_nano_interval, which Parquet cannot hold: cast "
        r"it to numbers or"
    )
    with pytest.raises(ValueError, match=told):
        frame_loader(frame, 2, columns, cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("source", ["frame", "files"])
@pytest.mark.parametrize(
    ("pad", "widths"), [(Pad(-1), {9}), (Pad(-1, buckets=3), {3, 6, 9}), (Pad(-1, 4), {4})]
)
def test_lists_of_rows_that_were_not_prepared_are_padded(tmp_path, framework, source, pad, widths):
    random = np.random.default_rng(0)
    rows = [random.integers(1, 50, row % 10).tolist() for row in range(300)]
    frame = pa.table({"id": range(300), "tokens": pa.array(rows, pa.list_(pa.int32()))})
    if source == "files":
        pq.write_table(frame, tmp_path / "rows.parquet", row_group_size=70)
        frame = tmp_path / "rows.parquet"
    loader = frame_loader(
        frame, 2, cache=tmp_path / "cache", ragged={"tokens": pad}, framework=framework
    )
    assert loader.columns == ["id", "tokens"]
    seen = {}
    for batch in pickle.loads(pickle.dumps(loader)):
        assert str(batch["tokens"].dtype).endswith("int32")
        width = batch["tokens"].shape[1]
        assert width in widths
        for key, values in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True):
            seen[key] = width
            assert values == (rows[key] + [-1] * width)[:width]
    assert set(seen) == set(range(300))
    assert set(seen.values()) == widths


def test_lists_of_rows_that_were_not_prepared_become_nested_tensors(tmp_path):
    rows = [[1.0], None, [], [2.0, 3.0]]
    loader = frame_loader(
        pa.table({"x": rows}),
        4,
        cache=tmp_path,
        ragged={"x": Nested()},
        framework="torch",
        shuffle=False,
    )
    (batch,) = loader
    assert [row.tolist() for row in batch["x"].unbind()] == [[1], [], [], [2, 3]]


def test_ragged_columns_that_cannot_be_are_refused(tmp_path):
    frame = pa.table({"id": range(2), "word": ["a", "b"], "tokens": [[1], [1, 2]]})
    for options, kind, told in (
        (
            {"ragged": {"age": Pad()}},
            ValueError,
            "ragged names a column that is not read: 'age'; read: id, word, tokens",
        ),
        (
            {"ragged": {"tokens": Pad()}, "columns": ["id"]},
            ValueError,
            "not read: 'tokens'; read: id",
        ),
        (
            {"ragged": {"word": Pad()}},
            ValueError,
            "column 'word' is string: ragged columns are lists of numbers",
        ),
        (
            {"ragged": {"tokens": 5}},
            TypeError,
            "ragged must be a dict of Pad or Nested by column: 'tokens' is 5",
        ),
    ):
        with pytest.raises(kind, match=told):
            frame_loader(frame, 2, cache=tmp_path, **options)
    assert not list(tmp_path.iterdir())


CONTINUE = program_path(__file__, "continue_epoch")


@pytest.mark.parametrize("kind", ["copy", "new loader"])
def test_another_process_continues_in_the_middle_of_an_epoch(tmp_path, kind):
    pq.write_table(table(), tmp_path / "rows.parquet")
    loader = frame_loader(tmp_path / "rows.parquet", 30, ["id"], cache=tmp_path / "cache", seed=5)
    first = ids(loader)
    epoch = iter(loader)
    begun = [row for _ in range(4) for row in next(epoch)["id"].tolist()]
    state = json.dumps(loader.state_dict())
    expected = [[row for batch in epoch for row in batch["id"].tolist()], ids(loader)]
    place = tmp_path / ("loader.pickle" if kind == "copy" else "rows.parquet")
    if kind == "copy":
        place.write_bytes(pickle.dumps(loader))
    command = [sys.executable, CONTINUE, kind, str(place), state, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert sorted(begun + expected[0]) == list(range(ROWS))
    assert begun != first[: len(begun)]


def test_ragged_columns_are_read_beside_columns_that_batches_cannot_hold(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        loader = frame_loader(mixed(), 3, cache=tmp_path, ragged={"tokens": Pad(-1)}, shuffle=False)
    assert loader.columns == ["id", "pair", "tokens"]
    (batch,) = loader
    assert batch["tokens"].tolist() == [[1, -1], [1, 2], [-1, -1]]
    (told,) = caplog.messages
    assert "tags (a list of utf8)" in told
    assert "tokens (" not in told


@pytest.mark.parametrize(("kind", "value"), [("uint8", -1), ("int32", 0.5), ("int64", math.nan)])
def test_a_value_that_the_lists_cannot_be_padded_with_is_refused(tmp_path, kind, value):
    frame = pa.table({"id": range(2), "x": pa.array([[1], [2, 3]], pa.list_(getattr(pa, kind)()))})
    told = rf"column 'x' has lists of {kind}, which cannot be padded with {value}: give Pad a whole"
    with pytest.raises(ValueError, match=told):
        frame_loader(frame, 2, cache=tmp_path / "cache", ragged={"x": Pad(value)})
    with pytest.raises(ValueError, match=told):
        prepare_data(frame, tmp_path / "store", ragged={"x": Pad(value)})


@pytest.mark.parametrize("ragged", ["tokens", ["tokens"]])
def test_ragged_columns_without_what_becomes_of_them_are_refused(tmp_path, ragged):
    with pytest.raises(TypeError, match="ragged must be a dict of Pad or Nested by column: "):
        frame_loader(mixed(), 3, cache=tmp_path, ragged=ragged)


def test_a_record_batch_with_more_values_than_binary_holds_is_written_in_parts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(frames, "_MAX_BINARY_BYTES", 100)
    rows = [list(range(row % 7)) for row in range(50)]
    frame = pa.table({"x": rows, "id": range(50)})
    loader = frame_loader(frame, 50, cache=tmp_path, ragged={"x": Pad(-1)}, shuffle=False)
    (batch,) = loader
    assert batch["id"].tolist() == list(range(50))
    assert batch["x"].tolist() == [(row + [-1] * 6)[:6] for row in rows]
    with pytest.raises(ValueError, match="column 'x' has a list of more than 100 bytes in one row"):
        frame_loader(pa.table({"x": [list(range(40))]}), 1, cache=tmp_path, ragged={"x": Pad()})


@pytest.mark.parametrize("kind", ["categories", "string_view", "binary_view"])
def test_runs_of_texts_that_arrow_does_not_decode_are_read(tmp_path, kind):
    values = pa.array(["a", "b", None, "c"])
    ends = pa.array([2, 4, 5, 8], pa.int32())
    inner = values.dictionary_encode() if kind == "categories" else values.cast(getattr(pa, kind)())
    frame = pa.table({"word": pa.RunEndEncodedArray.from_arrays(ends, inner)}).slice(1, 6)
    (batches,) = open_source(frame).units(["word"])
    found = [row for batch in batches.batches() for row in batch.column(0).to_pylist()]
    words = ["a", "b", "b", None, "c", "c"]
    assert found == ([one and one.encode() for one in words] if kind == "binary_view" else words)
    frame = frame.slice(0, 3)
    (batch,) = frame_loader(frame, 3, ["word"], cache=tmp_path, shuffle=False, framework="numpy")
    assert len(batch["word"]) == 3

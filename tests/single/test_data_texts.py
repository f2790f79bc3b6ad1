# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Strings and bytes: they are read where they are named, as objects, and functions make numbers
of them.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader, prepare_data

ROWS = 400


def text(row):
    return "" if row % 5 == 0 else f"{row} " + "über 日本 " * (row % 7)


def octets(row):
    return bytes([0, row % 256]) * (row % 4)


def table(start, stop):
    rows = range(start, stop)
    return pa.table(
        {
            "id": np.arange(start, stop),
            "s": [text(row) for row in rows],
            "b": pa.array([octets(row) for row in rows], pa.binary()),
            "x": np.arange(start, stop, dtype=np.float32),
        }
    )


@pytest.fixture(scope="module", params=["prepared", "foreign"])
def path(request, tmp_path_factory):
    """Prepared data, or files with dictionaries and without, of several row groups."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "prepared":
        return prepare_data(table(0, ROWS), directory).train_url
    half = ROWS // 2
    pq.write_table(table(0, half), directory / "0.parquet", row_group_size=60)
    pq.write_table(
        table(half, ROWS), directory / "1.parquet", use_dictionary=False, compression="zstd"
    )
    return str(directory)


@pytest.mark.parametrize("shuffle", [True, False])
def test_texts_stay_with_their_rows_on_all_ranks(path, shuffle):
    numbers = ParquetLoader(path, 16, columns=["id"], shuffle=shuffle, rank=0, size=3, tail="pad")
    plain = [batch["id"].tolist() for batch in numbers]
    seen = []
    for rank in range(3):
        loader = ParquetLoader(
            path, 16, columns=["s", "id", "b"], shuffle=shuffle, rank=rank, size=3, tail="pad"
        )
        batches = list(loader)
        assert rank > 0 or [batch["id"].tolist() for batch in batches] == plain, (
            "the order is that of numbers alone"
        )
        for batch in batches:
            ids = batch["id"].tolist()
            assert batch["s"].dtype == batch["b"].dtype == object
            assert batch["s"].tolist() == [text(row) for row in ids], "padding, too"
            assert batch["b"].tolist() == [octets(row) for row in ids]
            seen += [row for row, weight in zip(ids, batch["_weights"], strict=True) if weight]
    assert sorted(seen) == list(range(ROWS))


def test_columns_of_texts_are_read_where_they_are_named_only(path):
    assert ParquetLoader(path, 16).columns == ["id", "x"]
    loader = ParquetLoader(path, 16, columns=["s", "x"])
    assert loader.signature() == {"s": ("object", ()), "x": ("float32", ())}


def test_tensors_hold_no_texts_but_functions_make_numbers_of_them(path):
    with pytest.raises(
        ValueError, match=r"tensors cannot hold strings: a transformation_fn, .* can read s, b$"
    ):
        ParquetLoader(path, 16, columns=["s", "id", "b"], framework="torch")

    def measured(batch):
        assert batch.schema.field("s").type == pa.large_string()
        return pa.record_batch(
            [
                batch.column("id"),
                pc.utf8_length(batch.column("s")),
                pc.binary_length(batch.column("b")),
            ],
            ["id", "letters", "octets"],
        )

    loader = ParquetLoader(
        path, 16, columns=["s", "id", "b"], framework="torch", transformation_fn=measured
    )
    rows = [
        row
        for batch in loader
        for row in zip(*(batch[name].tolist() for name in batch), strict=True)
    ]
    assert sorted(rows) == [(row, len(text(row)), len(octets(row))) for row in range(ROWS)]


def test_a_function_in_another_process_gets_texts_and_must_not_return_them(path):
    loader = ParquetLoader(
        path,
        100,
        columns=["s"],
        transformation_fn=lambda batch: batch,
        transform_pool="process",
        transform_workers=1,
    )
    with pytest.raises(ValueError, match="column s of large_string, which is neither a number"):
        list(loader)
    loader.close()


def test_an_epoch_continues_where_it_was_left(path):
    loader = ParquetLoader(path, 30, columns=["s"])
    whole = [batch["s"].tolist() for batch in loader]
    loader.set_epoch(0)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    other = ParquetLoader(path, 30, columns=["s"])
    other.load_state_dict(state)
    assert [batch["s"].tolist() for batch in other] == whole[4:]


@pytest.mark.parametrize("budget", ["least", "more"])
def test_a_budget_counts_texts_and_never_changes_the_order(tmp_path, budget):
    rows = 3000
    values = pa.table(
        {"id": np.arange(rows), "s": ["x" * (1000 + row % 50) for row in range(rows)]}
    )
    for number in range(8):
        part = values.slice(number * rows // 8, rows // 8)
        pq.write_table(
            part, tmp_path / f"{number}.parquet", row_group_size=40, use_dictionary=number % 2 == 0
        )
    with pytest.raises(ValueError, match="the least that works is") as refused:
        list(ParquetLoader(tmp_path, 20, columns=["id", "s"], byte_budget=1000))
    least = int(re.search(r"least that works is (\d+)", str(refused.value))[1])
    assert 40 * 1000 * 8 < least < 12 << 20, "a block of every lane at least, and not all of them"
    loader = ParquetLoader(
        tmp_path, 20, columns=["id", "s"], byte_budget=least * (1 if budget == "least" else 10)
    )
    got = [
        (row, len(one))
        for batch in loader
        for row, one in zip(batch["id"].tolist(), batch["s"], strict=True)
    ]
    assert [row for row, _ in got] == [
        row for batch in ParquetLoader(tmp_path, 20) for row in batch["id"].tolist()
    ]
    assert all(length == 1000 + row % 50 for row, length in got)


def test_texts_that_take_more_than_files_say_come_all_the_same(tmp_path):
    rows, letters = 4000, 5000
    values = pa.table(
        {"id": np.arange(rows), "s": [chr(65 + row % 3) * letters for row in range(rows)]}
    )
    pq.write_table(values, tmp_path / "f.parquet", row_group_size=200)
    assert (tmp_path / "f.parquet").stat().st_size < rows * letters / 20, "words are stored once"
    with pytest.raises(ValueError, match="the least that works is") as refused:
        list(ParquetLoader(tmp_path, 10, columns=["id", "s"], byte_budget=1000))
    least = int(re.search(r"least that works is (\d+)", str(refused.value))[1])
    loader = ParquetLoader(tmp_path, 10, columns=["id", "s"], byte_budget=least)
    got = [
        (row, one)
        for batch in loader
        for row, one in zip(batch["id"].tolist(), batch["s"], strict=True)
    ]
    assert sorted(row for row, _ in got) == list(range(rows))
    assert all(one == chr(65 + row % 3) * letters for row, one in got)


def test_options_that_texts_do_not_support_are_refused_by_name(tmp_path):
    pq.write_table(
        pa.table({"s": ["a", None, "c"], "l": [["a"], ["b"], ["c"]], "x": [1.0, 2.0, 3.0]}),
        tmp_path / "f.parquet",
    )
    with pytest.raises(ValueError, match=r"column s has 1 nulls in row group 0 of .*f\.parquet"):
        list(ParquetLoader(tmp_path, 2, columns=["s"], fill={"*": 0.0}))
    for options, reason in (
        ({"fill": {"s": 0.0}}, "filled with a number: fill it when the data is prepared"),
        ({"inmemory_cache_all": True}, "cached: the cache holds numbers only"),
    ):
        with pytest.raises(
            ValueError,
            match=f"column s cannot be read into batches: a text column cannot be {reason}",
        ):
            ParquetLoader(tmp_path, 2, columns=["s"], **options)
    with pytest.raises(ValueError, match="cannot cast column s from utf8 to float32"):
        ParquetLoader(tmp_path, 2, columns=["s"], cast={"s": "float32"})
    with pytest.raises(
        ValueError, match="column l cannot be read into batches: it is a list of utf8"
    ):
        ParquetLoader(tmp_path, 2, columns=["l"])


def test_words_in_names_of_directories_are_texts(tmp_path):
    for color in ("red", "dark green"):
        directory = tmp_path / f"color={color}"
        directory.mkdir()
        pq.write_table(pa.table({"id": [len(color)] * 3}), directory / "f.parquet")
    (batch,) = ParquetLoader(tmp_path, 10, columns=["id", "color"])
    assert (
        sorted(zip(batch["id"].tolist(), batch["color"], strict=True))
        == [(3, "red")] * 3 + [(10, "dark green")] * 3
    )


def test_nulls_are_filled_when_the_data_is_prepared(tmp_path):
    done = prepare_data(pa.table({"s": ["a", None], "x": [1.0, 2.0]}), tmp_path, fill={"s": "none"})
    (batch,) = ParquetLoader(done.train_url, 2, columns=["s"])
    assert sorted(batch["s"]) == ["a", "none"]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All readers take the same `fill` and `types`, and the same files that differ in storage alone."""

import datetime as dt

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader, frame_loader, prepare_data


def read_everywhere(path, store, columns, **options):
    prepared = prepare_data(path, store, feature_cols=columns, reuse=False, **options)
    return {
        "ParquetLoader": ParquetLoader(path, 99, columns, shuffle=False, **options),
        "prepare_data": ParquetLoader(prepared.train_url, 99, columns, shuffle=False),
        "frame_loader": frame_loader(str(path), 99, columns, shuffle=False, **options),
    }


def write_directories(folder, columns):
    for value, column in columns.items():
        inside = folder / value
        inside.mkdir(parents=True)
        pq.write_table(pa.table({"v": column}), inside / "rows.parquet")
    return folder


def test_a_number_alone_fills_all_columns_that_can_hold_it(tmp_path):
    path = tmp_path / "rows.parquet"
    columns = {"i": pa.array([1, None], pa.int8()), "f": pa.array([0.5, None])}
    pq.write_table(pa.table(columns), path)
    for name, loader in read_everywhere(path, tmp_path / "s", ["i", "f"], fill=7).items():
        (batch,) = loader
        assert (batch["i"].tolist(), batch["f"].tolist()) == ([1, 7], [0.5, 7.0]), name


@pytest.mark.parametrize("fill", ["mean", dt.datetime(1970, 1, 1, tzinfo=dt.UTC), [1], None])
def test_a_fill_of_a_loader_that_is_no_number_names_its_column(fill, tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"c": pa.array([1, None], pa.timestamp("ms"))}), path)
    for make in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"fill of column 'c' must be a number of batches"):
            make(str(path), 9, ["c"], fill={"c": fill})


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (("07", "8"), pa.int16(), [7, 8]),
        (("07", "8"), "float", [7.0, 8.0]),
        (("07", "8"), "double", [7.0, 8.0]),
        (("0.5", "8"), pa.float64(), [0.5, 8.0]),
        (("true", "false"), pa.bool_(), [True, False]),
        (("1", "18446744073709551615"), pa.uint64(), [1, 2**64 - 1]),
    ],
    ids=str,
)
def test_types_of_arrow_are_types_of_directories(values, kind, expected, tmp_path):
    path = write_directories(tmp_path / "d", {f"p={one}": [at] for at, one in enumerate(values)})
    for name, loader in read_everywhere(path, tmp_path / "s", ["p"], types={"p": kind}).items():
        (batch,) = loader
        assert sorted(batch["p"].tolist()) == sorted(expected), name


def test_a_type_of_a_directory_that_does_not_exist_names_the_column(tmp_path):
    path = write_directories(tmp_path / "d", {"p=1": [1]})
    for read in (
        lambda: ParquetLoader(path, 9, types={"p": "whole"}),
        lambda: prepare_data(path, tmp_path / "s", types={"p": "whole"}),
        lambda: frame_loader(str(path), 9, types={"p": "whole"}),
    ):
        with pytest.raises(ValueError, match=r"type of column '?p'? "):
            read()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (
            pa.array([5], pa.timestamp("us", "UTC")),
            pa.array([7], pa.timestamp("us", "Asia/Tokyo")),
            [5, 7],
        ),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), ["a", "b"]),
        (pa.array(["a"], pa.large_string()).dictionary_encode(), pa.array(["b"]), ["a", "b"]),
    ],
    ids=["zones", "dictionary", "large dictionary"],
)
def test_files_that_differ_in_storage_alone_are_read_together(one, other, expected, tmp_path):
    path = write_directories(tmp_path / "d", {"one": one, "other": other})
    for name, loader in read_everywhere(path, tmp_path / "s", ["v"]).items():
        (batch,) = loader
        assert batch["v"].tolist() == expected, name

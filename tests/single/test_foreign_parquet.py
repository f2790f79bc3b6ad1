# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Unprepared Parquet: of Spark, pandas and Delta, in directories whose names are columns."""

import base64
import datetime as dt
import os
import pickle
import shutil
import time

import deltalake
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from farandole._native import reader
from farandole.data import Pad, ParquetLoader, prepare_data
from farandole.data.columns import ColumnRoles
from farandole.data.datasets import open_dataset, write_dataset_link
from farandole.spark.common import LocalStore
from farandole.spark.common.data.prepare import find_existing_data
from farandole.spark.common.util import get_simple_meta_from_parquet


def arrays(dataset, *columns):
    opened = reader.Reader(dataset, columns=list(columns), batch_size=1 << 20, shuffle=False)
    (batch,) = opened.read_epoch(0)
    held = {name: batch.column(name) for name in columns}
    return [np.frombuffer(one, one.dtype).reshape(one.shape).tolist() for one in held.values()]


def test_names_of_directories_are_columns(tmp_path):
    table = pa.table(
        {
            "x": range(6),
            "year": [2023, 2023, 2024, 2024, 2024, 2023],
            "half": [0.5, 1, 0.5, 1, 1, 0.5],
        }
    )
    ds.write_dataset(
        table, tmp_path, format="parquet", partitioning=["year", "half"], partitioning_flavor="hive"
    )
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "._SUCCESS.crc").write_bytes(b"crc")
    os.makedirs(tmp_path / "_temporary" / "year=1")
    shutil.copy(
        next(tmp_path.rglob("*.parquet")), tmp_path / "_temporary" / "year=1" / "part-0.parquet"
    )
    opened = open_dataset(str(tmp_path))
    told = {one.name: one.dtype for one in opened.columns}
    assert told == {"x": "int64", "year": "int64", "half": "float64"}
    rows = sorted(zip(*arrays(opened, "x", "year", "half"), strict=True))
    assert rows == sorted(
        zip(*(table[name].to_pylist() for name in ("x", "year", "half")), strict=True)
    )


def test_a_null_in_a_directorys_name_is_a_null(tmp_path):
    for name in ("a b", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"city={name}").mkdir()
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"city={name}" / "part=1 ü.parquet")
    opened = open_dataset(str(tmp_path))
    assert {one.name: one.dtype for one in opened.columns} == {"x": "int64", "city": "utf8"}
    assert arrays(opened, "x") == [[1, 2, 1, 2]]
    with pytest.raises(
        ValueError, match=r"column city has 2 nulls in row group 0 of .*/city=__HIVE_DEFAULT_PART"
    ):
        list(ParquetLoader(tmp_path, 4, columns=["city"]))
    for name in ("7", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / "numbers" / f"n={name}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "numbers" / f"n={name}" / "f.parquet")
    with pytest.raises(ValueError, match="column n has 2 nulls"):
        list(ParquetLoader(tmp_path / "numbers", 4, columns=["n"]))
    (batch,) = ParquetLoader(tmp_path / "numbers", 4, columns=["n"], fill={"n": -1})
    assert sorted(batch["n"].tolist()) == [-1, -1, 7, 7]


def test_pandas_indexes_and_sparks_old_timestamps_are_read(tmp_path):
    moment = dt.datetime(2024, 2, 29, 12, 30, 0, 125000, tzinfo=dt.UTC)
    frame = pd.DataFrame(
        {"x": [1.5, 2.5], "at": [moment, moment]}, index=pd.Index([7, 8], name="id")
    )
    frame.to_parquet(tmp_path / "pandas.parquet")
    opened = open_dataset(str(tmp_path))
    assert arrays(opened, "id", "x") == [[7, 8], [1.5, 2.5]]
    old = tmp_path / "old"
    old.mkdir()
    pq.write_table(
        pa.table({"at": [moment]}), old / "1.parquet", use_deprecated_int96_timestamps=True
    )
    assert pq.read_metadata(old / "1.parquet").schema.column(0).physical_type == "INT96"
    assert arrays(open_dataset(str(old)), "at") == [[int(moment.timestamp() * 1000) * 1000]]


def test_files_that_disagree_are_named(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"no column x in .*/b\.parquet"):
        ParquetLoader(tmp_path, 2)
    with pytest.raises(ValueError, match=r"no column x in .*/b\.parquet"):
        ParquetLoader(tmp_path, 2, ["x"])
    (batch,) = ParquetLoader(tmp_path, 2, ["y"])
    assert batch["y"].tolist() == [1, 1], "nobody asked for x"
    pq.write_table(pa.table({"x": [0.5], "y": [1]}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"column x is Float64 in .*/b\.parquet, elsewhere it is Int64"
    ):
        ParquetLoader(tmp_path, 2)
    good = (tmp_path / "a.parquet").read_bytes()
    for bad in (b"", b"PAR1", good[:-9], b"X" + good[:-1] + b"X"):
        (tmp_path / "b.parquet").write_bytes(bad)
        with pytest.raises(OSError, match=r"/b\.parquet"):
            open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    "told",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.string()),
        pa.list_(pa.list_(pa.int64())),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=str,
)
def test_lists_whose_arrow_schema_contradicts_their_parquet_types_are_read(tmp_path, told):
    """The Parquet types count, as in pyarrow: parquet-rs by itself refuses such a file."""
    rows = pa.table({"id": [1, 2, 3], "pair": pa.array([[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    said = pa.schema([pa.field("id", pa.int64()), pa.field("pair", told)])
    file = tmp_path / "rows" / "a.parquet"
    file.parent.mkdir()
    with pq.ParquetWriter(file, rows.schema, store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata(
            {"ARROW:schema": base64.b64encode(said.serialize().to_pybytes()).decode()}
        )
    assert b"ARROW:schema" in pq.read_metadata(file).metadata
    assert arrays(open_dataset(str(file.parent)), "id", "pair") == [
        [1, 2, 3],
        rows["pair"].to_pylist(),
    ]
    prepared = prepare_data(
        file, tmp_path / "store", feature_cols=["id", "pair"], ragged={"pair": Pad(max_length=3)}
    )
    (batch,) = ParquetLoader(prepared.train_url, 3, ["pair"], shuffle=False)
    assert batch["pair"].tolist() == [[1.5, 2.0, 0.0], [3.0, 4.0, 0.0], [5.0, 6.0, 0.0]]


def test_a_file_whose_columns_have_unequal_lengths_is_named(tmp_path):
    file = tmp_path / "rows" / "a.parquet"
    file.parent.mkdir()
    pq.write_table(
        pa.table({"id": [1, 2], "pair": [[1, 2], [3, 4]]}),
        file,
        compression="none",
        use_dictionary=False,
    )
    good, levels = file.read_bytes(), b"\x02\x00\x00\x00\x03"  # two bytes: a run of eight levels
    assert good.count(levels + b"\x0a") == 1, "0, 1, 0, 1: two rows of two values"
    file.write_bytes(good.replace(levels + b"\x0a", levels + b"\x0e"))  # one row of four values
    with pytest.raises(ValueError, match=r"column pair .*/rows/a\.parquet"):
        list(ParquetLoader(file, 2, ["id", "pair"]))
    with pytest.raises(
        (ValueError, OSError), match=r"/rows/a\.parquet.*expected length 2 but got length 1"
    ):
        prepare_data(
            file,
            tmp_path / "store",
            feature_cols=["id", "pair"],
            ragged={"pair": Pad(max_length=4)},
        )


@pytest.mark.timing
def test_a_thousand_files_are_planned_in_a_second_and_once_for_all_ranks(tmp_path):
    table = pa.table({f"c{index}": np.arange(20.0) for index in range(10)})
    pq.write_table(table, tmp_path / "0.parquet")
    for index in range(1, 1000):
        shutil.copy(tmp_path / "0.parquet", tmp_path / f"{index}.parquet")
    took = []
    for _ in range(3):
        started = time.perf_counter()
        opened = open_dataset(str(tmp_path))
        took.append(time.perf_counter() - started)
    assert opened.rows == 20_000
    assert min(took) < 1
    store = LocalStore(str(tmp_path / "store"))
    url = write_dataset_link(store, opened)
    started = time.perf_counter()
    again = reader.Dataset.open_url(url)
    assert time.perf_counter() - started < min(took) / 2 + 0.05
    assert (again.rows, again.fingerprint) == (opened.rows, opened.fingerprint)
    assert arrays(again, "c3") == arrays(opened, "c3")


def test_a_delta_table_is_read_by_its_log(tmp_path):
    path = str(tmp_path / "intermediate_train_data")
    first = pa.table({"x": [1, 2, 3, 4], "day": ["a", "a", "b", "b"], "n": [1, 1, 2, 2]})
    deltalake.write_deltalake(path, first, partition_by=["n"])
    deltalake.write_deltalake(path, pa.table({"x": [5], "day": ["c"], "n": [3]}), mode="append")
    deltalake.DeltaTable(path).delete("x = 2")
    with pytest.raises(ValueError, match="a table of Delta"):
        reader.Dataset.open_url(path)
    opened = open_dataset(path)
    assert sorted(zip(*arrays(opened, "x", "n"), strict=True)) == [(1, 1), (3, 2), (4, 2), (5, 3)]

    store = LocalStore(str(tmp_path))
    found = find_existing_data(store, ColumnRoles(("x",), ("n",)))
    deltalake.DeltaTable(path).delete("x > 3")
    assert sorted(arrays(reader.Dataset.open_url(found.train_url), "x")[0]) == [1, 3, 4, 5], (
        "a run sees one version"
    )
    assert find_existing_data(store, ColumnRoles(("x",), ("n",))).train_rows == 2
    rows, held_out, columns, _ = get_simple_meta_from_parquet(store, ["n"])
    assert (rows, held_out, sorted(columns)) == (2, 0, ["day", "n", "x"])

    prepared = prepare_data(path, tmp_path / "store", feature_cols=["x"], label_cols=["n"])
    assert prepared.train_rows == 2
    assert prepare_data(path, tmp_path / "store", feature_cols=["x"], label_cols=["n"]).reused
    deltalake.write_deltalake(path, pa.table({"x": [9], "day": ["c"], "n": [3]}), mode="append")
    assert not prepare_data(path, tmp_path / "store", feature_cols=["x"], label_cols=["n"]).reused


def test_an_estimator_trains_on_a_delta_table(tmp_path):
    import torch

    from farandole.spark.common import LocalBackend
    from farandole.spark.torch import TorchEstimator

    x = np.linspace(0, 1, 64, dtype=np.float32)
    path = str(tmp_path / "intermediate_train_data")
    deltalake.write_deltalake(path, pa.table({"x": x, "y": 2 * x}))
    deltalake.write_deltalake(path, pa.table({"x": x + 100, "y": x}), mode="append")
    deltalake.DeltaTable(path).delete("x > 50")
    network = torch.nn.Linear(1, 1)
    model = TorchEstimator(
        backend=LocalBackend(1),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=16,
        epochs=3,
        store=LocalStore(str(tmp_path)),
        verbose=0,
    ).fit_on_parquet()
    losses = [epoch["train"]["loss"] for epoch in model.getHistory()]
    assert losses[-1] < losses[0] < 10, "rows that the log has dropped would cost thousands"


def test_an_iceberg_table_is_refused_with_a_word(tmp_path):
    os.makedirs(tmp_path / "metadata")
    (tmp_path / "metadata" / "v1.metadata.json").write_text("{}")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="a table of Iceberg, whose log"):
        reader.Dataset.open_url(str(tmp_path))


def test_a_loader_takes_a_file_a_pattern_and_a_list_of_them(tmp_path, monkeypatch):
    for year in (2023, 2024):
        for part in range(2):
            path = tmp_path / "rows" / f"year={year}" / f"part-{part}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"n": [10 * year + part] * 3}), path)
    (tmp_path / "rows" / "year=2024" / "notes.txt").write_text("no rows")
    rows = tmp_path / "rows"

    def found(paths):
        loader = ParquetLoader(paths, 100, shuffle=False)
        again = pickle.loads(pickle.dumps(loader))
        assert again.dataset.fingerprint == loader.dataset.fingerprint
        batch = next(iter(loader))
        return sorted(set(batch["n"].tolist())), sorted(
            set(batch.get("year", np.array([])).tolist())
        )

    assert found(rows / "year=2023" / "part-1.parquet") == ([20231], [])
    assert found(f"{rows}/*/part-0.parquet") == ([20230, 20240], [2023, 2024])
    assert found(f"{rows}/year=2024/*") == ([20240, 20241], [])
    assert found([f"{rows}/year=2023", f"{rows}/**/part-1.parquet"])[0] == [20230, 20231, 20241]
    monkeypatch.chdir(tmp_path)
    assert found("rows/*/part-0.parquet")[0] == [20230, 20240]
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        ParquetLoader(f"{rows}/*/part-9.parquet", 1)
    with pytest.raises(FileNotFoundError, match="none of these is a Parquet file"):
        ParquetLoader([f"{rows}/year=2024/notes.txt"], 1)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DuckDB relations and Iceberg tables as sources, and Iceberg tables that loaders read."""

from __future__ import annotations

import subprocess
import sys

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import EqualTo
from pyiceberg.types import DoubleType

from farandole.data import ParquetLoader, StreamLoader, prepare_data
from farandole.data.inputs.frames import is_row_container

ROWS = 40


def table(start=0, stop=ROWS):
    ids = range(start, stop)
    return pa.table(
        {"id": list(ids), "x": [row / 2 for row in ids], "tag": [f"t{row % 3}" for row in ids]}
    )


@pytest.fixture
def catalog(tmp_path):
    found = SqlCatalog(
        "local", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    found.create_namespace("sales")
    yield found
    found.engine.dispose()


@pytest.fixture
def iceberg(catalog):
    made = catalog.create_table("sales.rows", schema=table().schema)
    made.append(table(0, 25))
    made.append(table(25))
    return made


def ids(url, **options):
    loader = ParquetLoader(url, 16, ["id"], **options)
    return sorted(row for batch in loader for row in batch["id"].tolist())


def test_a_relation_of_duckdb_is_run_once_for_each_pass_and_never_whole(tmp_path, monkeypatch):
    connection = duckdb.connect()
    connection.sql(
        "create table rows as select i as id, i / 2 as \"x y\", 't' || i % 3 as tag from "
        "range(200000) t(i)"
    )
    relation = connection.sql("select * from rows where id < 150000")
    assert is_row_container(relation)
    monkeypatch.setattr(pa, "table", None)  # which would hold the whole result
    data = prepare_data(relation, tmp_path, categories=["tag"], validation=0.1)
    assert data.categories == {"tag": ["t0", "t1", "t2"]}
    assert data.train_rows + data.val_rows == 150_000
    batch = next(iter(ParquetLoader(data.val_url, 1000)))
    assert (batch["x y"] == batch["id"] / 2).all()
    assert (batch["tag"] == batch["id"] % 3 + 2).all()
    stream = StreamLoader(
        connection.sql("select id from rows order by id"), 1000, steps_per_epoch=2
    )
    assert [batch["id"][0] for batch in stream] == [0, 1000]
    stream.close()


def test_a_table_of_iceberg_is_prepared_from_its_catalog_and_from_its_directory(iceberg, tmp_path):
    store = tmp_path / "store"
    assert is_row_container(iceberg)
    data = prepare_data(iceberg, store, label_cols=["tag"], categories={"tag": None})
    assert ids(data.train_url) == list(range(ROWS))
    assert data.categories == {"tag": ["t0", "t1", "t2"]}
    again = prepare_data(iceberg.location(), store, label_cols=["tag"], categories={"tag": None})
    assert again.reused
    iceberg.delete(EqualTo("tag", "t1"))
    fewer = prepare_data(iceberg, store, label_cols=["tag"], categories={"tag": None})
    assert not fewer.reused
    left = [row for row in range(ROWS) if row % 3 != 1]
    assert ids(fewer.train_url) == left
    with iceberg.update_schema() as update:
        update.rename_column("x", "z")
        update.add_column("w", DoubleType())
    iceberg.append(pa.table({"id": [ROWS], "z": [1.0], "tag": ["t0"], "w": [2.0]}))
    grown = prepare_data(iceberg, store, feature_cols=["id", "z", "w"], fill={"w": -1})
    batch = next(iter(ParquetLoader(grown.train_url, 100, shuffle=False)))
    rows = sorted(zip(*(batch[name].tolist() for name in ("id", "z", "w")), strict=True))
    assert rows == [*((row, row / 2, -1.0) for row in left), (ROWS, 1.0, 2.0)]
    named = prepare_data(
        {"rows": iceberg}, store, sql="select id, z * 2 as z from rows where id > 30"
    )
    assert ids(named.train_url) == [row for row in [*left, ROWS] if row > 30]


def test_a_loader_reads_a_table_of_iceberg(iceberg):
    where = iceberg.location()
    assert ids(where) == list(range(ROWS))
    halves = [ids(where, rank=rank, size=2) for rank in range(2)]
    assert sorted(halves[0] + halves[1]) == list(range(ROWS))
    iceberg.delete(EqualTo("tag", "t1"))  # pyiceberg writes the files again
    assert ids(where) == [row for row in range(ROWS) if row % 3 != 1]
    with iceberg.update_schema() as update:
        update.rename_column("x", "z")
    values = [batch["z"] for batch in ParquetLoader(where, 16, ["z"])]
    assert sum(map(len, values)) == len(ids(where))


def test_the_command_prepares_and_shows_a_table_of_iceberg(iceberg, tmp_path):
    def command(*words):
        done = subprocess.run(
            [sys.executable, "-m", "farandole", "data", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = iceberg.location().removeprefix("file://")
    assert "40" in command("prepare", where, "--to", str(tmp_path / "store"), "--features", "id,x")
    assert "t2" in command("head", where)


def test_invalid_arguments_are_refused_by_name(iceberg, tmp_path):
    with pytest.raises(
        ValueError, match=r"a Delta or Iceberg table must be the only source: file://.*/rows"
    ):
        prepare_data([iceberg.location(), str(tmp_path)], tmp_path / "store")
    relation = duckdb.sql("select 1 as id")
    with pytest.raises(ValueError, match="age"):
        prepare_data(relation, tmp_path / "store", feature_cols=["age"])
    with pytest.raises(TypeError, match=r"polars, Delta or Iceberg table, .*: builtins.int"):
        prepare_data(1, tmp_path / "store")

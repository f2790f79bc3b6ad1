# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rules of reading that no cell of the matrix has: fills, casts, tensors, tables."""

import decimal
import json
from pathlib import Path

import deltalake
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import AlwaysTrue

from farandole._native import prepare as native_prepare
from farandole.data import ParquetLoader, frame_loader, prepare_data

ODD = 2**53 + 1


def read_everywhere(path, store, columns, **options):
    prepared = prepare_data(path, store, feature_cols=columns, reuse=False, **options)
    loaders = {
        "ParquetLoader": ParquetLoader(path, 99, columns, shuffle=False, **options),
        "prepare_data": ParquetLoader(prepared.train_url, 99, columns, shuffle=False),
        "frame_loader": frame_loader(str(path), 99, columns, shuffle=False, **options),
    }
    return {name: next(iter(loader)) for name, loader in loaders.items()}


@pytest.mark.parametrize("fill", [ODD, -(2**63), 2**63 - 1])
def test_a_fill_of_integers_passes_through_no_float(fill, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"c": pa.array([1, None], pa.int64())}), path)
    for name, batch in read_everywhere(path, tmp_path / "store", ["c"], fill={"c": fill}).items():
        assert batch["c"].tolist() == [1, fill], name
    for name, batch in read_everywhere(
        path, tmp_path / "other", ["c"], fill={"c": np.int64(fill)}
    ).items():
        assert batch["c"].tolist() == [1, fill], name


def test_a_fill_that_a_column_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"i": pa.array([1, None], pa.int8()), "f": pa.array([1.0, None], pa.float32())}
    pq.write_table(pa.table(columns), path)
    for name, fill in (("i", 128), ("i", 0.5), ("i", 2**70), ("f", 1e300)):
        with pytest.raises(ValueError, match=rf"column {name} .*filled"):
            ParquetLoader(path, 9, [name], fill={name: fill})


@pytest.mark.parametrize(
    ("kind", "values", "to"),
    [
        (pa.float64(), [1.0, 1e300], "float32"),
        (pa.float64(), [1.0, 1e19], "int64"),
        (pa.float32(), [1.0, 1e30], "int64"),
        (pa.uint64(), [1, 2**63], "int64"),
    ],
    ids=str,
)
def test_a_cast_that_leaves_the_range_names_the_row(kind, values, to, tmp_path):
    path = tmp_path / "narrow.parquet"
    pq.write_table(pa.table({"c": pa.array(values, kind)}), path)
    with pytest.raises(ValueError, match=r"column c.* row 1 .*narrow\.parquet.*" + to):
        list(ParquetLoader(path, 9, ["c"], cast={"c": to}))
    inside = tmp_path / "inside.parquet"
    pq.write_table(pa.table({"c": pa.array(values[:1], kind)}), inside)
    (batch,) = ParquetLoader(inside, 9, ["c"], cast={"c": to})
    assert (batch["c"].dtype, batch["c"].tolist()) == (to, [1])


@pytest.mark.parametrize("permutation", [None, [0, 2, 1], [2, 0, 1]], ids=str)
def test_tensors_keep_their_shape_and_the_order_of_their_axes(permutation, tmp_path):
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3, 4], permutation=permutation)
    flat = np.arange(48, dtype=np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(flat), 24)
    tensors = pa.FixedShapeTensorArray.from_storage(kind, rows)
    table = pa.table({"c": tensors})
    expected = flat.reshape(2, 2, 3, 4)
    if permutation:
        expected = expected.transpose(0, *(axis + 1 for axis in permutation))
    path = tmp_path / "tensors.parquet"
    pq.write_table(table, path)
    for source in (table, str(path)):
        prepared = prepare_data(source, tmp_path / "store", feature_cols=["c"], reuse=False)
        (one,) = ParquetLoader(prepared.train_url, 9, shuffle=False)
        (other,) = frame_loader(source, 9, ["c"], shuffle=False)
        assert np.array_equal(one["c"], expected)
        assert np.array_equal(other["c"], expected)
    if permutation:
        with pytest.raises(ValueError, match=r"column c .*another order"):
            ParquetLoader(path, 9, ["c"])
    else:
        (batch,) = ParquetLoader(path, 9, ["c"], shuffle=False)
        assert np.array_equal(batch["c"], expected)


def test_nested_lists_of_fixed_lengths_are_the_same_from_a_frame(tmp_path):
    nested = pa.array([[[1, 2], [3, 4], [5, 6]]], pa.list_(pa.list_(pa.int16(), 2), 3))
    table = pa.table({"c": nested})
    prepared = prepare_data(table, tmp_path / "store", feature_cols=["c"])
    (one,) = ParquetLoader(prepared.train_url, 9)
    (other,) = frame_loader(table, 9, ["c"])
    assert one["c"].tolist() == other["c"].tolist() == nested.to_pylist()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_frames_of_all_units_give_microseconds(unit, tmp_path):
    moments = np.array(["2024-01-01T12:00:01", "1960-02-03"], f"datetime64[{unit}]")
    spans = np.array([5, -7], f"timedelta64[{unit}]")
    frame = pd.DataFrame({"t": moments, "d": spans})
    prepared = prepare_data(frame, tmp_path / "store")
    for loader in (
        ParquetLoader(prepared.train_url, 9, shuffle=False),
        frame_loader(frame, 9, shuffle=False),
    ):
        (batch,) = loader
        assert batch["t"].tolist() == moments.astype("datetime64[us]").astype(int).tolist()
        floor = [-1 if unit == "ns" else -7, 0 if unit == "ns" else 5]
        factor = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}[unit]
        assert batch["d"].tolist() == [floor[1] * factor, floor[0] * factor]


def test_a_manifest_records_the_unit_and_refuses_data_of_another(tmp_path):
    table = pa.table({"t": pa.array([1], pa.timestamp("ms")), "d": pa.array([1], pa.date32())})
    prepared = prepare_data(table, tmp_path / "store")
    text = native_prepare.read_manifest(prepared.train_url)
    manifest = json.loads(text)
    assert [one["unit"] for one in manifest["columns"]] == ["microseconds", "days"]
    for column in manifest["columns"]:
        del column["unit"]
    directory = Path(prepared.train_url.removeprefix("file://"))
    (directory / "_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"column t is Timestamp\(ms\).*prepare the data again"):
        ParquetLoader(prepared.train_url, 9)


def delta_with_mapping(home, fields):
    """Writes a Delta table whose files have other names of columns than its schema."""
    (home / "_delta_log").mkdir(parents=True)
    rows = pa.table({"i": pa.array([0, 1]), "a": [1.0, 2.0], "b": [10.0, 20.0]})
    pq.write_table(rows, home / "f.parquet")
    schema = {
        "type": "struct",
        "fields": [
            {
                "name": name,
                "type": kind,
                "nullable": True,
                "metadata": {
                    "delta.columnMapping.id": number,
                    "delta.columnMapping.physicalName": physical,
                },
            }
            for number, (name, kind, physical) in enumerate(fields, 1)
        ],
    }
    log = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {
            "metaData": {
                "id": "x",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(schema),
                "partitionColumns": [],
                "configuration": {
                    "delta.columnMapping.mode": "name",
                    "delta.columnMapping.maxColumnId": "9",
                },
                "createdTime": 0,
            }
        },
        {
            "add": {
                "path": "f.parquet",
                "partitionValues": {},
                "size": (home / "f.parquet").stat().st_size,
                "modificationTime": 0,
                "dataChange": True,
            }
        },
    ]
    text = "\n".join(map(json.dumps, log))
    (home / "_delta_log" / "00000000000000000000.json").write_text(text)
    return str(home)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ([("i", "long", "i"), ("b", "double", "a"), ("a", "double", "b")], [1.0, 2.0]),
        ([("i", "long", "i"), ("z", "double", "a")], [1.0, 2.0]),
        ([("i", "long", "i"), ("b", "double", "col-4f2a")], [-1.0, -1.0]),
    ],
    ids=["exchanged", "renamed", "added again"],
)
def test_a_delta_table_with_a_column_mapping_is_never_read_by_physical_names(
    fields, values, tmp_path
):
    path = delta_with_mapping(tmp_path / "mapped", fields)
    name = fields[1][0]
    fill = {name: -1.0}
    prepared = prepare_data(path, tmp_path / "store", feature_cols=["i", name], fill=fill)
    for loader in (
        ParquetLoader(path, 9, ["i", name], fill=fill, shuffle=False),
        ParquetLoader(prepared.train_url, 9, shuffle=False),
        frame_loader(path, 9, ["i", name], fill=fill, shuffle=False),
    ):
        (batch,) = loader
        assert (batch["i"].tolist(), batch[name].tolist()) == ([0, 1], values)


def test_a_version_of_a_delta_table_is_a_source(tmp_path):
    path = str(tmp_path / "table")
    for value in (1, 2):
        deltalake.write_deltalake(path, pa.table({"c": [value]}), mode="overwrite")
    for version in (0, 1):
        table = deltalake.DeltaTable(path, version=version)
        prepared = prepare_data(table, tmp_path / "store", feature_cols=["c"])
        (one,) = ParquetLoader(prepared.train_url, 9)
        (other,) = frame_loader(table, 9, ["c"])
        assert one["c"].tolist() == other["c"].tolist() == [version + 1]


def without_old_schemas(table):
    """Removes the old schemas from the newest metadata, as maintenance of tables does."""
    place = Path(table.metadata_location.removeprefix("file://"))
    metadata = json.loads(place.read_text())
    now = metadata["current-schema-id"]
    metadata["schemas"] = [one for one in metadata["schemas"] if one["schema-id"] == now]
    place.write_text(json.dumps(metadata))


@pytest.fixture
def iceberg(tmp_path):
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("n")
    rows = pa.table({"a": [1.0, 2.0], "b": [10.0, 20.0]})
    table = catalog.create_table("n.t", rows.schema)
    table.append(rows)
    return table


def test_an_iceberg_table_is_never_read_by_old_names(iceberg):
    where = iceberg.location()
    (batch,) = ParquetLoader(where, 9, ["a", "b"], shuffle=False)
    assert batch["a"].tolist() == [1.0, 2.0]
    with iceberg.update_schema() as update:
        update.rename_column("a", "spare")
    with iceberg.update_schema() as update:
        update.rename_column("b", "a")
    with iceberg.update_schema() as update:
        update.rename_column("spare", "b")
    without_old_schemas(iceberg)
    (batch,) = ParquetLoader(where, 9, ["a", "b"], shuffle=False)
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([10.0, 20.0], [1.0, 2.0])
    assert iceberg.scan(row_filter=AlwaysTrue()).to_arrow()["a"].to_pylist() == [10.0, 20.0]


def test_large_strings_beside_strings_are_one_column(tmp_path):
    for number, kind in enumerate((pa.string(), pa.large_string(), pa.string_view())):
        pq.write_table(
            pa.table({"i": [number], "c": pa.array([f"w{number}"], kind)}),
            tmp_path / f"{number}.parquet",
        )
    for name, batch in read_everywhere(tmp_path, tmp_path.parent / "store", ["i", "c"]).items():
        assert batch["c"].tolist() == ["w0", "w1", "w2"], name


@pytest.mark.parametrize(
    "source",
    [
        pa.table({"c": pa.array([[1, 2], [3, 4]], pa.list_view(pa.int64()))}),
        pa.table({"c": pa.array([[0, 0], [1, 2], [3, 4]], pa.large_list_view(pa.int64()))[1:]}),
        pl.DataFrame({"c": pl.Series(["a", "b"], dtype=pl.Categorical)}),
        pl.DataFrame({"c": pl.Series(["a", "b"], dtype=pl.Enum(["b", "a"]))}),
    ],
    ids=["list_view", "large_list_view", "categorical", "enum"],
)
def test_types_that_only_some_programs_have_are_read_by_both_ways(source, tmp_path):
    expected = pa.table(source)["c"].to_pylist()
    prepared = prepare_data(source, tmp_path / "store", feature_cols=["c"])
    (one,) = ParquetLoader(prepared.train_url, 9, ["c"], shuffle=False)
    (other,) = frame_loader(source, 9, ["c"], shuffle=False)
    assert one["c"].tolist() == other["c"].tolist() == expected


def test_the_most_frequent_decimal_fills_as_a_float(tmp_path):
    values = [decimal.Decimal("1.5"), None, decimal.Decimal("1.5"), decimal.Decimal("2.5")]
    table = pa.table({"c": pa.array(values, pa.decimal128(5, 1))})
    prepared = prepare_data(table, tmp_path / "store", fill={"c": "most_frequent"})
    assert prepared.fill == {"c": 1.5}
    (batch,) = ParquetLoader(prepared.train_url, 9, shuffle=False)
    assert batch["c"].tolist() == [1.5, 1.5, 1.5, 2.5]

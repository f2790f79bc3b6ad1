# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Delta and Iceberg tables as their engines write them: all readers have the rows that the engine
has.

The slow tests have tables that Spark wrote, see `spark_tables.py`. The others write the logs here,
or by deltalake and pyiceberg.
"""

import datetime as dt
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import EqualTo
from pyiceberg.types import DoubleType, LongType

sys.path.insert(0, str(Path(__file__).parent))

from spark_tables import table_cells
from table_cells import READERS, judge_table

from farandole.data import ParquetLoader, frame_loader, open_table, prepare_data
from farandole.data.inputs.iceberg_deletes import mask_of_matching_rows

TOOLS = Path(__file__).parents[2] / ".tools"
SPARK = TOOLS / "pyspark-4.1" / "bin" / "python"
SPARK_LIMIT_SECONDS = 900
ROW_GROUP = 16
ROWS = 5 * ROW_GROUP
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

MASKS = {
    "nothing": [],
    "first": [0],
    "last": [ROWS - 1],
    "even": list(range(0, ROWS, 2)),
    "a row group": list(range(ROW_GROUP, 2 * ROW_GROUP)),
    "across groups": list(range(10, 40)),
    "all but one": [row for row in range(ROWS) if row != 37],
    "random": sorted(np.random.default_rng(5).permutation(ROWS)[:41].tolist()),
}


def values_by_kind():
    """Values by column: `valid` for living rows, and `poison` that would be an error."""
    rows = range(ROWS)
    return {
        "i": (pa.int64(), "long", list(rows), None),
        "f": (pa.float64(), "double", [row / 8 for row in rows], float("nan")),
        "x": (pa.float32(), "float", [row / 4 for row in rows], None),
        "b": (pa.bool_(), "boolean", [row % 3 == 0 for row in rows], None),
        "h": (pa.int16(), "short", [-row for row in rows], None),
        "m": (pa.decimal128(12, 2), "decimal(12,2)", list(rows), None),
        "t": (pa.timestamp("ms"), "timestamp_ntz", [row * 86_400_123 for row in rows], None),
        "d": (pa.date32(), "date", list(rows), None),
        "s": (pa.string(), "string", [f"w{row}" for row in rows], None),
        "v": (
            pa.list_(pa.float32()),
            {"type": "array", "elementType": "float", "containsNull": True},
            [[row, -row] for row in rows],
            [None, 1.0],
        ),
    }


def inline_vector(rows):
    """Returns a deletion vector in the text of Delta's log: one bitmap with one array."""
    body = struct.pack("<II", 12346, 1) + struct.pack("<HH", 0, len(rows) - 1)
    body += struct.pack("<I", 16) + b"".join(struct.pack("<H", row) for row in rows)
    data = struct.pack("<IQI", 1681511377, 1, 0) + body
    size = len(data)
    data += bytes(-size % 4)
    text = ""
    for start in range(0, len(data), 4):
        number, part = int.from_bytes(data[start : start + 4], "big"), ""
        for _ in range(5):
            number, digit = divmod(number, 85)
            part = Z85[digit] + part
        text += part
    return {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": size,
        "cardinality": len(rows),
    }


def write_delta(home, fields, files, features=("deletionVectors",), configuration=None):
    """Writes a Delta table of files with deleted rows: names, tables and positions."""
    (home / "_delta_log").mkdir(parents=True)
    schema = {"type": "struct", "fields": fields}
    log = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": list(features),
                "writerFeatures": list(features),
            }
        },
        {
            "metaData": {
                "id": "x",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(schema),
                "partitionColumns": [],
                "configuration": configuration or {},
                "createdTime": 0,
            }
        },
    ]
    for name, table, deleted in files:
        pq.write_table(table, home / name, row_group_size=ROW_GROUP)
        add = {
            "path": name,
            "partitionValues": {},
            "size": (home / name).stat().st_size,
            "modificationTime": 0,
            "dataChange": True,
            "stats": json.dumps({"numRecords": len(table), "tightBounds": False}),
        }
        if deleted:
            add["deletionVector"] = inline_vector(deleted)
        log.append({"add": add})
    text = "\n".join(map(json.dumps, log))
    (home / "_delta_log" / "00000000000000000000.json").write_text(text)
    return str(home)


def field_of(name, kind, **metadata):
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


@pytest.fixture(scope="module")
def masked_tables(tmp_path_factory):
    """A table for each mask: deleted rows have nulls, NaN and null elements of lists, which living
    rows must not have.
    """
    home, tables = tmp_path_factory.mktemp("masked"), {}
    for number, (name, deleted) in enumerate(MASKS.items()):
        columns, expected = {}, {}
        for column, (kind, _, valid, poison) in values_by_kind().items():
            gone = set(deleted)
            stored = [poison if row in gone else valid[row] for row in range(ROWS)]
            columns[column] = pa.array(stored, kind)
            # Batches have microseconds.
            living = [valid[row] for row in range(ROWS) if row not in gone]
            expected[column] = [one * 1000 for one in living] if column == "t" else living
        fields = [field_of(column, told[1]) for column, told in values_by_kind().items()]
        path = write_delta(
            home / f"t{number}",
            fields,
            [("f.parquet", pa.table(columns), deleted)],
            ("deletionVectors", "timestampNtz"),
        )
        rows = [list(row) for row in zip(*expected.values(), strict=True)]
        told = {"path": path, "columns": list(columns), "rows": rows}
        tables[name] = told
    return tables


@pytest.mark.parametrize("mask", MASKS)
def test_deleted_rows_are_in_no_batch_and_cause_no_error(mask, masked_tables):
    told = masked_tables[mask]
    faults = []
    for chosen in (["i", "f", "x", "h", "m", "t", "d", "v"], ["b", "i"]):
        places = [told["columns"].index(name) for name in chosen]
        part = {
            **told,
            "columns": chosen,
            "rows": [[row[at] for at in places] for row in told["rows"]],
        }
        faults += judge_table(mask, part)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("mask", MASKS)
def test_texts_of_living_rows_come_in_the_order_of_the_file(mask, masked_tables):
    told = masked_tables[mask]
    expected = [row[told["columns"].index("s")] for row in told["rows"]]
    for read in (ParquetLoader, frame_loader):
        batches = list(read(told["path"], 9, ["s"], shuffle=False))
        assert np.concatenate([batch["s"] for batch in batches]).tolist() == expected, read


def test_an_error_names_the_row_in_the_file(tmp_path):
    rows = pa.table({"c": pa.array([0.0, 1.0, 1e300, 3.0])})
    path = write_delta(tmp_path / "t", [field_of("c", "double")], [("f.parquet", rows, [0, 1])])
    with pytest.raises(ValueError, match=r"column c, row 2 of row group 0 of .*f\.parquet"):
        list(ParquetLoader(path, 9, cast={"c": "float32"}))


def test_types_for_directories_are_refused_for_a_table(tmp_path):
    rows = pa.table({"c": [1.0]})
    path = write_delta(tmp_path / "t", [field_of("c", "double")], [("f.parquet", rows, [])])
    with pytest.raises(ValueError, match=r"types .*'c'.* has the types of all its columns"):
        ParquetLoader(path, 1, types={"c": "int64"})


def test_a_null_among_living_rows_is_an_error_without_a_fill(tmp_path):
    rows = pa.table({"c": pa.array([None, 1.0, None, 3.0])})
    path = write_delta(tmp_path / "t", [field_of("c", "double")], [("f.parquet", rows, [0])])
    with pytest.raises(ValueError, match=r"column c .*1 null"):
        list(ParquetLoader(path, 9))
    (batch,) = ParquetLoader(path, 9, fill={"c": -1}, shuffle=False)
    assert batch["c"].tolist() == [1.0, -1.0, 3.0]


def test_a_deleted_row_that_is_not_there_is_refused(tmp_path):
    rows = pa.table({"c": pa.array([1.0, 2.0])})
    path = write_delta(tmp_path / "t", [field_of("c", "double")], [("f.parquet", rows, [5])])
    with pytest.raises(ValueError, match=r"the Delta table .*f\.parquet"):
        ParquetLoader(path, 9)
    other = write_delta(tmp_path / "u", [field_of("c", "double")], [("f.parquet", rows, [])])
    whole = open_table(other)
    damaged = replace(whole.files[0], deleted=np.array([5], np.uint64))
    with pytest.raises(ValueError, match=r"row 5 of .*f\.parquet is deleted, and .* 2 rows"):
        ParquetLoader(replace(whole, files=(damaged,)), 9)


WIDENINGS = [
    (pa.int8(), [1, -2], "short"),
    (pa.int8(), [1, -2], "integer"),
    (pa.int16(), [1, -300], "long"),
    (pa.int32(), [1, -(2**31)], "long"),
    (pa.int32(), [1, -(2**31)], "double"),
    (pa.float32(), [0.5, 1.125], "double"),
    (pa.decimal128(5, 2), ["1.25", "-9.99"], "decimal(12,2)"),
    (pa.decimal128(5, 2), ["1.25", "-9.99"], "decimal(12,4)"),
    (pa.int32(), [7, -8], "decimal(12,2)"),
    (pa.int64(), [2**53 + 1, -8], "decimal(20,0)"),
    (pa.date32(), [0, -3], "timestamp_ntz"),
]


@pytest.mark.parametrize(("kind", "values", "to"), WIDENINGS)
@pytest.mark.parametrize("is_list", [False, True])
def test_a_widened_column_has_the_values_of_its_new_type(kind, values, to, is_list, tmp_path):
    old = (
        pa.array(values, pa.string()).cast(kind)
        if pa.types.is_decimal(kind)
        else pa.array(values, kind)
    )
    old = pa.concat_arrays([old, old])
    if is_list:
        old = pa.FixedSizeListArray.from_arrays(old, 2).cast(pa.list_(kind))
    table = pa.table({"c": old})
    array = {"type": "array", "elementType": to, "containsNull": True}
    features = ["typeWidening", "timestampNtz"]
    path = write_delta(
        tmp_path / "t",
        [field_of("c", array if is_list else to)],
        [("f.parquet", table, [])],
        features,
    )
    (one,) = ParquetLoader(path, 9, shuffle=False)
    prepared = prepare_data(path, tmp_path / "store")
    (other,) = ParquetLoader(prepared.train_url, 9, shuffle=False)
    assert one["c"].dtype == other["c"].dtype
    assert one["c"].tolist() == other["c"].tolist()
    factor = 86_400_000_000 if pa.types.is_date(kind) else 1
    told = old.flatten() if is_list else old
    numbers = [
        float(text)
        for text in told.cast(pa.int32() if pa.types.is_date(kind) else kind)
        .cast(pa.string())
        .to_pylist()
    ]
    assert one["c"].reshape(-1).tolist() == [number * factor for number in numbers]


def test_a_type_that_no_table_widens_to_is_refused_with_column_and_file(tmp_path):
    for kind, to in ((pa.int64(), "integer"), (pa.float64(), "float"), (pa.string(), "long")):
        rows = pa.table({"c": pa.array([1], pa.int64()).cast(kind)})
        path = write_delta(tmp_path / to, [field_of("c", to)], [("f.parquet", rows, [])])
        with pytest.raises(ValueError, match=r"column c .*f\.parquet"):
            list(ParquetLoader(path, 9, ["c"]))


def test_features_that_are_not_read_are_refused_by_name(tmp_path):
    rows = pa.table({"c": [1]})
    path = write_delta(
        tmp_path / "t", [field_of("c", "long")], [("f.parquet", rows, [])], ["collations-preview"]
    )
    for read in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"the Delta table .*/t .*collations-preview"):
            read(path, 9)


@pytest.fixture
def versions(tmp_path):
    path = str(tmp_path / "delta")
    for value in (1, 2, 3):
        deltalake.write_deltalake(path, pa.table({"c": [value]}), mode="append")
    return path


def numbers(source, column="c"):
    return sorted(
        itertools.chain.from_iterable(
            batch[column].tolist() for batch in ParquetLoader(source, 9, [column])
        )
    )


def test_a_version_and_a_moment_choose_the_past_of_a_delta_table(versions, tmp_path):
    assert numbers(versions) == [1, 2, 3]
    assert numbers(open_table(versions, version=1)) == [1, 2]
    assert numbers(deltalake.DeltaTable(versions, version=0)) == [1]
    (oldest,) = [one for one in deltalake.DeltaTable(versions).history() if one["version"] == 0]
    moment = dt.datetime.fromtimestamp(oldest["timestamp"] / 1000, dt.UTC)
    assert open_table(versions, timestamp=moment).version == "0"
    assert open_table(versions, timestamp="2099-01-01").version == "2"
    old = open_table(versions, version=1)
    prepared = prepare_data(old, tmp_path / "store")
    assert numbers(prepared.train_url) == [1, 2]
    (batch,) = frame_loader(old, 9)
    assert sorted(batch["c"].tolist()) == [1, 2]
    with pytest.raises(ValueError, match=r"delta.* cannot be read: .*9"):
        open_table(versions, version=9)
    with pytest.raises(ValueError, match="at most one of version and timestamp"):
        open_table(versions, version=1, timestamp="2024-01-01")
    with pytest.raises(ValueError, match="at version 1 already"):
        open_table(old, version=2)
    with pytest.raises(ValueError, match="neither a Delta table nor an Iceberg table"):
        open_table(str(tmp_path))


def test_a_loader_keeps_its_version_when_others_write(versions):
    loader = ParquetLoader(versions, 9)
    packed = pickle.dumps(loader)
    state = loader.state_dict()
    deltalake.write_deltalake(versions, pa.table({"c": [4]}), mode="append")
    other = pickle.loads(packed)
    other.load_state_dict(state)
    assert [sorted(batch["c"].tolist()) for batch in other] == [[1, 2, 3]]
    assert numbers(versions) == [1, 2, 3, 4]
    again = ParquetLoader(versions, 9)
    with pytest.raises(ValueError, match="the files have changed"):
        again.load_state_dict(state)


@pytest.fixture
def iceberg(tmp_path):
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("n")
    rows = pa.table({"c": pa.array([1, 2], pa.int32()), "f": pa.array([1.5, 2.5], pa.float32())})
    table = catalog.create_table("n.t", rows.schema)
    table.append(rows)
    return table


def test_iceberg_columns_are_renamed_added_and_promoted(iceberg, tmp_path):
    before = iceberg.current_snapshot().snapshot_id
    with iceberg.update_schema() as update:
        update.rename_column("f", "z")
        update.update_column("c", field_type=LongType())
    with iceberg.update_schema() as update:
        update.update_column("z", field_type=DoubleType())
        update.add_column("f", DoubleType())
    iceberg.append(pa.table({"c": [2**40], "z": [0.1], "f": [9.0]}))
    told = {
        "path": iceberg.location(),
        "columns": ["c", "z", "f"],
        "rows": [[1, 1.5, None], [2, 2.5, None], [2**40, 0.1, 9.0]],
    }
    faults = judge_table("iceberg", told)
    faults += judge_table("object", {**told, "path": iceberg})
    assert not faults, "\n".join(faults)
    for past in (
        open_table(iceberg.location(), version=before),
        open_table(iceberg, version=before),
        iceberg.scan(snapshot_id=before),
    ):
        faults = judge_table(
            "past", {"path": past, "columns": ["c", "f"], "rows": [[1, 1.5], [2, 2.5]]}
        )
        assert not faults, "\n".join(faults)
    assert [one.name for one in open_table(iceberg.scan(selected_fields=("z",))).columns] == ["z"]
    with pytest.raises(ValueError, match=r"the Iceberg table .*/t has no snapshot 7, there are"):
        open_table(iceberg, version=7)
    with pytest.raises(ValueError, match=r"has no snapshot at 1999-01-01"):
        open_table(iceberg, timestamp="1999-01-01")
    with pytest.raises(ValueError, match="a filter or a limit is not read"):
        open_table(iceberg.scan(row_filter=EqualTo("c", 1)))


def test_rows_are_equal_by_value_with_nulls_and_nan():
    """Rows that equality deletes match, compared with sets of tuples."""
    random = np.random.default_rng(3)
    choices = ([None, 0.5, float("nan"), -1.0], [None, 1, 2, 3], ["a", None, "b"])
    for size in (0, 1, 7, 40):
        columns = [[picks[at] for at in random.integers(0, len(picks), 200)] for picks in choices]
        values = [[picks[at] for at in random.integers(0, len(picks), size)] for picks in choices]
        kinds = (pa.float64(), pa.int64(), pa.string())
        rows, deleted = (
            pa.table(
                {
                    name: pa.array(one, kind)
                    for name, one, kind in zip("abc", told, kinds, strict=True)
                }
            )
            for told in (columns, values)
        )
        known = {repr(one) for one in zip(*values, strict=True)}
        expected = [repr(one) in known for one in zip(*columns, strict=True)]
        assert mask_of_matching_rows(rows, deleted).tolist() == expected


def test_a_table_without_a_snapshot_is_refused_by_name(tmp_path):
    catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("n")
    table = catalog.create_table("n.empty", pa.schema([("c", pa.int64())]))
    for read in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"the Iceberg table .*empty has no snapshot"):
            read(table.location(), 9)


@pytest.fixture(scope="module")
def spark_tables(tmp_path_factory):
    """Tables that Spark wrote, by name, with the rows that Spark reads."""
    assert SPARK.exists(), (
        "make test-readers installs this version of Spark with the jars of tables"
    )
    home = tmp_path_factory.mktemp("spark")
    script = Path(__file__).with_name("spark_tables.py")
    with (home / "log").open("wb") as log:
        done = subprocess.run(
            [SPARK, script, home, TOOLS / "table-jars"],
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SPARK_LIMIT_SECONDS,
            env={**os.environ, "PYSPARK_PYTHON": str(SPARK)},
            check=False,
        )
    assert not done.returncode, (home / "log").read_text()[-4000:]
    return json.loads((home / "tables.json").read_text())


REFUSED = {"delta-widened": "type widening and deletion vectors"}


@pytest.mark.slow
@pytest.mark.parametrize("name", table_cells())
def test_all_readers_read_what_spark_reads(name, spark_tables):
    faults = judge_table(name, spark_tables[name])
    if name in REFUSED:
        assert len(faults) == len(READERS)
        assert all("the Delta table" in one and REFUSED[name] in one for one in faults), faults
        return
    assert not faults, "\n".join(faults)


def test_the_tables_of_spark_are_at_least_50_with_all_readers():
    assert len(table_cells()) >= 50
    assert len(READERS) * len(table_cells()) >= 400


@pytest.mark.parametrize("mask", ["nothing", "random"])
def test_a_query_reads_living_rows(mask, masked_tables, tmp_path):
    told = masked_tables[mask]
    made = prepare_data(told["path"], tmp_path, sql="select i, h from source where i >= 20")
    expected = [row[0] for row in told["rows"] if row[0] >= 20]
    found = [batch["i"] for batch in ParquetLoader(made.train_url, 99)]
    assert sorted(np.concatenate(found).tolist()) == expected

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files of the partition writer, written from pyarrow's batches and read with pyarrow."""

import datetime as dt
import decimal
import json
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole._native import prepare, reader


def write(url, tables, **spec):
    """Prepares one partition per table; returns what `commit` says."""
    text = json.dumps({"train": "train", **spec})
    parts = []
    for number, table in enumerate(tables):
        writer = prepare.PartitionWriter(str(url), text, number, uuid.uuid4().hex)
        for batch in table.to_batches(max_chunksize=97):
            writer.write(batch)
        parts.append(writer.finish())
    return json.loads(prepare.commit_partitions(str(url), text, parts))


def arrays(path, **options):
    """Everything in file order, as NumPy arrays by name."""
    read = reader.Reader(
        reader.Dataset.open_url(str(path)), batch_size=1 << 20, shuffle=False, **options
    )
    (batch,) = read.read_epoch(0)
    columns = {name: batch.column(name) for name in batch.names}
    return {
        name: np.frombuffer(column, column.dtype).reshape(column.shape)
        for name, column in columns.items()
    }


SCALARS = {
    "bool": pa.array([True, False, True]),
    "int8": pa.array([1, -2, 3], pa.int8()),
    "int16": pa.array([1, -2, 3], pa.int16()),
    "int32": pa.array([1, -2, 3], pa.int32()),
    "int64": pa.array([1, -2, 1 << 60]),
    "uint8": pa.array([1, 2, 255], pa.uint8()),
    "uint16": pa.array([1, 2, 65535], pa.uint16()),
    "uint32": pa.array([1, 2, 1 << 31], pa.uint32()),
    "uint64": pa.array([1, 2, 1 << 63], pa.uint64()),
    "float32": pa.array([1.5, -2.5, float("inf")], pa.float32()),
    "float64": pa.array([1.5, -2.5, 1e300]),
}


def test_scalars_come_back_as_they_were(tmp_path):
    write(tmp_path, [pa.table(SCALARS)], allow_nan=True)
    read = arrays(tmp_path / "train")
    for name, column in SCALARS.items():
        assert read[name].dtype == name
        assert read[name].tolist() == column.to_pylist()


def test_decimals_dates_and_times_become_numbers(tmp_path):
    day, moment = dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, tzinfo=dt.UTC)
    table = pa.table(
        {
            "decimal": pa.array([decimal.Decimal("1.25")], pa.decimal128(10, 2)),
            "date": pa.array([day]),
            "time": pa.array([moment], pa.timestamp("us", "UTC")),
        }
    )
    write(tmp_path, [table])
    read = arrays(tmp_path / "train")
    assert read["decimal"].tolist() == [1.25]
    assert read["date"].tolist() == [(day - dt.date(1970, 1, 1)).days]
    assert read["time"].tolist() == [int(moment.timestamp()) * 1_000_000]


def test_lists_become_fixed_size_rows_that_a_plain_reader_understands(tmp_path):
    values = np.arange(600, dtype=np.float32)
    rows = pa.array(values.reshape(200, 3).tolist(), pa.list_(pa.float32()))
    nested = pa.array(values.reshape(200, 3, 1).tolist(), pa.list_(pa.list_(pa.float32())))
    out = write(tmp_path, [pa.table({"x": rows, "n": nested})])
    read = arrays(tmp_path / "train")
    assert (read["x"] == values.reshape(200, 3)).all()
    assert read["n"].shape == (200, 3, 1)
    file = tmp_path / "train" / out["train"]["files"][0]["path"]
    table = pq.read_table(file)
    assert table.schema.field("x").metadata == {
        b"farandole.element": b"float32",
        b"farandole.shape": b"3",
    }
    assert b"".join(table["x"].to_pylist()) == values.tobytes()
    assert pq.read_metadata(file).num_row_groups >= 6


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def vectors(*rows):
    names = ("type", "size", "indices", "values")
    return pa.table(
        {"features": pa.array([dict(zip(names, row, strict=True)) for row in rows], VECTOR)}
    )


def test_spark_vectors_are_dense_whatever_they_came_as(tmp_path):
    write(tmp_path, [vectors((1, None, None, [1.0, 2.0, 3.0]), (0, 3, [2], [5.0]), (0, 3, [], []))])
    read = arrays(tmp_path / "train", cast={"features": "float32"})
    assert read["features"].dtype == np.float32
    assert read["features"].tolist() == [[1, 2, 3], [0, 0, 5], [0, 0, 0]]


def test_ragged_vectors_name_the_column_and_both_lengths(tmp_path):
    with pytest.raises(ValueError, match="column features has rows of 2 and of 3 values"):
        write(tmp_path, [vectors((1, None, None, [1.0, 2.0]), (0, 3, [2], [5.0]))])
    with pytest.raises(
        ValueError, match="column features is 2 values of float64 in partition 0 and 1 values"
    ):
        write(tmp_path, [vectors((1, None, None, [1.0, 2.0])), vectors((1, None, None, [1.0]))])


def test_nulls_name_the_column_the_count_and_the_partition(tmp_path):
    tables = [pa.table({"a": [1, 2]}), pa.table({"a": pa.array([1, None, None])})]
    with pytest.raises(ValueError, match="column a has nulls in 2 of 3 rows, in partition 1"):
        write(tmp_path, tables)


def test_a_missing_column_and_a_type_that_cannot_be_are_named(tmp_path):
    with pytest.raises(ValueError, match="no column b, there are: a"):
        write(tmp_path, [pa.table({"a": [1]})], columns=["b"])
    with pytest.raises(ValueError, match="column a has a type that cannot be prepared: Map"):
        write(tmp_path, [pa.table({"a": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))})])
    for weights, kind in ((["heavy"], "Utf8"), ([[1.0, 2.0]], "List")):
        with pytest.raises(
            ValueError, match=f"column w cannot be a sample weight, because it is {kind}"
        ):
            write(tmp_path, [pa.table({"a": [1], "w": weights})], weight="w")


def test_no_rows_are_an_error_and_empty_partitions_are_not(tmp_path):
    empty = pa.table({"a": pa.array([], pa.int64())})
    with pytest.raises(ValueError, match=r"no rows of training data \(the data is empty\)"):
        write(tmp_path, [empty])
    assert prepare.read_manifest(str(tmp_path / "train")) is None
    assert write(tmp_path, [empty, pa.table({"a": [1, 2]}), empty])["train"]["rows"] == 2
    with pytest.raises(ValueError, match=r"no rows of validation data \(2 rows came in"):
        write(tmp_path, [pa.table({"a": [1, 2]})], val="val", validation={"fraction": 1e-9})


def test_the_split_knows_rows_and_not_partitions(tmp_path):
    whole = pa.table({"a": np.arange(5000), "b": np.arange(5000) % 7})
    split = {"val": "val", "validation": {"fraction": 0.2}, "seed": 4}
    write(tmp_path / "one", [whole], **split)
    write(tmp_path / "many", [whole.slice(start, 1250) for start in (3750, 0, 2500, 1250)], **split)
    sides = [set(arrays(tmp_path / name / "val")["a"].tolist()) for name in ("one", "many")]
    assert sides[0] == sides[1]
    assert 850 < len(sides[0]) < 1150
    train = set(arrays(tmp_path / "many" / "train")["a"].tolist())
    assert train | sides[0] == set(range(5000))
    assert not train & sides[0]


def test_a_column_splits_and_is_left_out(tmp_path):
    table = pa.table({"a": [1, 2, 3, 4, 5], "v": pa.array([0, 1, 7, -1, None])})
    out = write(tmp_path, [table], val="val", validation={"column": "v"})
    assert out["dropped"] == 2
    assert arrays(tmp_path / "val")["a"].tolist() == [2, 3]
    assert list(arrays(tmp_path / "train")) == ["a"]


def test_the_manifest_tells_roles_statistics_and_what_it_was_made_from(tmp_path):
    table = pa.table({"a": [1.5, -2.0], "y": [0, 9], "w": [1.0, 1.0], "t": ["p", "q"]})
    write(tmp_path, [table, table], labels=["y"], weight="w", fingerprint="plan 7")
    manifest = json.loads(prepare.read_manifest(str(tmp_path / "train")))
    assert (manifest["fingerprint"], manifest["rows"], manifest["format"]) == ("plan 7", 4, 1)
    told = {
        column["name"]: (column["role"], column["element"], column["min"], column["max"])
        for column in manifest["columns"]
    }
    assert told == {
        "a": ("feature", "float64", -2.0, 1.5),
        "y": ("label", "int64", 0.0, 9.0),
        "w": ("weight", "float64", 1.0, 1.0),
        "t": ("feature", "utf8", None, None),
    }
    assert all(
        (tmp_path / "train" / file["path"]).stat().st_size == file["bytes"]
        for file in manifest["files"]
    )


@pytest.mark.parametrize("compression", ["none", "snappy", "lz4", "zstd"])
def test_every_compression_reads_back(tmp_path, compression):
    table = pa.table({"a": np.arange(1000) % 5})
    write(tmp_path, [table], compression=compression)
    assert arrays(tmp_path / "train")["a"].tolist() == table["a"].to_pylist()
    (file,) = (tmp_path / "train").glob("*.parquet")
    found = pq.read_metadata(file).row_group(0).column(0).compression
    assert found.lower().startswith({"none": "uncompressed"}.get(compression, compression))


def test_an_attempt_that_failed_or_ran_twice_leaves_nothing_behind(tmp_path):
    spec = json.dumps({"train": "train"})
    batch = pa.record_batch({"a": np.arange(1000)})

    def attempt(name):
        writer = prepare.PartitionWriter(str(tmp_path), spec, 0, name)
        writer.write(batch)
        return writer

    attempt("aborted").abort()
    first, second = attempt("first").finish(), attempt("second").finish()
    with pytest.raises(
        ValueError, match="two attempts of one partition cannot both be committed: 0"
    ):
        prepare.commit_partitions(str(tmp_path), spec, [first, second])
    prepare.commit_partitions(str(tmp_path), spec, [second])
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "_manifest.json",
        "part-00000-second.parquet",
    ]
    with pytest.raises(OSError, match="has 0 bytes where its writer left"):
        prepare.commit_partitions(str(tmp_path), spec, [first])
    ended = attempt("third")
    ended.abort()
    with pytest.raises(RuntimeError, match="already ended"):
        ended.write(batch)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match=str(blocked)):
        write(blocked, [pa.table({"a": [1]})])


def test_only_record_batches_are_taken(tmp_path):
    writer = prepare.PartitionWriter(str(tmp_path), '{"train": "t"}', 0, "a")
    with pytest.raises(TypeError, match="__arrow_c_array__"):
        writer.write([1, 2])
    with pytest.raises(ValueError, match="not an Arrow record batch: Int64"):
        writer.write(pa.array([1, 2]))

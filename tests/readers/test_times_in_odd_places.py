# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Times that must be refused or converted are found under any name, in any list, by any door."""

import struct

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader, frame_loader, prepare_data

NAMES = ("at", "a.b", "ö x`", "a.b.c")
YEAR_9999 = 253_402_300_799
JULIAN_DAY_1970 = 2_440_588
MARKED_DAY, FAR_DAY = 777, 200_000_000
WRAPPINGS = {
    "plain": lambda values: values,
    "list": lambda values: pa.array([[one] for one in values.to_pylist()], pa.list_(values.type)),
    "fixed list": lambda values: pa.FixedSizeListArray.from_arrays(values, 1),
    "nested list": lambda values: pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(values, 1), 1
    ),
}


DOORS = ("ParquetLoader", "prepare_data", "frame_loader", "dataset", "filtered", "union", "query")


def write_far_int96(path, name, wrap):
    """Writes a moment that no int64 of microseconds holds; pyarrow itself cannot."""
    values = wrap(pa.array([0, MARKED_DAY * 86_400], pa.timestamp("s")))
    columns = {"a": [1, 2]} | {name: values}
    pq.write_table(
        pa.table(columns), path, use_deprecated_int96_timestamps=True, use_dictionary=False,
        compression="NONE", write_statistics=False,
    )  # fmt: skip
    near, far = (struct.pack("<qI", 0, JULIAN_DAY_1970 + day) for day in (MARKED_DAY, FAR_DAY))
    content = path.read_bytes()
    assert content.count(near) == 1
    path.write_bytes(content.replace(near, far))


def write_old_dates(path, name, wrap):
    table = pa.table({"a": [1, 2], name: wrap(pa.array([0, -300_000], pa.date32()))})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {"org.apache.spark.version": "3.5.1", "org.apache.spark.legacyDateTime": ""}
        )


def read_by(door, path, name, store):
    if door == "ParquetLoader":
        return list(ParquetLoader(path, 9, [name]))
    if door == "frame_loader":
        return list(frame_loader(str(path), 9, [name]))
    options = {"feature_cols": [name], "reuse": False}
    source = {
        "prepare_data": str(path),
        "query": str(path),
        "dataset": ds.dataset(path),
        "filtered": ds.dataset(path).filter(ds.field("a") > 0),
        "union": ds.dataset([ds.dataset(path), ds.dataset(path)]),
    }[door]
    if door == "query":
        options["sql"] = "select * from source"
    return list(ParquetLoader(prepare_data(source, store, **options).train_url, 9, [name]))


@pytest.mark.parametrize("write", [write_far_int96, write_old_dates])
@pytest.mark.parametrize("door", DOORS)
def test_a_time_that_no_batch_can_hold_is_refused(door, write, tmp_path):
    for number, (name, wrapping) in enumerate(zip(NAMES, WRAPPINGS, strict=True)):
        path = tmp_path / f"{number}.parquet"
        write(path, name, WRAPPINGS[wrapping])
        with pytest.raises(ValueError, match="column") as told:
            read_by(door, path, name, tmp_path / "store")
        is_unread = door == "ParquetLoader" and wrapping == "nested list"
        assert name in str(told.value)
        assert is_unread or path.name in str(told.value)


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_int96_of_a_dataset_gives_microseconds_of_all_years(name, is_filtered, tmp_path):
    path = tmp_path / "rows.parquet"
    moments = pa.array([0, YEAR_9999, 5], pa.timestamp("s"))
    table = pa.table({"a": [1, 2, 3], name: moments})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    source = ds.dataset(path).filter(ds.field("a") < 3) if is_filtered else ds.dataset(path)
    prepared = prepare_data(source, tmp_path / "store", feature_cols=[name])
    for loader in (
        ParquetLoader(prepared.train_url, 9, shuffle=False),
        frame_loader(source, 9, [name], shuffle=False),
    ):
        (batch,) = loader
        assert batch[name].tolist()[:2] == [0, YEAR_9999 * 10**6]


def test_a_moment_before_all_dates_of_python_is_named_by_its_number(tmp_path):
    path = tmp_path / "old.parquet"
    table = pa.table({"c": pa.array([-(10**17)], pa.timestamp("us", "UTC"))})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"org.apache.spark.version": "2.4.8"})
    with pytest.raises(ValueError, match=r"column 'c' of .*old\.parquet has -100000000000000000"):
        prepare_data(str(path), tmp_path / "store", feature_cols=["c"])

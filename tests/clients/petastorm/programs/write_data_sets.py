# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes data sets with the petastorm of this process, without Spark: each codec encodes, pyarrow
writes, and petastorm's own functions add the metadata.
"""

import datetime as dt
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from petastorm import utils
from petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
)
from petastorm.etl import dataset_metadata
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql import types

ROWS, ROW_GROUP_ROWS, FILES = 60, 7, 3
START = dt.datetime(2021, 5, 6, 7, 8, 9, 123456)  # noqa: DTZ001 - as Parquet has it
SCALARS = [
    ("id", np.int64, types.LongType(), pa.int64()),
    ("small", np.int8, types.ByteType(), pa.int8()),
    ("pixel", np.uint8, types.ShortType(), pa.int16()),
    ("count", np.uint16, types.IntegerType(), pa.int32()),
    ("ratio", np.float32, types.FloatType(), pa.float32()),
    ("exact", np.float64, types.DoubleType(), pa.float64()),
    ("flag", np.bool_, types.BooleanType(), pa.bool_()),
    ("name", np.str_, types.StringType(), pa.string()),
    ("price", Decimal, types.DecimalType(10, 3), pa.decimal128(10, 3)),
    ("day", np.datetime64, types.DateType(), pa.date32()),
    ("moment", np.datetime64, types.TimestampType(), pa.timestamp("us")),
]


def make_schema():
    fields = [
        UnischemaField(name, kind, (), ScalarCodec(spark)) for name, kind, spark, _ in SCALARS
    ]
    fields += [
        UnischemaField("plain_id", np.int32, (), None, False),
        UnischemaField("maybe", np.int32, (), ScalarCodec(types.IntegerType()), True),
        UnischemaField("maybe_ratio", np.float32, (), ScalarCodec(types.FloatType()), True),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("points", np.float64, (None, 3), NdarrayCodec(), True),
        UnischemaField("words", np.str_, (None,), NdarrayCodec(), False),
        UnischemaField("packed", np.int16, (4, None), CompressedNdarrayCodec(), False),
        UnischemaField("png", np.uint8, (5, 4, 3), CompressedImageCodec("png"), False),
        UnischemaField("gray", np.uint8, (6, 3), CompressedImageCodec("png"), False),
        UnischemaField("deep_gray", np.uint16, (6, 3), CompressedImageCodec("png"), False),
        UnischemaField("jpeg", np.uint8, (16, 24, 3), CompressedImageCodec("jpeg", 90), False),
    ]
    return Unischema("EveryCodec", fields)


def make_row(row, random):
    return {
        "id": np.int64(row),
        "small": np.int8(row - 30),
        "pixel": np.uint8(row * 4),
        "count": np.uint16(60000 + row),
        "ratio": np.float32(row / 7),
        "exact": np.float64(row / 7),
        "flag": np.bool_(row % 3 == 0),
        "name": f"näme {row}",
        "price": Decimal(row) / 8,
        "day": dt.date(2020, 1, 1) + dt.timedelta(row),
        "moment": START + dt.timedelta(hours=row),
        "plain_id": np.int32(row),
        "maybe": None if row % 4 == 0 else np.int32(row),
        "maybe_ratio": None if row % 5 == 0 else np.float32(row / 3),
        "matrix": random.random((2, 3)).astype(np.float32),
        "points": None if row % 6 == 0 else random.random((row % 4, 3)),
        "words": np.array(["a", f"wörd {row}"]),
        "packed": random.integers(-9, 9, (4, 1 + row % 3)).astype(np.int16),
        "png": random.integers(0, 256, (5, 4, 3)).astype(np.uint8),
        "gray": random.integers(0, 256, (6, 3)).astype(np.uint8),
        "deep_gray": random.integers(0, 65536, (6, 3)).astype(np.uint16),
        "jpeg": np.linspace(0, 255, 16 * 24 * 3).reshape(16, 24, 3).astype(np.uint8),
    }


def encode(schema, row):
    encoded = {}
    for name, value in row.items():
        codec = schema.fields[name].codec
        stored = (
            value if codec is None or value is None else codec.encode(schema.fields[name], value)
        )
        encoded[name] = bytes(stored) if isinstance(stored, bytearray) else stored
    return encoded


def write_every_codec(directory):
    random, schema = np.random.default_rng(3), make_schema()
    stored_types = {name: kind for name, _, _, kind in SCALARS}
    stored_types |= {"plain_id": pa.int32(), "maybe": pa.int32(), "maybe_ratio": pa.float32()}
    arrow = pa.schema([(name, stored_types.get(name, pa.binary())) for name in schema.fields])
    rows = [encode(schema, make_row(row, random)) for row in range(ROWS)]
    directory.mkdir(parents=True)
    for file in range(FILES):
        part = rows[file * ROWS // FILES : (file + 1) * ROWS // FILES]
        table = pa.Table.from_pylist(part, schema=arrow)
        pq.write_table(table, directory / f"part-{file}.parquet", row_group_size=ROW_GROUP_ROWS)
    if hasattr(dataset_metadata, "store_schema"):  # ours
        dataset_metadata.store_schema(directory.as_uri(), schema)
    else:
        store_schema(directory, schema)
    for protocol in range(5):
        (directory.parent / f"schema-{protocol}.pickle").write_bytes(pickle.dumps(schema, protocol))


def store_schema(directory, schema):
    """Does what petastorm does after Spark has written, without Spark."""
    dataset = pq.ParquetDataset(str(directory), validate_schema=False)
    dataset_metadata._generate_unischema_metadata(dataset, schema)
    files = directory.glob("*.parquet")
    counts = json.dumps({file.name: pq.read_metadata(file).num_row_groups for file in files})
    key = dataset_metadata.ROW_GROUPS_PER_FILE_KEY
    utils.add_to_dataset_metadata(dataset, key, counts.encode())


def write_plain(directory):
    """Parquet as other programs write it: no codec, no schema of petastorm."""
    random = np.random.default_rng(4)
    directory.mkdir(parents=True)
    for file in range(FILES):
        ids = np.arange(20) + 20 * file
        columns = {
            "id": pa.array(ids),
            "f": pa.array(random.random(20).astype(np.float32)),
            "g": pa.array(random.random(20)),
            "flag": pa.array(ids % 2 == 0),
            "text": pa.array([f"täxt {each}" for each in ids]),
            "raw": pa.array([bytes([each]) for each in ids]),
            "nulls": pa.array([None if each % 3 else each for each in ids.tolist()], pa.int32()),
            "price": pa.array([Decimal(int(each)) for each in ids], pa.decimal128(9, 2)),
            "day": pa.array([dt.date(2020, 1, 1 + int(each) % 28) for each in ids]),
            "moment": pa.array(ids * 1_000_001, pa.timestamp("us")),
            "vector": pa.array(
                random.random((20, 4)).astype(np.float32).tolist(), pa.list_(pa.float32())
            ),
            "byte": pa.array(ids.astype(np.int8)),
        }
        pq.write_table(pa.table(columns), directory / f"part-{file}.parquet", row_group_size=7)


def write_partitioned(directory):
    for year in (2020, 2021):
        for code in ("a", "b"):
            part = directory / f"year={year}" / f"code={code}"
            part.mkdir(parents=True)
            pq.write_table(pa.table({"id": pa.array(range(year, year + 5))}), part / "x.parquet")


if __name__ == "__main__":
    base = Path(sys.argv[1])
    write_every_codec(base / "codecs")
    write_plain(base / "plain")
    write_partitioned(base / "partitioned")

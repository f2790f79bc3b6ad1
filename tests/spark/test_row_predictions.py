# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions of one row in Horovod's manner: rows are those of a DataFrame, and predictions those of
batches.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import sys

import cloudpickle
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.param import Param, Params
from pyspark.sql import types

from farandole.spark.common.model.spark_rows import spark_rows
from farandole.spark.lightning import TorchModel

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

INNER = types.StructType(
    [types.StructField("v", VectorUDT()), types.StructField("b", types.BinaryType())]
)
MOMENT = dt.datetime(2024, 3, 31, 3, 30, 1, 5)  # noqa: DTZ001 - as Spark has it
VALUES = {
    "number": (types.LongType(), 3),
    "real": (types.FloatType(), 0.5),
    "flag": (types.BooleanType(), True),
    "text": (types.StringType(), "a"),
    "bytes": (types.BinaryType(), bytearray(b"\x00\xff")),
    "day": (types.DateType(), dt.date(2024, 2, 29)),
    "moment": (types.TimestampType(), MOMENT),
    "local": (types.TimestampNTZType(), MOMENT),
    "decimal": (types.DecimalType(5, 2), decimal.Decimal("1.25")),
    "list": (types.ArrayType(types.BinaryType()), [bytearray(b"a"), None]),
    "map": (types.MapType(types.StringType(), types.LongType()), {"k": 1}),
    "dense": (VectorUDT(), Vectors.dense([1.0, 2.0])),
    "sparse": (VectorUDT(), Vectors.sparse(3, {1: 2.0})),
    "inner": (INNER, (Vectors.dense([1.0]), bytearray(b"c"))),
    "a.b": (types.LongType(), 4),
}


def test_rows_of_batches_are_those_of_the_frame(spark):
    fields = [types.StructField(name, kind) for name, (kind, _) in VALUES.items()]
    full = tuple(value for _, value in VALUES.values())
    frame = spark.createDataFrame([full, (None,) * len(full)], types.StructType(fields))
    schema = frame.schema

    def describe(batches):
        for batch in batches:
            texts = [repr(row) for row in spark_rows(batch, schema)]
            yield pa.RecordBatch.from_pydict({"row": pa.array(texts, pa.string())})

    numbered = frame.toDF(*(f"column{place}" for place in range(len(fields))))
    found = [row.row for row in numbered.mapInArrow(describe, "row string").collect()]
    assert "bytearray(b" in found[0]
    # Spark 4 has `bytes` in rows, older versions a `bytearray`.
    without_kind = [re.sub(r"bytearray\((b'[^']*')\)", r"\1", text) for text in found]
    expected = [re.sub(r"bytearray\((b'[^']*')\)", r"\1", repr(row)) for row in frame.collect()]
    assert without_kind == expected


class Tokenizer:
    """A value that JSON cannot hold."""

    def __init__(self, factor):
        self.factor = factor

    def length(self, text):
        return float(len(text)) * self.factor


class RowModel(TorchModel):
    """Predicts from a text and a vector, one row after the other."""

    tokenizer = Param(Params._dummy(), "tokenizer", "makes a number of a text")
    limit = Param(Params._dummy(), "limit", "of texts")

    def __init__(self, **given):
        super().__init__()
        self._setDefault(tokenizer=Tokenizer(0.0), limit=7, outputCols=["output"])
        self._set(**given)

    def get_prediction_fn(self):
        tokenizer = self.getOrDefault("tokenizer")

        def predict(model, row):
            return model(
                torch.tensor(
                    [[tokenizer.length(row["text"]), *row["x"].toArray()]], dtype=torch.float32
                )
            )

        return predict


class BatchModel(TorchModel):
    """The default."""


def test_a_function_of_rows_predicts_as_one_of_batches(spark, tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    rows = [
        ("a" * one, float(one), Vectors.dense([one, 2.0 * one]), one % 2) for one in range(1, 7)
    ]
    frame = spark.createDataFrame(rows, ["text", "size", "x", "y"])
    common = {"model": module, "label_columns": ["y"]}
    own = RowModel(feature_columns=["text", "x"], tokenizer=Tokenizer(1.0), limit=9, **common)
    usual = BatchModel(feature_columns=[["size", "x"]], **common)
    expected = [row["y__output"].toArray() for row in usual.transform(frame).collect()]
    own.write().save(str(tmp_path / "model"))
    loaded = RowModel.load(str(tmp_path / "model"))
    assert loaded.getOrDefault("tokenizer").factor == 1.0
    assert loaded.getOrDefault("limit") == 9
    for model in (own, loaded):
        found = model.transform(frame, {model.outputCols: ["z"]})
        assert found.columns == ["text", "size", "x", "y", "z"]
        for row, values in zip(found.collect(), expected, strict=True):
            assert row["z"].toArray() == pytest.approx(values, rel=1e-6)

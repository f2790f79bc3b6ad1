# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns of Spark ML vectors, dense and sparse: `frame_loader` gives what `toArray` gives, or
refuses the column by name.
"""

import subprocess
import sys

import numpy as np
import pytest
from pyspark.ml.linalg import DenseMatrix, Vectors
from pyspark.mllib.linalg import Vectors as OldVectors

from farandole.data import Pad, frame_loader
from farandole.spark.common.model.arrow_arrays import column_to_array

DENSE, SPARSE = Vectors.dense([0.0, 1.5, -2.0]), Vectors.sparse(3, {2: 4.0, 0: -0.5})
EMPTY = Vectors.sparse(3, [])
ROWS = {
    "dense": [DENSE, DENSE],
    "sparse": [SPARSE, EMPTY],
    "mixed": [SPARSE, DENSE, EMPTY, DENSE, SPARSE],
    "old": [OldVectors.fromML(SPARSE), OldVectors.fromML(DENSE)],
}


def vector_frame(spark, vectors):
    return spark.createDataFrame(list(enumerate(vectors)), ["row", "wide.vector"])


def read_vectors(loader):
    (batch,) = loader
    return batch["wide.vector"][np.argsort(batch["row"])]


@pytest.mark.parametrize(
    ("kind", "columns", "from_files"),
    [
        ("dense", None, False),
        ("sparse", ["wide.vector", "row"], True),
        ("mixed", ["wide.vector", "row"], False),
        ("mixed", None, True),
        ("old", ["row", "wide.vector"], False),
    ],
)
def test_vectors_are_rows_of_float64(spark, tmp_path, kind, columns, from_files):
    frame = source = vector_frame(spark, ROWS[kind])
    if from_files:
        source = str(tmp_path / "rows")
        frame.coalesce(1).write.parquet(source)
    read = read_vectors(frame_loader(source, 99, columns, shuffle=False))
    assert read.dtype == np.float64
    assert read.tolist() == [vector.toArray().tolist() for vector in ROWS[kind]]
    column = frame.coalesce(1).toArrow().column("wide.vector").combine_chunks()
    assert column_to_array(column, "wide.vector").tolist() == read.tolist()


def test_vectors_of_different_lengths_are_padded_or_refused_by_name(spark):
    frame = vector_frame(spark, [DENSE, Vectors.sparse(2, {1: 7.0})])
    with pytest.raises(ValueError, match=r"wide\.vector"):
        list(frame_loader(frame, 9, ["wide.vector"]))
    read = read_vectors(frame_loader(frame, 9, ragged={"wide.vector": Pad()}))
    assert read.tolist() == [[0.0, 1.5, -2.0], [0.0, 7.0, 0.0]]


def test_a_missing_vector_and_missing_elements(spark):
    frame = spark.createDataFrame([(0, DENSE), (1, None)], ["row", "wide.vector"])
    with pytest.raises(ValueError, match=r"wide\.vector"):
        list(frame_loader(frame, 9, ["wide.vector"]))
    holes = vector_frame(spark, [Vectors.dense([1.0, float("nan")]), Vectors.sparse(2, {0: 3.0})])
    with pytest.raises(ValueError, match=r"wide\.vector"):
        list(frame_loader(holes, 9, ["wide.vector"]))
    assert read_vectors(frame_loader(holes, 9, fill={"wide.vector": 7})).tolist() == [
        [1.0, 7.0],
        [3.0, 0.0],
    ]


@pytest.mark.parametrize("value", [DenseMatrix(1, 2, [1.0, 2.0]), [DENSE]])
def test_other_user_defined_types_are_refused_by_name(spark, caplog, value):
    frame = vector_frame(spark, [value])
    with pytest.raises(ValueError, match=r"column 'wide\.vector' .* has type .*no tensor"):
        frame_loader(frame, 9, ["row", "wide.vector"])
    (batch,) = frame_loader(frame, 9)
    assert list(batch) == ["row"]
    assert "wide.vector" in caplog.text


CONNECTED = """
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from farandole.data import frame_loader

spark = SparkSession.builder.remote("local[1]").getOrCreate()
rows = [(Vectors.sparse(3, {2: 4.0}),), (Vectors.dense([1.0, 2.0, 3.0]),)]
frame = spark.createDataFrame(rows, ["v"]).coalesce(1)
(batch,) = frame_loader(frame, 9, ["v"], shuffle=False)
print(batch["v"].tolist())
spark.stop()
"""


@pytest.mark.slow
def test_vectors_of_spark_connect():
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED], capture_output=True, text=True, timeout=240, check=False
    )
    assert "[[0.0, 0.0, 4.0], [1.0, 2.0, 3.0]]" in done.stdout, done.stderr[-3000:]

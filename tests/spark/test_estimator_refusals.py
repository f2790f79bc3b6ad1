# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A wrong parameter raises one sentence that names it, before a worker starts."""

from __future__ import annotations

import os
import threading
import traceback

import pytest
import torch
from pyspark.ml.linalg import Vectors

from farandole.spark.common import LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.job import TorchUserObjects
from farandole.spark.torch.saving import state_bytes

pytestmark = pytest.mark.timeout(60, func_only=True)


class NeverRun(SparkBackend):
    """A backend whose workers must not be needed."""

    def __init__(self, num_proc=2):
        super().__init__(num_proc)

    def run(self, *_, **__):
        raise AssertionError("workers were started")


def estimator(store, **params):
    model = torch.nn.Linear(2, 2)
    known = {
        "backend": NeverRun(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.CrossEntropyLoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "verbose": 0,
        "store": LocalStore(str(store)),
    }
    return TorchEstimator(**known | params)


@pytest.fixture(scope="module")
def good(spark):
    return spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0]), index % 2, "t") for index in range(20)], ["x", "y", "s"]
    )


def refused(fitting, kind=ValueError):
    with pytest.raises(kind) as raised:
        fitting()
    text = "".join(traceback.format_exception(raised.value))
    assert "org.apache.spark" not in text
    return str(raised.value)


def test_a_missing_column_is_named_with_what_there_is(good, tmp_path):
    told = refused(lambda: estimator(tmp_path, feature_cols=["xs"]).fit(good))
    assert told == "feature column 'xs' is not in the DataFrame, did you mean 'x'? columns: x, y, s"
    assert "label column 'label'" in refused(
        lambda: estimator(tmp_path, label_cols=["label"]).fit(good)
    )
    assert "sample weight column 'w'" in refused(
        lambda: estimator(tmp_path, sample_weight_col="w").fit(good)
    )
    assert "validation column 'v'" in refused(lambda: estimator(tmp_path, validation="v").fit(good))


def test_a_column_in_other_letters_is_recognised(good, tmp_path):
    told = refused(lambda: estimator(tmp_path, feature_cols=["X"]).fit(good))
    assert told == "feature column 'X' is not in the DataFrame, did you mean 'x'? columns: x, y, s"


def test_a_stream_is_refused_before_spark_looks_at_it(spark, tmp_path):
    stream = (
        spark.readStream.format("rate").load().selectExpr("cast(value as double) as x", "1 as y")
    )
    assert "fit does not take a streaming DataFrame" in refused(
        lambda: estimator(tmp_path).fit(stream)
    )


def test_an_error_names_the_variable_that_cannot_be_pickled(spark, good, tmp_path):
    told = refused(
        lambda: estimator(tmp_path, loss=lambda output, _: (spark, output.sum())[1]).fit(good),
        TypeError,
    )
    wanted = (
        "cannot be pickled for the training processes: loss[0]: variable 'spark' of <lambda>._sc: "
        "[CONTEXT_ONLY"
    )
    assert told.startswith(wanted)


def test_an_error_names_the_part_of_a_model_that_cannot_be_pickled():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    for objects, guilty in (
        (
            TorchUserObjects(model, None, [], False, [], None),
            "model._modules['0'].lock: cannot pickle",
        ),
        (
            TorchUserObjects(None, None, [], False, [[model[0].lock.acquire]], None),
            "metrics[0][0]: cannot pickle",
        ),
    ):
        told = refused(lambda objects=objects: state_bytes.pickle_job_objects(objects), TypeError)
        assert told.startswith(f"cannot be pickled for the training processes: {guilty}")


def test_a_column_of_a_type_that_no_tensor_holds_is_named_with_its_type(good, tmp_path):
    told = refused(lambda: estimator(tmp_path, feature_cols=["x", "s"]).fit(good))
    assert told.startswith("feature column 's' has type string, which no tensor can hold")


def test_a_null_in_a_feature_is_said_with_its_column(spark, tmp_path):
    frame = spark.createDataFrame([(1.0, 1), (None, 0)], "x double, y int")
    assert refused(lambda: estimator(tmp_path).fit(frame)).startswith("column x has nulls in 1 of ")


def test_an_infinite_feature_or_label_is_said_with_its_column(spark, tmp_path):
    for rows in ([(1.0, 1.0), (float("inf"), 0.0)], [(1.0, 1.0), (2.0, float("-inf"))]):
        frame = spark.createDataFrame(rows, "x double, y double").repartition(1)
        told = refused(lambda frame=frame: estimator(tmp_path).fit(frame))
        name = "x" if rows[1][0] == float("inf") else "y"
        assert told.startswith(f"column {name} has infinite values in 1 of 2 rows")
        assert "allow_nan" in told


def test_ragged_vectors_are_said_with_their_column(spark, tmp_path):
    for values in ([Vectors.dense([1.0]), Vectors.dense([1.0, 2.0])], [[1.0], [1.0, 2.0]]):
        frame = spark.createDataFrame([(value, 0) for value in values], ["x", "y"])
        for partitions in (1, 2):
            told = refused(
                lambda frame=frame, n=partitions: estimator(tmp_path).fit(frame.repartition(n))
            )
            assert "x" in told
            assert "length" in told


def test_an_empty_data_frame_is_said(good, tmp_path):
    assert "no rows" in refused(lambda: estimator(tmp_path).fit(good.limit(0)))


def test_a_share_that_is_small_for_the_rows_still_gives_one_for_validation(good, tmp_path):
    with pytest.raises(AssertionError, match="workers were started"):
        estimator(tmp_path, validation=0.0001).fit(good)
    assert [
        path for path in tmp_path.rglob("*.parquet") if "val" in str(path.relative_to(tmp_path))
    ]


def test_more_processes_than_slots_are_refused_with_both_numbers(good, tmp_path):
    told = refused(lambda: estimator(tmp_path, backend=NeverRun(3)).fit(good))
    assert "3" in told
    assert "2" in told
    assert os.listdir(tmp_path) == []


def test_arguments_that_run_does_not_know_are_refused_before_data_is_written(good, tmp_path):
    with pytest.raises(
        TypeError, match=r"takes what farandole\.spark\.run takes, but not stdou: .*stdout"
    ):
        SparkBackend(2, stdou=None)
    for wrong, told in (
        ({"stdout": "log.txt"}, "stdout must be a stream"),
        ({"start_timeout": -1}, "start_timeout must"),
    ):
        fitting = estimator(tmp_path, backend=SparkBackend(2, **wrong))
        assert told in refused(lambda fitting=fitting: fitting.fit(good), (TypeError, ValueError))
    assert os.listdir(tmp_path) == []


def test_a_store_that_cannot_be_written_is_refused_with_its_path(good, tmp_path):
    (tmp_path / "file").write_text("")
    told = refused(lambda: estimator(tmp_path / "file" / "store").fit(good), OSError)
    assert f"{tmp_path}/file/store" in told


def test_a_model_of_another_width_is_refused_with_the_shapes(spark, tmp_path):
    frame = spark.createDataFrame([(Vectors.dense([1.0, 2.0, 3.0]), 0)] * 4, ["x", "y"])
    told = refused(lambda: estimator(tmp_path).fit(frame))
    assert told.startswith("the model does not take its 1 feature columns as (x (2, 3))")


def test_a_shape_of_another_size_is_refused_with_both(good, tmp_path):
    told = refused(lambda: estimator(tmp_path, input_shapes=[[-1, 3]]).fit(good))
    assert told == "feature column 'x' with size 2 does not fit shape [-1, 3]"

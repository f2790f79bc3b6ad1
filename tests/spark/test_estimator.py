# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The main job: a DataFrame of scanned digits, trained on two processes, transformed, saved and
loaded.
"""

from __future__ import annotations

import logging
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as sf
from sklearn.datasets import load_digits

from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


@pytest.fixture(scope="module")
def digits(spark):
    """Train and test."""
    data = load_digits()
    rows = [
        (Vectors.dense(image / 16), int(label))
        for image, label in zip(data.data, data.target, strict=True)
    ]
    return spark.createDataFrame(rows, ["features", "label"]).randomSplit([0.8, 0.2], seed=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def fitted(digits, home):
    model = network()
    return TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.001),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[accuracy],
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.1,
        epochs=15,
        random_seed=1,
        verbose=0,
        run_id="digits",
        store=LocalStore(str(home)),
    ).fit(digits[0])


def test_unseen_digits_are_recognised(fitted, digits):
    scored = fitted.transform(digits[1]).select(
        "label", vector_to_array("label__output").alias("scores")
    )
    right = (sf.expr("array_position(scores, array_max(scores)) - 1") == sf.col("label")).cast(
        "int"
    )
    assert scored.select(sf.avg(right)).first()[0] >= 0.95


def test_the_history_tells_of_every_epoch(fitted, digits):
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == list(range(15))
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] / 4
    assert history[-1]["validation"]["all_metrics"][0]["accuracy"] > 0.9
    rows = history[0]["rows"]
    assert 0.8 * digits[0].count() < rows < digits[0].count()
    frame = fitted.history_frame()
    assert list(frame.columns)[:5] == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy"]


def test_the_run_leaves_data_checkpoint_and_logs_at_the_paths_it_names(fitted, home):
    paths = fitted.getPaths()
    assert set(paths) == {"training data", "validation data", "checkpoint", "logs"}
    store = LocalStore(str(home))
    assert all(store.exists(path) for path in paths.values())
    assert paths["checkpoint"] == f"file://{home}/runs/digits/checkpoint"


def test_transform_keeps_every_column_and_adds_vectors(fitted, digits):
    test = digits[1].withColumn("name", sf.concat(sf.lit("digit "), sf.col("label").cast("string")))
    transformed = fitted.transform(test)
    assert transformed.columns == ["features", "label", "name", "label__output"]
    assert transformed.schema["features"].dataType == VectorUDT()
    assert transformed.schema["label__output"].dataType == VectorUDT()
    assert transformed.drop("label__output").collect() == test.collect()


def test_transform_gives_what_the_module_gives(fitted, digits):
    rows = fitted.setBatchSize(7).transform(digits[1].limit(50)).collect()
    fitted.setBatchSize(4096)
    inputs = torch.tensor(np.array([row.features.toArray() for row in rows]), dtype=torch.float32)
    with torch.no_grad():
        expected = fitted.getModel().eval()(inputs).numpy()
    found = np.array([row.label__output.toArray() for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_saved_model_predicts_the_same_when_loaded(fitted, digits, tmp_path, caplog):
    expected = fitted.transform(digits[1]).select("label__output").collect()
    path = f"file://{tmp_path}/model"
    fitted.write().overwrite().save(path)
    fitted.write().overwrite().save(path)
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = TorchModel.load(path)
    assert "runs the code pickled in it" in caplog.text
    assert loaded.transform(digits[1]).select("label__output").collect() == expected
    assert loaded.uid == fitted.uid
    assert loaded.getHistory() == fitted.getHistory()
    assert loaded.getPaths() == fitted.getPaths()
    optimizer = loaded.getOptimizer()
    assert optimizer.param_groups[0]["params"][0] is next(loaded.getModel().parameters())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_weights_load_into_a_module_of_ones_own_without_running_code(
    fitted, digits, tmp_path, caplog
):
    fitted.write().save(f"{tmp_path}/model")
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = TorchModel.read().model(network()).load(f"{tmp_path}/model")
    assert not caplog.text
    expected = fitted.transform(digits[1]).select("label__output").collect()
    assert loaded.transform(digits[1]).select("label__output").collect() == expected


def test_an_existing_output_column_is_not_overwritten(fitted, digits):
    with pytest.raises(ValueError, match="already has an output column: label__output"):
        fitted.transform(digits[1].withColumn("label__output", sf.lit(1)))


def test_a_model_made_by_hand_finds_out_what_it_returns(spark):
    frame = spark.createDataFrame([(1.0, 2.0, 1), (3.0, 4.0, 0)], "a double, b float, label int")
    by_hand = TorchModel(model=Sum(), feature_columns=["a", "b"], label_columns=["label"])
    transformed = by_hand.transform(frame)
    assert transformed.schema["label__output"].dataType.simpleString() == "int"
    assert [row.label__output for row in transformed.collect()] == [3, 7]


def test_names_with_dots_and_names_twice_pass_through_transform(spark):
    frame = spark.createDataFrame([(1.0, 2.0, 3, 4)], ["a.b", "c`d", "twice", "twice"])
    by_hand = TorchModel(model=Sum(), feature_columns=["a.b", "c`d"], label_columns=["y"])
    transformed = by_hand.transform(frame)
    assert transformed.columns == ["a.b", "c`d", "twice", "twice", "y__output"]
    assert tuple(transformed.first()) == (1.0, 2.0, 3, 4, 3.0)


def test_nulls_in_transform_are_said_with_their_column(spark):
    frame = spark.createDataFrame([(1.0, None)], "a double, b double")
    by_hand = TorchModel(model=Sum(), feature_columns=["a", "b"], label_columns=["label"])
    with pytest.raises(Exception, match="column 'b' has nulls: 1 of 1 rows"):
        by_hand.transform(frame).collect()


def test_a_fill_for_all_columns_leaves_those_alone_that_cannot_hold_it_in_transform_as_in_fit(
    spark,
):
    frame = spark.createDataFrame([(1.0, 2, None), (None, 3, 1.0)], "a double, b int, c float")
    by_hand = TorchModel(
        model=Sum(), feature_columns=["a", "b", "c"], label_columns=["label"]
    ).setFill({"*": 0.5})
    assert [row.label__output for row in by_hand.transform(frame).collect()] == [3.5, 4.5]
    frame = spark.createDataFrame([(1.0, None)], "a double, b int")
    by_hand = TorchModel(model=Sum(), feature_columns=["a", "b"], label_columns=["label"]).setFill(
        {"b": 0.5}
    )
    with pytest.raises(
        Exception, match=r"column 'b' is int32, which cannot hold the value of fill: 0\.5"
    ):
        by_hand.transform(frame).collect()


def test_it_is_a_stage_of_a_pipeline_with_parameters_per_fit(spark, tmp_path):
    frame = spark.range(64).select((sf.col("id") / 64).alias("a"), sf.rand(1).alias("b"))
    frame = frame.withColumn("y", 2 * sf.col("a") - sf.col("b"))
    model = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        num_proc=1,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=1,
        verbose=0,
        store=LocalStore(str(tmp_path)),
    )
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    fitted = pipeline.fit(frame, {estimator.epochs: 2})
    assert len(fitted.stages[1].getHistory()) == 2
    assert fitted.transform(frame).schema["y__output"].dataType.simpleString() == "double"


class Sum(torch.nn.Module):
    """Adds its inputs."""

    def forward(self, *inputs):
        return torch.cat(inputs, dim=1).sum(dim=1, keepdim=True)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras models that transform DataFrames, and what is saved of models and estimators."""

from __future__ import annotations

import logging
import sys

import cloudpickle
import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import functions as sf

from farandole.spark.common import Backend, LocalStore
from farandole.spark.keras import KerasEstimator, KerasModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests


class Summed(keras.layers.Layer):
    """Adds up its inputs; a class that executors do not have."""

    def call(self, inputs):
        return keras.ops.sum(keras.ops.concatenate(inputs, axis=1), axis=1, keepdims=True)


class Scaled(keras.Model):
    """Has a weight of its own besides those of its layer."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.scale = self.add_weight(shape=(2,))

    def call(self, inputs):
        return self.dense(inputs) * self.scale


def adder(count):
    inputs = [keras.Input((1,)) for _ in range(count)]
    return keras.Model(inputs, Summed()(inputs))


@pytest.fixture(scope="module")
def frame(spark):
    rows = [
        (Vectors.dense([index / 10, 1.0]), [1.0, index / 10], index % 3, float(index), "t")
        for index in range(40)
    ]
    return spark.createDataFrame(rows, ["v", "l", "n", "d", "s"])


@pytest.fixture(scope="module")
def by_hand():
    left, right = keras.Input((2,)), keras.Input((2,))
    joined = keras.layers.Concatenate()([left, right])
    model = keras.Model(
        [left, right], [keras.layers.Dense(1)(joined), keras.layers.Dense(3)(joined)]
    )
    return KerasModel(model=model, feature_columns=["v", ["n", "d"]], label_columns=["n", "v"])


@pytest.mark.backends
def test_predictions_are_appended_in_the_types_of_their_labels(by_hand, frame):
    transformed = by_hand.transform(frame)
    assert transformed.columns == ["v", "l", "n", "d", "s", "n__output", "v__output"]
    assert transformed.schema["n__output"].dataType.simpleString() == "bigint"
    assert transformed.schema["v__output"].dataType == VectorUDT()
    rows = by_hand.setBatchSize(7).transform(frame).collect()
    by_hand.setBatchSize(4096)
    v = np.array([row.v.toArray() for row in rows], np.float32)
    numbers = np.array([[row.n, row.d] for row in rows], np.float32)
    first, second = (keras.ops.convert_to_numpy(one) for one in by_hand.getModel()([v, numbers]))
    assert [row.n__output for row in rows] == np.rint(first[:, 0]).astype(int).tolist()
    np.testing.assert_allclose(
        [row.v__output.toArray() for row in rows], second, rtol=1e-5, atol=1e-5
    )


def test_a_model_is_explained_in_words(by_hand):
    told = by_hand.explain().splitlines()
    assert told[:3] == ["KerasModel", "inputs", "  v"]
    assert told[-1] == "  20 parameters, 80 B"
    rows = [line.split() for line in told if "Dense" in line]
    assert [[row[1], *row[2:]] for row in rows] == [
        ["Dense", "[rows,", "1]", "5"],
        ["Dense", "[rows,", "3]", "15"],
    ]
    inner = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(2, name="inner"), keras.layers.Dense(1)]
    )
    inner.layers[0].trainable = False
    outer = keras.Sequential([keras.Input((2,)), inner])
    told = KerasModel(model=outer, feature_columns=["v"], label_columns=["n"]).explain()
    assert f"{inner.name}.inner" in told
    assert told.splitlines()[-1] == "  9 parameters, 6 of them frozen, 36 B"
    told = KerasModel(model=Scaled(), feature_columns=["v"], label_columns=["n"])
    told.getModel()(np.ones((1, 2), np.float32))
    assert told.explain().splitlines()[-1] == f"  {told.getModel().count_params()} parameters, 32 B"


def test_a_saved_model_predicts_the_same_and_its_classes_are_named(frame, tmp_path, caplog):
    model = KerasModel(
        model=adder(2),
        feature_columns=["n", "d"],
        label_columns=["y"],
        history={"loss": [1.0, 0.5]},
        run_id="r",
    )
    expected = [row.y__output for row in model.transform(frame).collect()]
    assert expected == [row.n + row.d for row in frame.collect()]
    path = f"file://{tmp_path}/model"
    model.write().save(path)
    model.write().overwrite().save(path)
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = KerasModel.load(path)
    assert "runs the code pickled in it" in caplog.text
    assert (loaded.uid, loaded.getHistory(), loaded.getRunId()) == (
        model.uid,
        model.getHistory(),
        "r",
    )
    assert [row.y__output for row in loaded.transform(frame).collect()] == expected
    caplog.clear()
    with caplog.at_level(logging.WARNING, "farandole"):
        mine = KerasModel.read().custom_objects({"Summed": Summed}).load(path)
    assert not caplog.text
    assert type(mine.getModel().layers[-1]) is Summed


def test_a_saved_model_of_keras_own_parts_runs_no_code(by_hand, tmp_path, caplog):
    by_hand.write().save(f"{tmp_path}/model")
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = KerasModel.load(f"{tmp_path}/model")
    assert not caplog.text
    assert loaded.getFeatureColumns() == ["v", ["n", "d"]]


def test_a_lambda_in_a_saved_model_is_refused_unless_asked_for(frame, tmp_path):
    inputs = keras.Input((1,))
    model = KerasModel(
        model=keras.Model(inputs, keras.layers.Lambda(lambda x: x * 2, output_shape=(1,))(inputs)),
        feature_columns=["d"],
        label_columns=["d"],
    )
    expected = model.transform(frame).select("d__output").collect()
    model.write().save(f"{tmp_path}/model")
    with pytest.raises(ValueError, match=r"KerasModel.read\(\).safe_mode\(False\).load"):
        KerasModel.load(f"{tmp_path}/model")
    loaded = KerasModel.read().safe_mode(False).load(f"{tmp_path}/model")
    assert loaded.transform(frame).select("d__output").collect() == expected


class Here(Backend):
    """Trains in this process."""

    def run(self, fn, args=(), kwargs=None, env=None):  # noqa: ARG002
        return [fn(*args)]

    def num_processes(self):
        return 1


def estimator(directory, **params):
    known = {
        "num_proc": 2,
        "model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        "optimizer": "sgd",
        "loss": "mse",
        "feature_cols": ["v"],
        "label_cols": ["d"],
        "random_seed": 1,
        "verbose": 0,
        "store": LocalStore(str(directory)),
    }
    return KerasEstimator(
        **{name: value for name, value in (known | params).items() if value is not None}
    )


def test_a_saved_estimator_is_the_same_when_loaded(spark, tmp_path, caplog):
    callbacks = [keras.callbacks.EarlyStopping(patience=7)]
    saved = estimator(
        tmp_path, epochs=5, callbacks=callbacks, loss=keras.losses.Huber(0.5), metrics=["mae"]
    )
    saved.write().overwrite().save(f"{tmp_path}/estimator")
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = KerasEstimator.load(f"{tmp_path}/estimator")
    assert "runs the code pickled in it" in caplog.text
    assert (loaded.getEpochs(), loaded.getMetrics(), loaded.getFeatureCols()) == (5, ["mae"], ["v"])
    assert float(loaded.getLoss()(np.zeros(1), np.full(1, 3.0))) == pytest.approx(0.5 * (3 - 0.25))
    assert loaded.getCallbacks()[0].patience == 7
    assert loaded.getStore().plain() == saved.getStore().plain()
    np.testing.assert_array_equal(
        loaded.getModel().get_weights()[0], saved.getModel().get_weights()[0]
    )


@pytest.mark.backends
def test_a_loaded_model_compares_rows_with_those_of_the_training(frame, tmp_path):
    rows = frame.select("v", "d")
    model = estimator(
        tmp_path / "store", epochs=1, num_proc=None, backend=Here(), statistics=True
    ).fit(rows)
    model.write().save(f"{tmp_path}/model")
    loaded = KerasModel.load(f"{tmp_path}/model")
    assert loaded.getStatistics() == model.getStatistics()
    assert set(loaded.getStatistics().columns) == {"v", "d"}
    assert loaded.drift(rows)["d"].index == 0.0
    assert loaded.drift(rows.selectExpr("v", "d + 100 as d"))["d"].index > 1
    plain = estimator(tmp_path / "store", epochs=1, num_proc=None, backend=Here()).fit(
        frame.select("v", "d", "s")
    )
    assert plain.getStatistics() is None


def test_two_tasks_fit_a_stage_of_a_pipeline_that_is_saved_and_loaded(frame, tmp_path):
    pipeline = Pipeline(stages=[estimator(tmp_path / "store", epochs=1, metrics=["mae"])])
    fitted = pipeline.fit(frame, {pipeline.getStages()[0].epochs: 3})
    history = fitted.stages[0].getHistory()
    assert list(history) == ["loss", "mae"]
    assert len(history["loss"]) == 3
    assert history["loss"][2] < history["loss"][0]
    transformed = fitted.transform(frame)
    assert transformed.schema["d__output"].dataType.simpleString() == "double"
    error = RegressionEvaluator(labelCol="d", predictionCol="d__output", metricName="mse").evaluate(
        transformed
    )
    assert error < history["loss"][0]
    fitted.write().overwrite().save(f"{tmp_path}/pipeline")
    loaded = PipelineModel.load(f"{tmp_path}/pipeline")
    assert (
        loaded.transform(frame).select("d__output").collect()
        == transformed.select("d__output").collect()
    )


def test_a_cross_validator_chooses_among_epochs(frame, tmp_path):
    fitted_by = estimator(tmp_path, batch_size=8, num_proc=None, backend=Here())
    grid = ParamGridBuilder().addGrid(fitted_by.epochs, [1, 6]).build()
    score = RegressionEvaluator(labelCol="d", predictionCol="d__output")
    validator = CrossValidator(
        estimator=fitted_by, estimatorParamMaps=grid, evaluator=score, numFolds=2, seed=1
    )
    chosen = validator.fit(frame)
    assert chosen.avgMetrics[1] < chosen.avgMetrics[0]
    assert len(chosen.bestModel.getHistory()["loss"]) == 6
    chosen.write().overwrite().save(f"{tmp_path}/chosen")
    again = CrossValidatorModel.load(f"{tmp_path}/chosen")
    expected = chosen.transform(frame).select("d__output").collect()
    assert again.transform(frame).select("d__output").collect() == expected


def test_nulls_are_filled_as_in_the_fit(frame):
    model = KerasModel(
        model=adder(2), feature_columns=["n", "d"], label_columns=["y"], fill={"d": 7.0}
    )
    holed = frame.withColumn("d", sf.when(sf.col("n") == 1, None).otherwise(sf.col("d")))
    found = model.transform(holed).collect()
    assert [row.y__output for row in found] == [
        row.n + (7.0 if row.d is None else row.d) for row in found
    ]


def test_an_error_names_the_column_that_cannot_be_transformed(by_hand, frame):
    with pytest.raises(ValueError, match="already has an output column: n__output"):
        by_hand.transform(frame.withColumn("n__output", sf.lit(1)))
    with pytest.raises(ValueError, match="feature column 'v' is not in the DataFrame"):
        by_hand.transform(frame.drop("v"))
    with pytest.raises(ValueError, match="feature column 's' has type string"):
        KerasModel(model=adder(1), feature_columns=["s"], label_columns=["y"]).transform(frame)
    wrong = KerasModel(model=adder(1), feature_columns=["l"], label_columns=["y"])
    with pytest.raises(
        Exception,
        match="Feature column 'l' with size 2 must equal that of the model input at index 0",
    ):
        wrong.transform(frame).collect()

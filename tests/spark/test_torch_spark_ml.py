# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The torch estimator among Spark ML's own tools: tuning, pipelines, saving and loading."""

from __future__ import annotations

import itertools
import logging
import sys

import cloudpickle
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
)
from pyspark.sql import functions as sf
from tests.single.training import Here

from farandole.spark.common import LocalBackend, LocalStore, ObjectStore, SparkBackend
from farandole.spark.common.saving import store_backend
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.timeout(600)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests


@pytest.fixture(scope="module")
def frame(spark):
    frame = spark.range(96).select((sf.col("id") / 96).alias("a"), sf.rand(1).alias("b"))
    return frame.withColumn("y", 2 * sf.col("a") - sf.col("b")).cache()


def estimator(home, **params):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    known = {
        "backend": Here(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2),
        "loss": torch.nn.MSELoss(),
        "feature_cols": [["a", "b"]],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 1,
        "verbose": 0,
        "random_seed": 3,
        "store": LocalStore(str(home)),
    }
    return TorchEstimator(**known | params)


@pytest.mark.slow
def test_a_cross_validator_chooses_among_epochs_and_is_saved(frame, tmp_path):
    fitted_by = estimator(tmp_path)
    grid = ParamGridBuilder().addGrid(fitted_by.epochs, [1, 8]).build()
    score = RegressionEvaluator(labelCol="y", predictionCol="y__output")
    validator = CrossValidator(
        estimator=fitted_by, estimatorParamMaps=grid, evaluator=score, numFolds=2, seed=1
    )
    chosen = validator.fit(frame)
    assert chosen.avgMetrics[1] < chosen.avgMetrics[0]
    assert len(chosen.bestModel.getHistory()) == 8
    chosen.write().overwrite().save(f"{tmp_path}/chosen")
    again = CrossValidatorModel.load(f"{tmp_path}/chosen")
    expected = chosen.transform(frame).select("y__output").collect()
    assert again.transform(frame).select("y__output").collect() == expected


@pytest.mark.slow
def test_folds_and_grid_points_of_a_named_run_are_runs_of_their_own(frame, tmp_path):
    fitted_by = estimator(tmp_path, run_id="r", epochs=2)
    grid = (
        ParamGridBuilder()
        .addGrid(fitted_by.batch_size, [16, 48])
        .addGrid(fitted_by.epochs, [4, 1])
        .build()
    )
    score = RegressionEvaluator(labelCol="y", predictionCol="y__output")

    def validated(stage):
        validator = CrossValidator(
            estimator=stage,
            estimatorParamMaps=grid,
            evaluator=score,
            numFolds=2,
            seed=1,
            collectSubModels=True,
        )
        return validator.fit(frame)

    chosen = validated(fitted_by)
    models = [model for fold in chosen.subModels for model in fold]
    assert len({model.getRunId() for model in [*models, chosen.bestModel]}) == 9
    assert [len(model.getHistory()) for model in chosen.subModels[0]] == [4, 1, 4, 1]
    assert len({round(value, 6) for value in chosen.avgMetrics}) == 4
    for left, right in itertools.combinations(models, 2):
        assert not torch.equal(left.getModel().weight, right.getModel().weight)
    again = validated(Pipeline(stages=[fitted_by]))
    assert again.avgMetrics == chosen.avgMetrics
    assert again.bestModel.stages[0].getRunId() == chosen.bestModel.getRunId()


def test_a_train_validation_split_chooses_too(frame, tmp_path):
    fitted_by = estimator(tmp_path)
    grid = ParamGridBuilder().addGrid(fitted_by.epochs, [1, 8]).build()
    score = RegressionEvaluator(labelCol="y", predictionCol="y__output")
    split = TrainValidationSplit(
        estimator=fitted_by, estimatorParamMaps=grid, evaluator=score, seed=1
    )
    assert len(split.fit(frame).bestModel.getHistory()) == 8


def test_an_estimator_is_saved_and_fits_the_same_when_loaded(frame, tmp_path, caplog):
    made = estimator(tmp_path, epochs=2, early_stopping=5)
    made.write().overwrite().save(f"{tmp_path}/estimator")
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = TorchEstimator.load(f"{tmp_path}/estimator")
    assert "runs the code pickled in it" in caplog.text
    assert loaded.uid == made.uid
    assert loaded.getStore().prefix_path == made.getStore().prefix_path
    assert loaded.getBackend() is None, "a class of somebody else's"
    assert loaded.getEpochs() == 2
    assert loaded.getEarlyStopping() == made.getEarlyStopping()
    loaded.setBackend(Here())
    weights = [model.getModel().weight for model in (made.fit(frame), loaded.fit(frame))]
    assert torch.equal(*weights)


@pytest.mark.slow
def test_a_loaded_pipeline_and_a_loaded_tuner_fit_where_they_were_saved(frame, tmp_path):
    backend = LocalBackend(1, verbose=0, start_timeout=90, env={"SECRET_TOKEN": "hunter2"})
    made = estimator(tmp_path / "store", backend=backend, run_id="r")
    Pipeline(stages=[made]).write().save(f"{tmp_path}/pipeline")
    loaded = Pipeline.load(f"{tmp_path}/pipeline")
    stage = loaded.getStages()[0]
    assert stage.getBackend().plain() == backend.plain()
    assert stage.getStore().plain() == made.getStore().plain()
    assert len(loaded.fit(frame).stages[0].getHistory()) == 1
    grid = ParamGridBuilder().addGrid(made.epochs, [1, 2]).build()
    score = RegressionEvaluator(labelCol="y", predictionCol="y__output")
    tuner = TrainValidationSplit(estimator=made, estimatorParamMaps=grid, evaluator=score, seed=1)
    tuner.write().save(f"{tmp_path}/tuner")
    assert len(TrainValidationSplit.load(f"{tmp_path}/tuner").fit(frame).validationMetrics) == 2
    folds = CrossValidator(estimator=made, estimatorParamMaps=grid[:1], evaluator=score, numFolds=2)
    folds.write().save(f"{tmp_path}/folds")
    assert len(CrossValidator.load(f"{tmp_path}/folds").fit(frame).avgMetrics) == 1
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"hunter2" in text]


def test_credentials_of_a_store_are_never_saved(frame, tmp_path, caplog):
    options = {"key": "AKIAQUIET", "secret": "hunter2", "endpoint_url": "http://127.0.0.1:9"}
    store = ObjectStore("s3://bucket/team", runs_path="s3://bucket/runs", storage_options=options)
    estimator(
        tmp_path, store=store, backend=SparkBackend(2, env={"TOKEN": "hunter2"}, warm=True)
    ).write().save(f"{tmp_path}/estimator")
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"s3://bucket/runs" in found
    for secret in (b"AKIAQUIET", b"hunter2", b"127.0.0.1:9"):
        assert secret not in found
    with caplog.at_level(logging.WARNING, "farandole"):
        loaded = TorchEstimator.load(f"{tmp_path}/estimator")
    assert "had storage options, which are never saved" in caplog.text
    assert loaded.getStore().plain() == store.plain()
    assert loaded.getBackend().plain() == {"num_proc": 2, "warm": True}


def test_a_place_that_cannot_be_made_here_stays_unset_and_is_said(caplog):
    made = TorchEstimator()
    saved = {
        "store": {"class": "Popen", "arguments": {"prefix_path": "x"}},
        "backend": {"class": "LocalBackend"},
    }
    with caplog.at_level(logging.WARNING, "farandole"):
        store_backend.restore_store_and_backend(made, saved, "/saved")
    assert (
        "the store that was saved at /saved cannot be created here, so set one: 'Popen'"
        in caplog.text
    )
    assert made.getStore() is None
    assert made.getBackend() is None


def test_a_pipeline_is_saved_before_and_after_its_fit(frame, tmp_path):
    stages = [
        VectorAssembler(inputCols=["a", "b"], outputCol="x"),
        estimator(tmp_path, feature_cols=["x"]),
    ]
    pipeline = Pipeline(stages=stages)
    pipeline.write().save(f"{tmp_path}/before")
    assert Pipeline.load(f"{tmp_path}/before").getStages()[1].getFeatureCols() == ["x"]
    fitted = pipeline.fit(frame)
    fitted.write().save(f"{tmp_path}/after")
    expected = fitted.transform(frame).select("y__output").collect()
    assert (
        PipelineModel.load(f"{tmp_path}/after").transform(frame).select("y__output").collect()
        == expected
    )


def test_a_model_is_saved_where_spark_has_no_file_system(spark, frame, tmp_path):
    fitted = estimator(tmp_path).fit(frame)
    path = "memory://saved/model"
    fitted.write().save(path)
    with pytest.raises(FileExistsError, match="the path already exists"):
        fitted.write().save(path)
    fitted.write().overwrite().save(path)
    loaded = TorchModel.load(path)
    assert torch.equal(loaded.getModel().weight, fitted.getModel().weight)
    assert loaded.getFeatureColumns() == [["a", "b"]]


@pytest.mark.newest
def test_weights_are_kept_as_safetensors(spark, frame, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    fitted = estimator(tmp_path).fit(frame)
    fitted.write().save(f"{tmp_path}/model")
    rows = spark.read.parquet(f"{tmp_path}/model/data").where("part = 'state'").collect()
    weights = safetensors.load(bytes(rows[0].bytes))
    assert torch.equal(weights["weight"], fitted.getModel().weight.detach())


@pytest.mark.newest
def test_12_fitting_the_same_frame_with_other_columns_trains_on_stale_data(frame, tmp_path):
    first = estimator(tmp_path, epochs=2).fit(frame)
    other = estimator(tmp_path, epochs=2, feature_cols=[["b", "a"]]).fit(frame)
    again = estimator(tmp_path, epochs=2).fit(frame)
    assert torch.equal(first.getModel().weight, again.getModel().weight)
    assert not torch.equal(first.getModel().weight, other.getModel().weight)
    changed = frame.withColumn("y", -sf.col("y"))
    assert not torch.equal(
        first.getModel().weight, estimator(tmp_path, epochs=2).fit(changed).getModel().weight
    )


def test_a_model_of_assembled_columns_transforms_every_number_type(spark, tmp_path):
    import datetime as dt
    from decimal import Decimal

    kinds = "a tinyint, b decimal(5,2), c boolean, d array<float>, y double"
    frame = spark.createDataFrame(
        [(1, Decimal("2.50"), True, [3.0, 4.0], 0.0), (0, Decimal("0.25"), False, [1.0, 1.0], 0.0)],
        kinds,
    )
    made = estimator(tmp_path, model=None)
    model = Total()
    fitted = made.copy(
        {
            made.model: model,
            made.optimizer: torch.optim.SGD(model.parameters(), lr=1e-9),
            made.feature_cols: [["a", "b", "c"], "d"],
        }
    ).fit(frame)
    assert [row.y__output for row in fitted.transform(frame).collect()] == pytest.approx(
        [11.5, 2.25], rel=1e-4
    )
    dated = frame.withColumn(
        "d", sf.array(sf.lit(dt.date(1970, 1, 3)), sf.lit(dt.date(1970, 1, 4)))
    )
    assert [row.y__output for row in fitted.transform(dated).collect()] == pytest.approx(
        [9.5, 5.25], rel=1e-4
    )
    with pytest.raises(ValueError, match="column 'd' has type string, which no tensor can hold"):
        fitted.transform(frame.withColumn("d", sf.lit("3")))


class Total(torch.nn.Module):
    """Adds all numbers of both inputs."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, left, right):
        return (left.sum(1, keepdim=True) + right.sum(1, keepdim=True)) * self.one


@pytest.mark.newest
def test_a_transformed_frame_knows_its_history_as_a_chart(frame, tmp_path):
    fitted = estimator(tmp_path, epochs=3, validation=0.2).fit(frame)
    chart = fitted.plot_history("loss")
    chart.save(f"{tmp_path}/history.svg")
    text = (tmp_path / "history.svg").read_text()
    assert text.startswith("<svg")
    assert text.count("<polyline") == 2
    assert "validation" in text

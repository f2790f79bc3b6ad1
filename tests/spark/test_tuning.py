# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Searches by Spark's own tuners, whose trials share the slots of the application."""

import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

import farandole.spark

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def place():
    """Where a rank is, after all have met."""
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()


def test_gangs_that_do_not_fit_at_once_wait_for_each_other_and_say_so(spark, capfd):
    size = spark.sparkContext.defaultParallelism
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: farandole.spark.run(place, num_proc=size), range(3)))
    assert found == [[(rank, float(size)) for rank in range(size)]] * 3
    said = capfd.readouterr().err
    assert f"a job of {size} processes waits for slots: 1 jobs hold {size} of {size}" in said
    assert "trying again" not in said, "Spark was never asked for more slots than there are"


def test_a_parallel_cross_validation_prepares_each_fold_once(spark, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    from farandole.spark.common import prepare
    from farandole.spark.common.store import LocalStore
    from farandole.spark.torch import TorchEstimator

    prepared = []
    original = prepare._prepare

    def counting(*args, **kwargs):
        prepared.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(prepare, "_prepare", counting)
    frame = spark.createDataFrame([(x / 64, 2 * x / 64) for x in range(64)], "x float, y float")
    network = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=2,
        store=LocalStore(str(tmp_path)),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=16,
        verbose=0,
    )
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 12]).build()
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(predictionCol="y__output", labelCol="y"),
        numFolds=2,
        seed=1,
        parallelism=2,
    )
    found = search.fit(frame)
    assert found.avgMetrics[1] < found.avgMetrics[0]
    assert len(prepared) == 3, "two folds, and all rows for the best model"

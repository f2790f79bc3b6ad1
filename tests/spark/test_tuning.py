# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Searches by Spark's own tuners, whose trials share the slots of the application."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import hyperopt
import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

import farandole.spark
from farandole.spark.common.backend import Backend, LocalBackend, SparkBackend
from farandole.spark.common.data import prepare
from farandole.spark.common.store import LocalStore
from farandole.spark.torch import TorchEstimator
from farandole.tuning import fmin

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rank_in_world():
    """Returns the rank's place after all ranks have met."""
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()


def test_gangs_that_do_not_fit_at_once_wait_for_each_other_and_say_so(spark, capfd):
    size = spark.sparkContext.defaultParallelism
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda _: farandole.spark.run(rank_in_world, num_proc=size), range(3))
        )
    assert found == [[(rank, float(size)) for rank in range(size)]] * 3
    said = capfd.readouterr().err
    assert f"a job of {size} processes waits for slots: {size} of {size} are held by 1 job" in said
    assert "trying again" not in said, "Spark was never asked for more slots than there are"


def test_gangs_that_would_each_hold_half_of_the_slots_do_not_wait_for_each_other(spark, capfd):
    """Each of the elastic ones has a task a worker and no barrier: Spark would give one slot to
    each.
    """
    size = spark.sparkContext.defaultParallelism

    def gang(elastic):
        if elastic:
            return farandole.spark.run_elastic(rank_in_world, num_proc=size, elastic_timeout=120)
        return farandole.spark.run(rank_in_world, num_proc=size)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(gang, [True, True, False]))
    assert found == [[(rank, float(size)) for rank in range(size)]] * 3
    assert f"waits for slots: {size} of {size} are held by 1 job" in capfd.readouterr().err


def test_a_given_start_timeout_bounds_the_wait_for_the_slots_of_another_job(spark):
    size, begun, over = spark.sparkContext.defaultParallelism, threading.Event(), threading.Event()

    def waits():
        from farandole.spark import task

        task.report({"here": 1})
        time.sleep(120)

    def stop(_rank, _record):
        begun.set()
        over.wait(60)
        raise InterruptedError

    def hold():
        with pytest.raises(InterruptedError):
            SparkBackend(size, verbose=0).run(waits, on_progress=stop)

    holder = threading.Thread(target=hold)
    holder.start()
    assert begun.wait(60)
    began = time.monotonic()
    for start in (farandole.spark.run, farandole.spark.run_elastic):
        with pytest.raises(TimeoutError, match="are held by 1 job"):
            start(rank_in_world, num_proc=size, start_timeout=1)
    assert time.monotonic() - began < 30
    over.set()
    holder.join(60)
    assert not holder.is_alive()


class Counting(Backend):
    """Notes how many jobs run at once, and the parents of their ranks: warm ones have one parent
    for all.
    """

    def __init__(self, backend, folder):
        self.backend, self.folder = backend, folder

    def num_processes(self):
        return self.backend.num_processes()

    def check(self):
        self.backend.check()

    def run(self, fn, args=(), kwargs={}, env=None, on_progress=None):  # noqa: B006 - as the base class has it
        folder = self.folder

        def noted(*given, **named):
            mark = Path(folder, f"{os.getppid()}.{os.getpid()}")
            mark.touch()
            Path(
                folder, "most", str(len([one for one in Path(folder).iterdir() if one.is_file()]))
            ).touch()
            try:
                return fn(*given, **named)
            finally:
                Path(folder, "parents", str(os.getppid())).touch()
                mark.unlink()

        return self.backend.run(noted, args, kwargs, env, on_progress)


@pytest.fixture
def searched(spark, tmp_path, monkeypatch):
    """Runs a search: what it found, how often data was prepared, most ranks at once, and the
    parents of ranks.
    """
    prepared = []
    original = prepare._write_prepared_data

    def counting(*args, **kwargs):
        prepared.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(prepare, "_write_prepared_data", counting)
    frame = spark.createDataFrame([(x / 64, 2 * x / 64) for x in range(64)], "x float, y float")
    network = torch.nn.Linear(1, 1)
    for name in ("most", "parents"):
        (tmp_path / "notes" / name).mkdir(parents=True)

    def search(tuner, parallelism, epochs=(1, 12), backend=None, **more):
        estimator = TorchEstimator(
            backend=Counting(backend or SparkBackend(2, verbose=1), tmp_path / "notes"),
            store=LocalStore(str(tmp_path / "store")),
            model=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(),
            feature_cols=["x"],
            label_cols=["y"],
            input_shapes=[[-1, 1]],
            batch_size=16,
            verbose=0,
        )
        found = tuner(
            estimator=estimator,
            estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, list(epochs)).build(),
            evaluator=RegressionEvaluator(predictionCol="y__output", labelCol="y"),
            seed=1,
            parallelism=parallelism,
            **more,
        ).fit(frame)
        most = max(int(one.name) for one in (tmp_path / "notes" / "most").iterdir())
        return (
            found,
            len(prepared),
            most,
            [one.name for one in (tmp_path / "notes" / "parents").iterdir()],
        )

    return search


SERIAL, WIDE = pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)


@pytest.mark.parametrize("parallelism", [SERIAL, 2, WIDE])
def test_a_cross_validation_prepares_each_fold_once_and_fits_in_turn_on_warm_workers(
    searched, capfd, parallelism
):
    found, prepared, most, parents = searched(CrossValidator, parallelism, numFolds=2)
    assert found.avgMetrics[1] < found.avgMetrics[0]
    assert prepared == 3, "two folds, and all rows for the best model"
    assert most == 2, "never more ranks than slots"
    assert len(parents) == 1, "all ranks come from one fork server"
    said = capfd.readouterr().err
    assert ("a job of 2 processes waits for slots: 2 of 2 are held by 1 job" in said) == (
        parallelism > 1
    )
    assert "trying again" not in said, "Spark was never asked for more slots than there are"


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_a_train_validation_split_prepares_once_and_fits_in_turn_on_warm_workers(
    searched, capfd, parallelism
):
    found, prepared, most, parents = searched(
        TrainValidationSplit, parallelism, epochs=(1, 4, 12, 20), trainRatio=0.7
    )
    assert found.validationMetrics[3] < found.validationMetrics[0]
    assert prepared == 2, "the rows to train on, and all rows for the best model"
    assert most == 2
    assert len(parents) == 1
    assert "trying again" not in capfd.readouterr().err


@pytest.mark.slow
def test_fits_on_this_host_in_a_search_share_its_cores(searched, capfd):
    cores = len(os.sched_getaffinity(0))
    _, _, most, parents = searched(CrossValidator, 4, backend=LocalBackend(cores), numFolds=2)
    assert most == cores
    assert len(parents) == 1
    assert (
        f"a job of {cores} processes waits for slots: {cores} of {cores} are held by 1 job"
        in capfd.readouterr().err
    )


@pytest.mark.slow
def test_trials_of_hyperopt_are_jobs_on_executors_that_wait_for_each_others_slots(spark, capfd):
    def distance(x):
        rank, ranks = rank_in_world()
        return {"loss": (x - 1) ** 2, "rank": rank, "ranks": ranks}

    trials = hyperopt.Trials()
    best = fmin(
        distance,
        hyperopt.hp.uniform("x", -2, 4),
        max_evals=4,
        backend=SparkBackend(2, verbose=1),
        slots=4,
        trials=trials,
        rstate=np.random.default_rng(1),
    )
    assert [(one["rank"], one["ranks"]) for one in trials.results] == [(0, 2.0)] * 4
    assert (best["x"] - 1) ** 2 == min(trials.losses())
    assert (
        "a job of 2 processes waits for slots: 2 of 2 are held by 1 job" in capfd.readouterr().err
    )


def test_rows_that_are_said_to_be_the_same_are_prepared_once_though_no_plan_tells(
    searched, monkeypatch
):
    monkeypatch.setattr(prepare.plan_fingerprints, "plan_fingerprint", lambda _frame: None)
    monkeypatch.setattr(prepare.plan_fingerprints, "portable_plan_text", lambda _frame: None)
    _, prepared, _, _ = searched(TrainValidationSplit, 2, trainRatio=0.7, epochs=(1, 2))
    assert prepared == 2, "as on Spark Connect"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators that train on Ray."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from pyspark.sql import SparkSession

from farandole.data.inputs.frames import is_row_container
from farandole.ray import RayBackend, RayExecutor
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common.saving import store_backend
from farandole.spark.common.store import LocalStore
from farandole.spark.torch import TorchEstimator
from farandole.stores import checkpoint_signatures

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rank_and_size():
    """Returns the rank's place."""
    import farandole.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), os.environ.get("MINE")


def test_a_function_runs_on_ray(resources):
    backend = RayBackend(2, env={"MINE": "1"})
    assert backend.num_processes() == 2
    assert backend.run(rank_and_size) == [(0, 2, "1"), (1, 2, "1")]


def commits(folder, until):
    """Returns the position at which a job continues from the store, and whether a worker has the
    secret.
    """
    import farandole.numpy as hvd
    from farandole.common import elastic

    hvd.init()
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    state.save_to(folder, "job")

    def loop(state):
        begun = state.step
        while state.step < until:
            state.step += 1
            state.commit()
        return begun, checkpoint_signatures.SECRET_VARIABLE in os.environ

    return elastic.run_fn(loop, elastic.leave_and_join)(state)


@pytest.mark.parametrize("bounds", [{}, {"min_num_proc": 2}])
def test_commits_on_ray_are_sealed_by_the_secret_of_the_driver(
    resources, tmp_path, monkeypatch, bounds
):
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    backend = RayBackend(2, verbose=0, **bounds)
    assert backend.run(commits, (str(tmp_path), 2)) == [(0, False)] * 2
    assert LocalStore(str(tmp_path)).to_remote("job").read_checkpoint_to_resume() is not None, (
        "the seal is that of the driver's secret"
    )
    assert backend.run(commits, (str(tmp_path), 3)) == [(2, False)] * 2


def test_a_saved_estimator_gets_its_backend_back_without_its_variables():
    options = {
        "gpus_per_worker": 2,
        "cpus_per_worker": 1.5,
        "max_num_proc": 4,
        "reset_limit": 3,
        "verbose": 0,
    }
    backend = RayBackend(2, use_gpu=True, env={"TOKEN": "hunter2"}, pass_env=["SECRET"], **options)
    saved = json.loads(json.dumps(store_backend.describe_store_and_backend({"backend": backend})))
    assert "hunter2" not in str(saved)
    assert "SECRET" not in str(saved)
    made = TorchEstimator()
    store_backend.restore_store_and_backend(made, saved, "/saved")
    assert isinstance(made.getBackend(), RayBackend)
    assert made.getBackend().plain() == backend.plain()
    assert backend.plain().items() >= ({"num_workers": 2, "use_gpu": True} | options).items()
    assert RayBackend(**RayBackend(3).plain()).plain() == RayBackend(3).plain()


def test_a_worker_that_fails_is_named_and_ray_gets_its_resources_back(resources):
    def fails():
        if rank_and_size()[0] == 1:
            raise ValueError("of rank 1")

    with pytest.raises(FarandoleJobError, match="of rank 1"):
        RayBackend(2, verbose=0).run(fails)


def test_a_job_that_does_not_fit_is_refused_in_time(resources):
    with pytest.raises(TimeoutError, match="64 bundles"):
        RayBackend(64, placement_group_timeout=2).run(rank_and_size)


def test_two_jobs_that_do_not_fit_at_once_wait_for_each_other(resources):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: RayBackend(3, verbose=0).run(rank_and_size), range(2)))
    assert [len(one) for one in found] == [3, 3]


@pytest.mark.timing
def test_a_job_waits_for_another_of_its_process_longer_than_ray_may_take(resources):
    def long(seconds):
        time.sleep(seconds)
        return rank_and_size()

    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda _: RayBackend(3, verbose=0, placement_group_timeout=2).run(long, [4]),
                range(2),
            )
        )
    assert [len(one) for one in found] == [3, 3]


def test_a_job_does_not_wait_for_an_executor_that_stays(resources):
    holder = RayExecutor(RayExecutor.create_settings(), num_workers=3)
    holder.start()
    try:
        with pytest.raises(TimeoutError, match=r"3 bundles of .* within 2 s"):
            RayBackend(3, verbose=0, placement_group_timeout=2).run(rank_and_size)
    finally:
        holder.shutdown()


def fitted(frame, folder):
    """The weight of a fit of `y = 2 x + 1` on two ranks."""
    network = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        backend=RayBackend(2, verbose=0),
        store=LocalStore(str(folder)),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=16,
        epochs=8,
        verbose=0,
    )
    return estimator.fit(frame).getModel().weight.item()


def line():
    x = np.random.default_rng(0).normal(size=400).astype("float32")
    return pd.DataFrame({"x": x, "y": 2 * x + 1})


def test_an_estimator_fits_a_frame_there(resources, tmp_path):
    assert abs(fitted(line(), tmp_path) - 2) < 0.1


@pytest.mark.slow
def test_an_estimator_fits_frames_of_polars_and_arrow_there(resources, tmp_path):
    for frame in (pl.from_pandas(line()), pa.Table.from_pandas(line())):
        assert abs(fitted(frame, tmp_path) - 2) < 0.1


@pytest.mark.slow
def test_an_estimator_fits_a_spark_frame_there(resources, tmp_path, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    )
    try:
        assert abs(fitted(spark.createDataFrame(line()), tmp_path) - 2) < 0.1
    finally:
        spark.stop()


@pytest.mark.slow
def test_an_estimator_fits_a_ray_data_set(resources, tmp_path):
    from ray import data

    random = np.random.default_rng(0)
    rows = random.normal(size=(400, 2)).astype("float32")
    frame = data.from_items(
        [{"x": row, "y": float(row @ [2, -1])} for row in rows], override_num_blocks=2
    )
    assert is_row_container(frame)
    network = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
    estimator = TorchEstimator(
        backend=RayBackend(2, verbose=0),
        store=LocalStore(str(tmp_path)),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=16,
        epochs=8,
        verbose=0,
    )
    model = estimator.fit(frame)
    assert np.allclose(model.getModel()[0].weight.detach().numpy(), [[2, -1]], atol=0.1)


def test_workers_of_the_next_job_are_warm(resources):
    def parent():
        return os.getppid()

    backend = RayBackend(2, verbose=0, warm=True)
    first, second = set(backend.run(parent)), set(backend.run(parent))
    assert first == second, "the fork server that has imported torch"
    assert len(first) == 1

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trials of Ray Tune that are jobs of two ranks."""

import os
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

import ray
from farandole.tuning import report
from ray import tune

for pickler in (cloudpickle, ray.cloudpickle):
    # Workers import no test: what they run comes with its module.
    pickler.register_pickle_by_value(sys.modules[__name__])


def train(config):
    """A loss that falls to `x`, by both ranks; bad trials never end by themselves."""
    import farandole.numpy as hvd

    hvd.init()
    Path(config["folder"], f"{config['x']}.{hvd.rank()}.{os.getpid()}").touch()
    step = 0
    while step < 3 or config["x"] > 5:
        report(step, loss=float(hvd.allreduce(config["x"] + 2.0**-step)))
        step += 1
        time.sleep(0.1)
    return {"loss": float(config["x"]), "ranks": hvd.size()}


def test_trials_are_jobs_and_one_that_is_stopped_ends_its_ranks(resources, tmp_path):
    from farandole.ray.tune import trainable

    def stop(_trial, result):
        return result["loss"] > 5 and result.get("step", 0) >= 2

    found = tune.Tuner(
        trainable(train, 2, warm=False),
        param_space={"x": tune.grid_search([3, 7, 1]), "folder": str(tmp_path)},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "results"), stop=stop, verbose=0),
    ).fit()
    assert not found.errors
    best = found.get_best_result()
    assert best.config["x"] == 1
    assert best.metrics["ranks"] == 2
    pids = {name.split(".")[0]: [] for name in os.listdir(tmp_path) if name[0].isdigit()}
    for name in os.listdir(tmp_path):
        if name[0].isdigit():
            pids[name.split(".")[0]].append(int(name.split(".")[2]))
    assert {x: len(found) for x, found in pids.items()} == {"3": 2, "7": 2, "1": 2}
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids["7"]):
        assert time.monotonic() < deadline, "the ranks of a stopped trial live"
        time.sleep(0.1)


@pytest.mark.slow
def test_trials_that_reuse_the_process_of_a_trial_reuse_the_actors_of_its_ranks(
    resources, tmp_path
):
    from farandole.ray.tune import trainable

    def parents(config):
        Path(config["folder"], f"{config['x']}.{os.getppid()}").touch()
        return {"loss": float(config["x"])}

    found = tune.Tuner(
        trainable(parents, 2, warm=False),
        param_space={"x": tune.grid_search([1, 2, 3]), "folder": str(tmp_path)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", reuse_actors=True, max_concurrent_trials=1
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0),
    ).fit()
    assert not found.errors
    assert len(found) == 3
    ranks = [one.name.split(".") for one in tmp_path.glob("[123].*")]
    assert len(ranks) == 6, "two ranks of each trial"
    assert len({parent for _, parent in ranks}) == 2, "of two actors"


def test_a_function_that_cannot_be_pickled_is_refused_before_the_search():
    from farandole.ray.tune import trainable

    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled for the workers"):
        trainable(lambda _config: lock.locked(), 2)


def test_the_function_that_ray_had_for_horovod_reserves_all_ranks_at_once(resources):
    from farandole.ray.tune import DistributedTrainableCreator

    made = DistributedTrainableCreator(train, num_hosts=2, num_workers=2, num_cpus_per_worker=1)
    assert made._resources.bundles == [{"CPU": 1.0}] * 4


def test_numbers_that_contradict_each_other_are_refused():
    from farandole.ray.tune import trainable

    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        trainable(train, 0)
    with pytest.raises(ValueError, match="use_gpu is False"):
        trainable(train, 1, gpus_per_worker=1)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Optuna studies whose trials are jobs of two processes."""

import os
import sys
import time
from pathlib import Path

import cloudpickle
import optuna
import pytest

from farandole.spark.common.backend import LocalBackend
from farandole.tuning import optimize, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])
optuna.logging.set_verbosity(optuna.logging.ERROR)

BACKEND = LocalBackend(2, verbose=0)


def train(given):
    """A loss that falls to `x * x`, by both ranks; says which processes work on it."""
    import farandole.numpy as hvd

    hvd.init()
    folder = Path(given["folder"])
    (folder / f"{given['x']}.{hvd.rank()}.{os.getpid()}.{time.time_ns()}").touch()
    for step in range(given.get("steps", 3)):
        report(step, loss=float(hvd.allreduce(given["x"] ** 2 + 2.0**-step)))
        if given.get("forever"):
            time.sleep(0.05)
    return given["x"] ** 2


def test_trials_are_jobs_and_a_study_in_a_file_continues(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"

    def space(trial):
        return {"x": trial.suggest_int("x", -5, 5), "folder": str(tmp_path)}

    def study():
        sampler = optuna.samplers.GridSampler({"x": [-2, 0, 3]})
        return optuna.create_study(
            storage=storage, study_name="one", load_if_exists=True, sampler=sampler
        )

    optimize(study(), train, space, backend=BACKEND, n_trials=2)
    assert len(study().trials) == 2
    optimize(study(), train, space, backend=BACKEND, n_trials=3, metric="loss")
    found = study()
    assert found.best_params == {"x": 0}
    assert sorted(one.value for one in found.trials) == [0, 4, 9]
    assert found.trials[0].intermediate_values == {
        step: found.trials[0].value + 2.0**-step for step in range(3)
    }
    optimize(found, train, space, backend=BACKEND, n_trials=3)
    assert len(found.trials) == 3, "all of them were finished before"


def test_a_pruned_trial_ends_on_all_of_its_ranks(tmp_path):
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=5, n_warmup_steps=2))

    def space(trial):
        return {
            "x": trial.suggest_int("x", 3, 3),
            "folder": str(tmp_path),
            "steps": 10_000,
            "forever": True,
        }

    started = time.monotonic()
    optimize(study, train, space, backend=BACKEND, n_trials=1)
    assert time.monotonic() - started < 60, "10000 steps take eight minutes"
    assert [one.state.name for one in study.trials] == ["PRUNED"]
    pids = [int(one.name.split(".")[2]) for one in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_as_many_trials_run_at_once_as_there_are_slots_for(tmp_path):
    study = optuna.create_study()

    def meets(given):
        """Waits for the other trial: trials in sequence would wait without end."""
        (Path(given["folder"]) / str(given["number"])).touch()
        deadline = time.monotonic() + 60
        while len(list(Path(given["folder"]).iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return 1.0

    optimize(
        study,
        meets,
        lambda trial: {"number": trial.number, "folder": str(tmp_path)},
        backend=BACKEND,
        n_trials=2,
        slots=5,
    )
    assert [one.value for one in study.trials] == [1.0, 1.0]


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="slots must be at least that: 1"):
        optimize(optuna.create_study(), train, dict, backend=BACKEND, n_trials=1, slots=1)
    with pytest.raises(TypeError, match="loss='high'"):
        report(0, loss="high")


def test_a_metric_must_be_named_where_there_are_several(tmp_path):
    def two(given):
        report(0, loss=1.0, accuracy=0.5)
        time.sleep(60)

    with pytest.raises(ValueError, match="of loss, accuracy"):
        optimize(optuna.create_study(), two, lambda _: {}, backend=BACKEND, n_trials=1)

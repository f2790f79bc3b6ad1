# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hyperopt searches whose trials are jobs of two processes."""

import sys
import time
from pathlib import Path

import cloudpickle
import hyperopt
import numpy as np
import pytest

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common.backend import LocalBackend
from farandole.tuning import fmin, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKEND = LocalBackend(2, verbose=0)
SPACE = {"x": hyperopt.hp.uniform("x", -4, 4), "shift": hyperopt.hp.choice("shift", [1, 2])}


def train(point):
    """A loss with its minimum at `x = -shift`, by both ranks."""
    import farandole.numpy as hvd

    hvd.init()
    return {"error": float(hvd.allreduce((point["x"] + point["shift"]) ** 2)), "ranks": hvd.size()}


def test_trials_are_jobs_and_a_search_continues_where_it_was_left():
    trials = hyperopt.Trials()
    first = fmin(
        train,
        SPACE,
        max_evals=2,
        backend=BACKEND,
        metric="error",
        trials=trials,
        rstate=np.random.default_rng(1),
    )
    assert [one["ranks"] for one in trials.results] == [2, 2]
    assert first == trials.argmin
    best = fmin(train, SPACE, max_evals=4, backend=BACKEND, metric="error", slots=4, trials=trials)
    assert len(trials) == 4
    point = hyperopt.space_eval(SPACE, best)
    assert min(trials.losses()) == pytest.approx((point["x"] + point["shift"]) ** 2)
    assert fmin(train, SPACE, max_evals=4, backend=BACKEND, trials=trials) == best, (
        "all of them were finished before"
    )


def test_as_many_trials_run_at_once_as_there_are_slots_for(tmp_path):
    def meets(x):
        """Waits for the other trial: trials in sequence would wait without end."""
        (tmp_path / str(x)).touch()
        deadline = time.monotonic() + 60
        while len(list(Path(tmp_path).iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return x

    trials = hyperopt.Trials()
    fmin(
        meets, hyperopt.hp.uniform("x", 0, 1), max_evals=2, backend=BACKEND, slots=5, trials=trials
    )
    assert trials.statuses() == ["ok", "ok"]


def test_a_trial_that_fails_ends_the_search_or_is_a_failed_trial():
    def fails(x):
        raise KeyError("of the user")

    space, trials = hyperopt.hp.uniform("x", 0, 1), hyperopt.Trials()
    with pytest.raises(FarandoleJobError, match="of the user"):
        fmin(fails, space, max_evals=1, backend=BACKEND, trials=trials)
    with pytest.raises(hyperopt.exceptions.AllTrialsFailed):
        fmin(fails, space, max_evals=1, backend=BACKEND, trials=trials, catch=(FarandoleJobError,))


def test_the_other_trials_of_a_search_that_failed_end_at_their_next_report(tmp_path):
    def one_fails(number):
        if number == 1:
            while not (tmp_path / "other").exists():
                time.sleep(0.01)
            raise KeyError("of the user")
        for step in range(10_000):
            report(step, loss=1.0)
            (tmp_path / "other").touch()
            time.sleep(0.05)

    def suggest(new_ids, domain, trials, seed):
        return hyperopt.rand.suggest(new_ids, domain, trials, next(numbers))

    drawn = hyperopt.hp.choice("number", [1, 2])
    domain = hyperopt.base.Domain(len, drawn)
    seeds = {}
    for seed in range(20):
        (trial,) = hyperopt.rand.suggest([0], domain, hyperopt.Trials(), seed)
        seeds[trial["misc"]["vals"]["number"][0]] = seed
    numbers = iter([seeds[0], seeds[1]])
    started = time.monotonic()
    with pytest.raises(FarandoleJobError, match="of the user"):
        fmin(one_fails, drawn, suggest, max_evals=2, backend=BACKEND, slots=4)
    assert time.monotonic() - started < 60, "10000 steps take eight minutes"


def test_fewer_slots_than_a_trial_has_processes_are_refused():
    with pytest.raises(ValueError, match="slots must be at least that: 1"):
        fmin(train, SPACE, max_evals=1, backend=BACKEND, slots=1)

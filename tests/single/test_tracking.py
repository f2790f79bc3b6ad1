# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Calls to Weights & Biases, by a module that replaces its library, and MLflow itself with
unusual stores.
"""

from __future__ import annotations

import sys
import types

import pytest
from tests.single.training import fit, line, linear, write

from farandole.spark.common.runs import trackers
from farandole.spark.common.runs.tracking import (
    MlflowTracker,
    TrackedDataset,
    Tracker,
    TrackerGroup,
    WandbTracker,
)

PARAMETERS = {"batch_size": 8}


def epoch(number, loss):
    scores = {"loss": loss, "all_metrics": []}
    entry = {"epoch": number, "train": scores, "validation": scores | {"loss": 2 * loss}}
    return {"kind": "epoch", "entry": entry}


@pytest.fixture
def wandb(monkeypatch):
    """The library; `told` has the calls to it."""
    told = []
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(
            update=lambda values, **options: told.append(("config", values, *options))
        ),
        log=lambda row: told.append(("log", row)),
        define_metric=lambda name, step_metric: told.append(("define", name, step_metric)),
        finish=lambda exit_code: told.append(("finish", exit_code)),
    )
    fake.run, fake.told, fake.active = None, told, run
    fake.init = lambda name: told.append(("init", name)) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_run_of_its_own_gets_parameters_and_epochs(wandb):
    with WandbTracker("named", PARAMETERS) as tracker:
        tracker.log_report({"kind": "step", "loss": 9.0})
        tracker.log_report(epoch(0, 0.5))
        tracker.log_report(epoch(1, 0.25))
    assert wandb.told == [
        ("init", "named"),
        ("define", "*", "epoch"),
        ("config", PARAMETERS, "allow_val_change"),
        ("log", {"loss": 0.5, "val_loss": 1.0, "epoch": 0}),
        ("log", {"loss": 0.25, "val_loss": 0.5, "epoch": 1}),
        ("finish", 0),
    ]


def test_a_failed_fit_fails_its_run_and_an_active_run_stays_open(wandb):
    with pytest.raises(RuntimeError), WandbTracker("named", {}):
        raise RuntimeError
    assert wandb.told[-1] == ("finish", 1)
    wandb.told.clear()
    wandb.run = wandb.active
    with WandbTracker("named", {}):
        pass
    assert [name for name, *_ in wandb.told] == ["config"]


def test_several_trackers_get_a_run_and_all_end_if_one_cannot_start(wandb):
    class Unwilling(Tracker):
        def __enter__(self):
            raise ConnectionError("no server")

    with TrackerGroup([WandbTracker("a", {}), WandbTracker("b", {})]) as both:
        both.log_report(epoch(0, 1.0))
        both.log_model(None, "pytorch")
    assert [name for name, *_ in wandb.told] == ["init", "define", "config"] * 2 + ["log"] * 2 + [
        "finish"
    ] * 2
    wandb.told.clear()
    with pytest.raises(ConnectionError), TrackerGroup([WandbTracker("a", {}), Unwilling()]):
        pass
    assert wandb.told[-1] == ("finish", 1)
    with TrackerGroup([]) as none:
        none.log_report(epoch(0, 1.0))


class Failing(Tracker):
    """A service that is lost after the start."""

    def __init__(self, error, calls):
        self.error, self.calls, self.used = error, calls, []

    def _call(self, name):
        self.used.append(name)
        if name in self.calls:
            raise self.error

    def log_report(self, *_):
        self._call("log_report")

    def log_model(self, *_):
        self._call("log_model")

    def __exit__(self, *of):
        self._call("__exit__")


CALLS = ("log_report", "log_report", "log_model", "__exit__")


@pytest.mark.parametrize("calls", [CALLS[1:], *((one,) for one in CALLS[1:])], ids="-".join)
@pytest.mark.parametrize("error", [ConnectionError("no server"), ValueError("not a tensor")])
def test_a_service_that_fails_after_the_start_is_a_warning_and_the_others_go_on(
    caplog, calls, error
):
    trackers = [Failing(error, calls), Failing(error, set()), Failing(error, calls)]
    with caplog.at_level("WARNING"), TrackerGroup(trackers) as group:
        group.log_report(epoch(0, 1.0))
        group.log_report(epoch(1, 1.0))
        group.log_model(None, "pytorch")
    assert [tracker.used for tracker in trackers] == [list(CALLS)] * 3
    warnings = [one.getMessage() for one in caplog.records]
    assert len(warnings) == 2 * len(calls), "one for each tracker and kind of call"
    assert all(str(error) in one and "Failing" in one for one in warnings)


def test_the_error_of_a_fit_is_not_replaced_by_that_of_a_service():
    with pytest.raises(KeyError), TrackerGroup([Failing(OSError("no server"), set(CALLS))]):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), TrackerGroup([Failing(KeyboardInterrupt(), set(CALLS))]):
        pass


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbTracker("named", {})


def test_mlflow_takes_a_run_on_a_store_that_it_does_not_know_and_a_failed_start_leaves_no_run(
    mlflow, tmp_path
):
    places = {
        "training": TrackedDataset("az://container/data", 10, "0123"),
        "validation": TrackedDataset(f"file://{tmp_path}/data", 5, "4567"),
    }
    with MlflowTracker("strange", PARAMETERS, places):
        run = mlflow.active_run().info.run_id
    inputs = mlflow.get_run(run).inputs.dataset_inputs
    assert [(one.dataset.name, one.dataset.digest) for one in inputs] == [("5 rows", "4567")]
    refused = MlflowTracker("refused", {"not / allowed : ?*": 1}, places)
    with pytest.raises(mlflow.exceptions.MlflowException), refused:
        pass
    assert mlflow.active_run() is None


def test_the_digest_of_a_data_set_is_that_of_its_rows(tmp_path, monkeypatch):
    told = []

    class Told(Tracker):
        def __init__(self, _run_id, _parameters, data):
            told.append({context: one.digest for context, one in data.items()})

    monkeypatch.setattr(trackers, "MlflowTracker", Told)
    for number, seed in enumerate((0, 0, 1)):
        x, y = line(rows=16, seed=seed)
        write(tmp_path / str(number) / "intermediate_train_data", x=x, y=y)
        write(tmp_path / str(number) / "intermediate_val_data", x=x[:8], y=y[:8])
        fit(tmp_path / str(number), linear(), epochs=1, validation=0.5, mlflow=True)
    same, again, other = told
    assert same == again
    assert set(same) == {"training", "validation"}
    assert len({*same.values(), *other.values()}) == 4

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One run of MLflow with the load of all hosts and the times of all ranks."""

from __future__ import annotations

import threading

import pytest
from tests.single.training import fit, line, linear, write

from farandole.runner.backend import LocalBackend
from farandole.spark.common.runs import rank_metrics as module
from farandole.spark.common.runs.rank_metrics import RankMetricsReporter, rank_metrics
from farandole.spark.common.runs.tracking import MlflowTracker

LOAD = {"cpu": 0.5, "memory": 2e9, "memory_total": 8e9, "process_memory": 1e9}
GPU = {"gpu": 0.25, "gpu_memory": 1e9, "gpu_memory_total": 4e9}


def test_ranks_and_hosts_become_metrics_by_name():
    ranks = [
        {"rank": 0, "host": "a", "step_seconds": 0.5, "data_seconds": 0.1, "reduce_seconds": 0.25,
         "load": LOAD | GPU},
        {"rank": 1, "host": "a", "step_seconds": 0.5, "load": LOAD | GPU},
        {"rank": 2, "host": "b c:[1]", "load": {"cpu": 1.0}},
        {"rank": 3, "host": "d", "step_seconds": 0.0, "reduce_seconds": 0.0},
    ]  # fmt: skip
    host = {"cpu_utilization_percentage": 50.0, "system_memory_usage_megabytes": 2000.0,
            "system_memory_usage_percentage": 25.0}  # fmt: skip
    gpus = {
        f"gpu_{gpu}_{name}": value
        for gpu in (0, 1)
        for name, value in {
            "utilization_percentage": 25.0,
            "memory_usage_megabytes": 1000.0,
            "memory_usage_percentage": 25.0,
        }.items()
    }
    assert rank_metrics(ranks) == {
        "rank/0/step_seconds": 0.5,
        "rank/0/data_wait_seconds": 0.1,
        "rank/0/reduction_share": 0.5,
        "rank/0/process_memory_megabytes": 1000.0,
        "rank/1/step_seconds": 0.5,
        "rank/1/process_memory_megabytes": 1000.0,
        "system/b_c__1_/cpu_utilization_percentage": 100.0,
        **{f"system/a/{name}": value for name, value in (host | gpus).items()},
    }


@pytest.mark.parametrize("strange", ["nan", None, True, [1.0], {}])
@pytest.mark.parametrize("name", ["step_seconds", "data_seconds", "reduce_seconds", "load"])
def test_a_value_that_is_no_number_is_left_out(name, strange):
    rank = {"rank": 0, "host": "a", "step_seconds": 1.0, "data_seconds": 0.5, name: strange}
    found = rank_metrics([rank, {"rank": 1, "host": "a", "load": dict.fromkeys(LOAD, strange)}])
    assert all(isinstance(value, float) for value in found.values())
    assert not any(one.startswith(("system", "rank/1")) for one in found)


def ranks(step):
    return {"ranks": [{"rank": 0, "host": "a", "step_seconds": step}]}


def test_a_sample_is_logged_after_each_interval_and_at_the_end():
    now, logged = [0.0], []
    reporter = RankMetricsReporter(lambda *sample: logged.append(sample), 10, lambda: now[0])
    for at in (1, 9, 10, 11, 19.5, 25):
        now[0] = at
        reporter.put_row("run", "ranks", ranks(float(at)))
        reporter.put_row("run", "step", {"kind": "step"})
        if reporter._waiting is not None:
            _wait_for(lambda: reporter._waiting is None)
    reporter.put_row("run", "ranks", ranks(26.0))
    reporter.close()
    steps = [(one["rank/0/step_seconds"], sample) for one, sample in logged]
    assert steps == [(10.0, 0), (25.0, 1), (26.0, 2)]
    reporter.close()
    assert len(logged) == 3


def _wait_for(condition):
    waiting = threading.Event()
    for _ in range(1000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("the condition did not become true")


def test_a_service_that_does_not_answer_delays_neither_reports_nor_the_end(monkeypatch):
    monkeypatch.setattr(module, "_MAX_FINAL_WAIT", 0.2)
    answers, asked, logged = threading.Event(), threading.Event(), []

    def log(metrics, sample):
        asked.set()
        answers.wait(30)
        logged.append((metrics["rank/0/step_seconds"], sample))

    reporter = RankMetricsReporter(log, interval=0)
    reporter.put_row("run", "ranks", ranks(1.0))
    assert asked.wait(30)
    for step in (2.0, 3.0, 4.0):
        reporter.put_row("run", "ranks", ranks(step))
    reporter.close()
    assert logged == []
    answers.set()
    assert reporter._thread is not None
    reporter._thread.join(30)
    assert logged == [(1.0, 0), (4.0, 1)], "of the waiting samples, the newest one"


def test_an_error_of_the_service_ends_no_sample():
    logged = []

    def log(_metrics, sample):
        logged.append(sample)
        raise ConnectionError("no server")

    reporter = RankMetricsReporter(log, interval=0)
    for step in (1.0, 2.0):
        reporter.put_row("run", "ranks", ranks(step))
        _wait_for(lambda: reporter._waiting is None)
    reporter.close()
    assert logged == [0, 1]


def test_more_metrics_than_one_call_takes_are_all_logged_to_the_run_of_the_fit(mlflow):
    with MlflowTracker("many", {}) as tracker:
        run = mlflow.active_run().info.run_id
        metrics = {f"rank/{rank}/step_seconds": float(rank) for rank in range(1200)}
        logging = threading.Thread(target=tracker.log_ranks, args=(metrics, 7))
        logging.start()
        logging.join(60)
    assert mlflow.get_run(run).data.metrics == metrics
    (one,) = mlflow.MlflowClient().get_metric_history(run, "rank/1199/step_seconds")
    assert one.step == 7


@pytest.mark.parametrize("autolog", [False, True])
def test_a_fit_of_two_processes_is_one_run_with_both_ranks_and_a_verdict(mlflow, tmp_path, autolog):
    if autolog:
        mlflow.autolog(silent=True)
    try:
        x, y = line(rows=64)
        write(tmp_path / "intermediate_train_data", x=x, y=y)
        fit(tmp_path, linear(), epochs=2, backend=LocalBackend(2), mlflow=True)
    finally:
        mlflow.autolog(disable=True, silent=True)
    (run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
    names = set(run.data.metrics)
    for rank in (0, 1):
        assert {f"rank/{rank}/step_seconds", f"rank/{rank}/data_wait_seconds"} <= names, names
        assert 0 <= run.data.metrics[f"rank/{rank}/reduction_share"] <= 1
    assert "loss" in names
    assert run.data.tags["farandole.verdict"]

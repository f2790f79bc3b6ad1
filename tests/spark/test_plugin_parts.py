# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Messages between the driver and the Spark plugin, without Spark."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from tests.single.test_timelines import timeline

from farandole.runner import timelines
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import JobOutput
from farandole.runner.show import training_run_reports
from farandole.spark import shim as shims
from farandole.spark.common.show.step_meter import StepMeter
from farandole.spark.job.executor_loss import ExecutorLossReasons
from farandole.spark.shim import SparkPlugin


class FakeJavaPlugin:
    """The plugin's class in Java."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Any] = {}
        self.logged: list[str] = []
        self.gauges: dict[str, float] = {}
        self.timelines: list[str] = []
        self.queued_messages: list[dict[str, str]] = []
        self.broken = False
        self.calls = 0

    def put(self, run: str, key: str, body: str, logged: bool) -> None:
        self.calls += 1
        if self.broken:
            raise ConnectionError("the JVM has ended")
        self.rows[run, key] = json.loads(body)
        if logged:
            self.logged.append(key)

    def gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    def timeline(self, _run: str, path: str) -> None:
        self.timelines.append(path)

    def news(self, since: int) -> str:
        return json.dumps({"next": len(self.queued_messages), "news": self.queued_messages[since:]})

    def row(self, key: str) -> Any:
        (found,) = [body for (_, name), body in self.rows.items() if name == key]
        return found


class Builder:
    def __init__(self, **options: str) -> None:
        self._options = {f"spark.{name}": value for name, value in options.items()}

    def config(self, name: str, value: str) -> Builder:
        self._options[name] = value
        return self


@pytest.fixture
def java_plugin() -> FakeJavaPlugin:
    return FakeJavaPlugin()


def seats(size: int) -> list[Any]:
    return [{"rank": rank, "task": size - 1 - rank, "host": f"host-{rank}"} for rank in range(size)]


def test_the_plugin_is_added_to_the_jars_and_plugins_that_a_builder_has(tmp_path, monkeypatch):
    jar = tmp_path / "farandole-spark.jar"
    monkeypatch.setattr(shims, "JAR_PATH", jar)
    with pytest.raises(FileNotFoundError, match="make shim"):
        shims.plugin(Builder())
    jar.touch()
    assert shims.plugin(Builder())._options == {
        "spark.jars": str(jar),
        "spark.plugins": shims.PLUGIN_CLASS,
    }
    builder = shims.plugin(
        shims.plugin(Builder(jars="/a.jar, /b.jar", plugins="com.example.Other"))
    )
    assert builder._options == {
        "spark.jars": f"/a.jar,/b.jar,{jar}",
        "spark.plugins": f"com.example.Other,{shims.PLUGIN_CLASS}",
    }
    assert shims.plugin(Builder(), warm=True)._options["spark.farandole.warmWorkers"] == "true"
    monkeypatch.setenv("FARANDOLE_WARM_WORKERS", "on")
    assert shims.plugin(Builder())._options["spark.farandole.warmWorkers"] == "true"
    assert "spark.farandole.warmWorkers" not in shims.plugin(Builder(), warm=False)._options


def test_a_run_is_reported_from_its_start_to_its_end(java_plugin):
    with training_run_reports.report_run(
        SparkPlugin(java_plugin), "mine", "TorchEstimator", {"epochs": 2, "lr": float("inf")}
    ) as run:
        assert training_run_reports.current_run() is run
        with training_run_reports.report_run(SparkPlugin(java_plugin), "inner", "run") as inner:
            assert inner is run, "what a fit starts is a part of the fit"
        run.set_job_tag("farandole-1", 2)
        run.update_rank_facts(0, {"pid": 7})  # which is rank 1, as it turns out
        run.set_placements(seats(2))
        run.record_location(0, "3")
        run.update_rank_facts(1, {"pid": 6, "step_seconds": 0.2, "data_seconds": float("nan")})
        run.record_progress(
            {
                "kind": "step",
                "epoch": 0,
                "epochs": 2,
                "step": 1,
                "steps": 9,
                "rows_per_second": 5.0,
                "loss": 1.0,
            }
        )
        entry = {"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}, "seconds": 1.0, "rows": 10}
        run.record_progress(
            {"kind": "epoch", "entry": entry, "epochs": 2, "steps": 9, "rows_per_second": 10.0}
        )
        run.record_restart("a host was lost")
        assert java_plugin.row("run")["state"] == "running"
    assert training_run_reports.current_run() is training_run_reports.SILENT_RUN
    told = java_plugin.row("run")
    assert told | {"started": 0, "ended": 0, "user": ""} == {
        "name": "mine",
        "what": "TorchEstimator",
        "state": "ended",
        "started": 0,
        "ended": 0,
        "user": "",
        "restarts": 1,
        "losses": 0,
        "tags": ["farandole-1"],
        "size": 2,
        "parameters": {"epochs": 2, "lr": "inf"},
    }
    assert told["started"] <= told["ended"]
    assert java_plugin.row("ranks")["ranks"] == [
        {
            "rank": 0,
            "task": 1,
            "host": "host-0",
            "executor": None,
            "pid": 6,
            "step_seconds": 0.2,
            "data_seconds": "nan",
        },
        {"rank": 1, "task": 0, "host": "host-1", "executor": "3", "pid": 7},
    ]
    assert java_plugin.row("epoch/00000000")["values"] == {"loss": 0.5}
    assert java_plugin.row("event/000001")["reason"] == "a host was lost"
    assert "step" not in java_plugin.logged
    assert java_plugin.gauges == {"rowsPerSecond": 10.0, "stepSeconds": 0.2, "restarts": 1.0}


@pytest.mark.parametrize(
    ("error", "state"),
    [(FarandoleJobError("rank 1 failed"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_failed_run_says_why(java_plugin, error, state):
    with (
        pytest.raises(type(error)),
        training_run_reports.report_run(SparkPlugin(java_plugin), "mine", "run"),
    ):
        raise error
    assert java_plugin.row("run")["state"] == state
    assert java_plugin.row("run")["reason"] == (str(error) or "KeyboardInterrupt")


def test_a_plugin_that_fails_is_left_alone_and_the_run_continues(java_plugin):
    java_plugin.broken = True
    with training_run_reports.report_run(SparkPlugin(java_plugin), "mine", "run") as run:
        run.set_placements(seats(2))
        run.add_event("something", "else")
    assert java_plugin.calls == 1


def test_ranks_that_left_say_how_until_the_ranks_have_new_places(java_plugin):
    run = training_run_reports.TrainingRun(SparkPlugin(java_plugin), "mine", "run")
    run.set_placements(seats(2))
    run.mark_worker_gone(1, "failed")
    run.mark_worker_gone(0, "ended")
    run.mark_ended(None)
    assert [one["state"] for one in java_plugin.row("ranks")["ranks"]] == ["failed", "ended"]
    run.set_placements(seats(2))
    assert all("state" not in one for one in java_plugin.row("ranks")["ranks"])


def test_the_tab_gets_the_timeline_once_it_is_written(java_plugin, tmp_path):
    path = tmp_path / "trace.json"
    with (
        timelines.collect_timelines(path) as gathering,
        training_run_reports.report_run(SparkPlugin(java_plugin), "mine", "run"),
    ):
        timelines.begin_timeline_collection()
        timelines.collect_timeline_piece(0, timeline(0, 1_000))
        assert "timeline" not in java_plugin.row("run")
    assert gathering.summary
    assert java_plugin.timelines == [str(path)]
    told = java_plugin.row("run")
    assert (told["timeline"], told["timeline_is_here"], told["state"]) == (str(path), True, "ended")


def test_a_timeline_elsewhere_is_only_named(java_plugin):
    run = training_run_reports.TrainingRun(SparkPlugin(java_plugin), "mine", "run")
    run.publish_timeline("s3://bucket/runs/mine/timeline.json")
    assert java_plugin.timelines == []
    assert java_plugin.row("run")["timeline_is_here"] is False


def test_without_the_plugin_nothing_is_kept():
    with training_run_reports.report_run(None, "mine", "run") as run:
        assert run is training_run_reports.SILENT_RUN
        run.set_placements(seats(2))
        run.record_location(0, "1")
        run.update_rank_facts(0, {"pid": 1})
        assert run.worker_variables() == {}
        assert not run._rank_facts
        assert not run._executors


def died(rank: int, **how: Any) -> FarandoleJobError:
    return FarandoleJobError(f"rank {rank} on a was lost", rank=rank, **how)


@pytest.fixture
def loss_reasons(java_plugin):
    run = training_run_reports.TrainingRun(SparkPlugin(java_plugin), "mine", "run")
    java_plugin.queued_messages.append(
        {"kind": "removed", "executor": "1", "reason": "of a job before"}
    )
    made = ExecutorLossReasons(SparkPlugin(java_plugin), "farandole-1", run, JobOutput(verbose=0))
    run.set_placements(seats(2))
    java_plugin.queued_messages += [
        {"kind": "started", "tag": "farandole-0", "task": "0", "executor": "9"},
        {"kind": "started", "tag": "farandole-1", "task": "0", "executor": "1"},
        {"kind": "started", "tag": "farandole-1", "task": "1", "executor": "2"},
    ]
    made.poll_messages()
    return made


def test_a_death_gets_the_reason_for_which_spark_has_removed_its_executor(
    java_plugin, loss_reasons
):
    java_plugin.queued_messages.append(
        {
            "kind": "removed",
            "executor": "1",
            "reason": "Container killed by YARN for exceeding memory",
        }
    )
    error = died(1, signal_name="SIGKILL")
    loss_reasons.add_loss_reason(error)
    assert "removed executor 1, which it was in: Container killed by YARN" in str(error)
    assert java_plugin.row("event/000001") | {"time": 0} == {
        "time": 0,
        "what": "Spark has removed executor 1",
        "reason": "Container killed by YARN for exceeding memory",
    }


def test_a_removal_that_spark_tells_after_it_has_ended_the_job_is_an_event(
    java_plugin, loss_reasons
):
    removed = {"kind": "removed", "executor": "2", "reason": "Command exited with code 137"}
    later = threading.Timer(0.2, java_plugin.queued_messages.append, [removed])
    later.start()
    loss_reasons.add_loss_reason(FarandoleJobError("the Spark job has failed: stage 1 was lost"))
    later.join()
    assert java_plugin.row("event/000001")["what"] == "Spark has removed executor 2"


@pytest.mark.parametrize(
    "error", [died(0, exception_type="KeyError"), died(0, exit_code=3), FarandoleJobError("all")]
)
def test_a_failure_that_is_its_own_reason_gets_no_other(java_plugin, loss_reasons, error):
    before = str(error)
    loss_reasons.add_loss_reason(error)
    assert str(error) == before


def test_the_task_that_collects_the_rows_moves_no_rank(java_plugin, loss_reasons):
    java_plugin.queued_messages.append(
        {"kind": "started", "tag": "farandole-1", "stage": "2", "task": "0", "executor": "7"}
    )
    loss_reasons._next_poll = 0.0
    loss_reasons.poll_messages()
    assert not loss_reasons._training.has_executor("7")
    assert [loss_reasons._training.executor_of_rank(rank) for rank in range(2)] == ["2", "1"]


def test_decommissioning_and_failed_stages_of_this_job_are_events(java_plugin, loss_reasons):
    java_plugin.queued_messages += [
        {"kind": "decommissioning", "executor": "2"},
        {"kind": "decommissioning", "executor": "9"},
        {"kind": "stage", "tag": "farandole-0", "reason": "of another job"},
        {"kind": "stage", "tag": "farandole-1", "reason": "a task failed"},
    ]
    loss_reasons._next_poll = 0.0
    loss_reasons.poll_messages()
    events = [
        body["what"] for (_, key), body in java_plugin.rows.items() if key.startswith("event/")
    ]
    assert events == ["Spark decommissions executor 2", "stage failed"]


def test_a_meter_says_where_the_time_of_steps_goes():
    now, said = [0.0], []

    def passes(seconds: float) -> None:
        now[0] += seconds

    meter = StepMeter(True, said.append, lambda: now[0])
    passes(100.0)  # a validation
    meter.begin_epoch()
    for _ in range(4):
        passes(0.1)
        meter.mark_rows_read()
        passes(0.3)
        with meter.measure_reduction():
            passes(0.2)
        if not meter.has_gradient_sizes:
            meter.set_gradient_sizes(6, 2400)
        meter.end_batch(10)
    meter.report_remaining_means()
    measured = [{name: round(value, 6) for name, value in one.items()} for one in said]
    reduced = {"reduced_tensors": 6, "reduced_bytes": 2400}
    # The first step comes more than two seconds after the meter was made.
    assert measured == [
        {"step_seconds": 0.6, "data_seconds": 0.1, "reduce_seconds": 0.2, **reduced, "rows": 10},
        {"step_seconds": 0.6, "data_seconds": 0.1, "reduce_seconds": 0.2, **reduced, "rows": 40},
    ]
    for sees_data, names in ((True, {"step_seconds", "data_seconds"}), (False, {"step_seconds"})):
        meter = StepMeter(True, said.append, lambda: now[0], sees_data=sees_data)
        meter.begin_epoch()
        passes(0.1)
        meter.mark_rows_read()
        passes(0.3)
        meter.end_batch()
        meter.report_remaining_means()
        assert said.pop().keys() == names, "what nobody measures is not 0"
    off = StepMeter(False, said.append, lambda: now[0])
    off.mark_rows_read()
    off.end_batch(10)
    off.report_remaining_means()
    assert len(said) == 2

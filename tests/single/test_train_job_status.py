# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The status of a job for the operator of Kubeflow Trainer, for which a test server stands in."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.train_job_operator import PATH, TOKEN, Operator, check_operators_rules

import farandole
from farandole.runner.show import train_job_status
from farandole.runner.show.train_job_status import TrainJobProgress, report_train_job
from farandole.runner.show.training_run_reports import report_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP = {"kind": "step", "epoch": 1, "epochs": 4, "step": 5, "steps": 10, "loss": 0.25}


def report_steps() -> int:
    """A rank that reports the steps of three epochs."""
    import farandole.numpy as hvd
    from farandole.spark.task import report

    hvd.init()
    for epoch in range(3):
        hvd.barrier()
        if hvd.rank() == 0:
            report({**STEP, "epochs": 3, "epoch": epoch})
            scores = {"loss": 1 / (epoch + 1), "all_metrics": []}
            report({"kind": "epoch", "epochs": 3, "entry": {"epoch": epoch, "train": scores}})
    return hvd.size()


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    """An operator, which the environment names."""
    operator = Operator(tmp_path)
    for name, value in operator.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_job_status, "SEND_INTERVAL_SECONDS", 0.05)
    with contextlib.closing(operator):
        yield operator


def named(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def test_the_status_has_progress_time_left_and_metrics() -> None:
    now = [100.0]
    progress = TrainJobProgress(lambda: now[0])
    assert set(progress.status()) == {"lastUpdatedTime", "metrics"}
    progress.take_row("run", {"state": "running", "size": 3, "restarts": 0})
    progress.take_row("step", STEP)
    status = progress.status()
    assert status["progressPercentage"] == 37
    assert "estimatedRemainingSeconds" not in status  # nothing to measure the speed by
    now[0] += 30
    progress.take_row("step", {**STEP, "epoch": 2, "rows_per_second": 1e6 / 3})
    status = progress.status()
    # A quarter of the job took 30 s, and three eighths are left.
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (62, 45)
    values = {"loss": 0.5, "val_loss": 1e-9, "name" * 17: 1.0, "flag": True, "odd": "nan"}
    progress.take_row("epoch/00000002", {"epoch": 2, "values": values})
    status = progress.status()
    check_operators_rules(status)
    assert named(status) == {
        "ranks": "3", "restarts": "0", "epoch": "2", "loss": "0.5", "val_loss": "1e-09",
        "rows_per_second": "333333",
    }  # fmt: skip
    # A world that goes back to its last commit is timed from there.
    progress.take_row("step", {**STEP, "epoch": 0})
    assert "estimatedRemainingSeconds" not in progress.status()
    progress.take_row("step", {**STEP, "epoch": 3, "step": 10})
    assert progress.status()["progressPercentage"] == 99
    progress.take_row("run", {"state": "ended"})
    assert progress.status()["progressPercentage"] == 100
    assert progress.status()["estimatedRemainingSeconds"] == 0


def test_many_metrics_are_cut_to_those_that_the_operator_takes() -> None:
    progress = TrainJobProgress()
    progress.take_row("epoch/0", {"epoch": 0, "values": {f"m{at}": at for at in range(300)}})
    check_operators_rules(progress.status())
    assert len(progress.status()["metrics"]) == 256


def test_a_job_reports_its_status_until_its_end(operator: Operator) -> None:
    assert farandole.run(report_steps, num_proc=2) == [2, 2]
    for status in operator.statuses:
        check_operators_rules(status)
    last = operator.statuses[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert named(last)["ranks"] == "2"
    assert float(named(last)["loss"]) == pytest.approx(1 / 3, rel=1e-5)
    assert operator.refused == []


def test_a_job_that_fails_is_not_complete(operator: Operator) -> None:
    def fail() -> None:
        with report_run(None, "job", "run") as run:
            run.record_progress(STEP)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert operator.statuses[-1]["progressPercentage"] == 37


@pytest.mark.parametrize("code", [302, 403, 422, 500])
def test_an_operator_that_refuses_is_logged_once(
    operator: Operator, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    operator.answer = (code, "no such job")
    caplog.set_level(logging.WARNING, "farandole")
    with report_train_job() as reporter:
        assert reporter is not None
        for epoch in range(3):
            reporter.put_row("", "step", {**STEP, "epoch": epoch})
            while len(operator.refused) <= epoch:
                threading.Event().wait(0.01)
    (record,) = caplog.records
    assert str(code) in record.getMessage()
    assert "no such job" in record.getMessage()
    assert TOKEN not in record.getMessage()


@pytest.mark.parametrize("fault", ["authority", "token", "silent"])
def test_no_fault_of_the_way_there_ends_a_job(
    operator: Operator, fault: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    caplog.set_level(logging.WARNING, "farandole")
    expected = {"authority": "CERTIFICATE_VERIFY_FAILED", "token": "ascii", "silent": "timed out"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if fault == "authority":
            monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        elif fault == "silent":
            monkeypatch.setattr(train_job_status, "_END_TIMEOUT_SECONDS", 0.1)
            monkeypatch.setattr(train_job_status, "_REQUEST_TIMEOUT_SECONDS", 0.5)
            url = f"https://localhost:{silent.getsockname()[1]}{PATH}"
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        with report_train_job() as reporter:
            assert reporter is not None
            if fault == "token":
                operator.token.write_bytes(b"\xff\xfe")
            reporter.put_row("", "step", STEP)
        reporter._thread.join()
    assert operator.statuses == []
    assert expected[fault] in caplog.text


@pytest.mark.parametrize("missing", ["URL", "TOKEN", "file", "certificate", "https"])
def test_a_process_without_the_operators_files_reports_nothing(
    operator: Operator, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "file":
        operator.token.unlink()
    elif missing == "certificate":
        operator.certificate.unlink()
    elif missing == "https":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", operator.url.replace("https", "http"))
    else:
        monkeypatch.delenv(f"KUBEFLOW_TRAINER_SERVER_{missing}")
    with report_train_job() as reporter:
        assert reporter is None

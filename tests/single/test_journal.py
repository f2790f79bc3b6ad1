# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files that a fit's driver writes for the run viewer."""

from __future__ import annotations

import json
import logging
import time

import pytest

from farandole.runner.errors import FarandoleJobError
from farandole.runner.show import journal as journals
from farandole.runner.show import training_run_reports
from farandole.runner.show.journal import RunJournal
from farandole.spark.common.store import LocalStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def remote(tmp_path):
    return LocalStore(str(tmp_path)).to_remote("mine")


def record(tmp_path):
    return json.loads((tmp_path / "runs/mine/_record.json").read_text())


def steps(tmp_path):
    return [
        json.loads(line)
        for line in (tmp_path / "runs/mine/logs/steps.jsonl").read_text().splitlines()
    ]


def epoch(number, loss, **more):
    scores = {"loss": loss, "all_metrics": [{"accuracy": 0.5}]}
    entry = {"epoch": number, "train": scores, "seconds": 2.0, "rows": 100, **more}
    return {"kind": "epoch", "entry": entry, "epochs": 3, "steps": 4, "rows_per_second": 50.0}


def step(number, of, loss):
    place = {"epoch": number, "epochs": 3, "step": of, "steps": 4}
    return {"kind": "step", **place, "rows_per_second": 10.0, "loss": loss}


def fail(run):
    run.add_event("executor lost", "killed")
    raise FarandoleJobError("rank 1 on b failed")


def test_a_run_is_recorded_from_its_start_to_its_end(remote, tmp_path):
    book = RunJournal(remote, {"model": "Net", "epochs": 3})
    with training_run_reports.report_run(
        None, "mine", "TorchEstimator", {"lr": 0.1, "nan": float("nan")}, book
    ) as run:
        assert run.worker_variables() == {training_run_reports.REPORTS_VARIABLE: "1"}
        deadline = time.monotonic() + 30
        while not (tmp_path / "runs/mine/_record.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert record(tmp_path)["state"] == "running"
        run.set_placements([{"rank": 0, "task": 7, "host": "a"}])
        run.update_rank_facts(7, {"pid": 12, "step_seconds": 0.5})
        run.record_progress(step(0, 2, 1.5))
        run.record_progress(epoch(0, 1.0))
        run.record_progress(epoch(1, 0.5))
        run.record_progress(epoch(2, 0.7))
        run.record_restart("rank 0 was lost")
    book.close()
    told = record(tmp_path)
    assert (told["name"], told["what"], told["model"], told["state"]) == (
        "mine",
        "TorchEstimator",
        "Net",
        "ended",
    )
    assert told["parameters"] == {"lr": 0.1, "nan": "nan"}
    assert told["updated"] >= told["ended"] >= told["started"]
    assert told["last"] == {"loss": 0.7, "accuracy": 0.5}
    assert (told["done"], told["best"]) == (3, {"name": "loss", "value": 0.5, "epoch": 2})
    assert told["ranks"][0] | {"executor": None} == {
        "rank": 0, "task": 7, "host": "a", "executor": None, "pid": 12, "step_seconds": 0.5,
    }  # fmt: skip
    assert [one["what"] for one in told["events"]] == ["restart"]
    assert told["restarts"] == 1
    assert told["environment"]["python"]
    assert [(one["epoch"], one["loss"]) for one in steps(tmp_path)] == [(0.5, 1.5)]


def test_a_failed_run_says_why_and_its_events_stay_when_it_continues(remote, tmp_path):
    book = RunJournal(remote, {})
    with (
        pytest.raises(FarandoleJobError),
        training_run_reports.report_run(None, "mine", "x", {}, book) as run,
    ):
        fail(run)
    book.close()
    told = record(tmp_path)
    assert (told["state"], told["reason"]) == ("failed", "rank 1 on b failed")
    book = RunJournal(remote, {})
    with training_run_reports.report_run(None, "mine", "x", {}, book):
        pass
    book.close()
    told = record(tmp_path)
    assert told["state"] == "ended"
    assert "reason" not in told
    assert [one["what"] for one in told["events"]] == ["executor lost"]


def test_an_epoch_that_comes_again_replaces_what_came_after_it(remote, tmp_path):
    clock = Clock()
    book = RunJournal(remote, {}, clock)
    for number in range(2):
        for of in (2, 4):
            book.put_row("", "step", step(number, of, 1.0))
            clock.now += 1
        body = {"epoch": number, "values": {"loss": 1.0}, "seconds": 2.0}
        book.put_row("", f"epoch/{number}", body)
    book.put_row("", "step", step(1, 2, 9.0))
    book.close()
    told = steps(tmp_path)
    assert [one["epoch"] for one in told] == [0.5, 1.0, 1.5]
    assert told[-1]["loss"] == 9.0
    assert [one["seconds"] for one in told] == [0.0, 1.0, 2.0]


def test_steps_are_thinned_and_the_last_ones_are_there(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "_MAX_STEPS", 100)
    book = RunJournal(remote, {})
    for number in range(5000):
        book.put_row("", "step", {**step(0, number, 1.0), "steps": 5000})
    book.close()
    told = [one["epoch"] for one in steps(tmp_path)]
    assert 40 < len(told) <= 100
    assert told == sorted(told)
    assert told[-1] > 0.95


def test_what_ranks_print_is_kept_also_when_the_job_starts_again(remote, tmp_path):
    book = RunJournal(remote, {}, output=tmp_path / "output")
    with training_run_reports.report_run(None, "mine", "x", {}, book) as run:
        run.set_placements([{"rank": rank, "task": rank, "host": "a"} for rank in range(11)])
        run.write_line(1, "stdout", "before")
        run.record_restart("rank 2 was lost")
        run.write_line(1, "stdout", "after")
        run.write_line(10, "stderr", "alas")
    book.close()
    assert (tmp_path / "output/rank.01/stdout").read_text() == "before\nafter\n"
    assert (tmp_path / "output/rank.10/stderr").read_text() == "alas\n"
    assert (tmp_path / "output/rank.00/stdout").read_text() == ""


@pytest.mark.parametrize("fits", range(1, 4))
def test_a_repeated_fit_adds_to_the_output_of_the_one_that_crashed(remote, tmp_path, fits):
    for number in range(fits):
        book = RunJournal(remote, {}, output=tmp_path / "output")
        book.put_row("r", "run", {"size": 2})
        for rank in range(2):
            book.write_line(rank, "stderr", f"fit {number}")
        book.close()
    for rank in range(2):
        text = (tmp_path / f"output/rank.{rank}/stderr").read_text()
        assert text.splitlines() == [f"fit {number}" for number in range(fits)]


def test_output_that_cannot_be_kept_fails_no_run(remote, tmp_path, caplog):
    (tmp_path / "output").write_text("not a directory")
    book = RunJournal(remote, {}, output=tmp_path / "output")
    with (
        caplog.at_level(logging.WARNING, "farandole"),
        training_run_reports.report_run(None, "mine", "x", {}, book) as run,
    ):
        run.write_line(0, "stdout", "one")
        run.write_line(0, "stdout", "two")
    book.close()
    assert (
        len([one for one in caplog.records if "what ranks print cannot be written" in one.message])
        == 1
    )


def test_a_store_that_fails_fails_no_run(remote, tmp_path, caplog):
    (tmp_path / "runs").write_text("not a directory")
    with caplog.at_level(logging.WARNING, "farandole"):
        book = RunJournal(remote, {})
        with training_run_reports.report_run(None, "mine", "x", {}, book) as run:
            run.add_event("something", None)
        book.close()
    assert len([one for one in caplog.records if "run viewer" in one.message]) == 1

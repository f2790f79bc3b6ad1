# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Outcomes of tasks in rows, and the choice of the failure that is raised."""

from __future__ import annotations

import pickle
import random

import pytest

from farandole.runner import worker_task_outcome
from farandole.runner.errors import FarandoleJobError
from farandole.runner.worker_task_outcome import TaskOutcome, results_by_rank


def well(task: int, value: object) -> TaskOutcome:
    return TaskOutcome(task, "host", rank=task, exit_code=0, result=pickle.dumps(("ok", value)))


def test_endings_survive_their_rows_in_any_order(monkeypatch):
    monkeypatch.setattr(worker_task_outcome, "RESULT_CHUNK_BYTES", 7)
    endings = [
        well(0, list(range(50))),
        TaskOutcome(
            1,
            "other",
            rank=1,
            signal_name="SIGKILL",
            stderr_tail="ä\nb",
            aborted=True,
            reason="rank 0 failed",
        ),
        TaskOutcome(2, "third", refused="PermissionError: no", result=None),
    ]
    rows = [row for ending in endings for row in ending.to_rows()]
    random.Random(5).shuffle(rows)
    assert len(rows) > 10
    assert TaskOutcome.from_rows(rows) == endings


def test_a_row_carries_at_most_eight_mebibytes():
    ending = TaskOutcome(0, "host", rank=0, exit_code=0, result=bytes((16 << 20) + 1))
    assert [len(data) for _, kind, _, data in ending.to_rows() if kind == "result"] == [
        8 << 20,
        8 << 20,
        1,
    ]


def test_results_are_ordered_by_rank_not_by_task():
    swapped = [
        TaskOutcome(task, "host", rank=1 - task, exit_code=0, result=pickle.dumps(("ok", 1 - task)))
        for task in (0, 1)
    ]
    assert results_by_rank(swapped, 2) == [0, 1]


def test_the_rank_that_ended_by_itself_is_blamed():
    endings = [
        TaskOutcome(0, "a", rank=0, signal_name="SIGTERM", aborted=True, reason="rank 2 failed"),
        well(1, None),
        TaskOutcome(2, "c", rank=2, exit_code=3),
    ]
    with pytest.raises(FarandoleJobError, match="rank 2 on c exited with code 3") as caught:
        results_by_rank(endings, 3)
    assert (caught.value.rank, caught.value.host, caught.value.exit_code) == (2, "c", 3)


def test_a_gang_that_lost_its_agent_tells_the_registrars_reason():
    endings = [
        TaskOutcome(
            0,
            "a",
            rank=0,
            signal_name="SIGTERM",
            aborted=True,
            reason="rank 1 on b was lost: silent",
        )
    ]
    with pytest.raises(FarandoleJobError, match="rank 1 on b was lost: silent"):
        results_by_rank(endings, 2)


def test_a_task_without_rows_is_named():
    with pytest.raises(FarandoleJobError, match=r"no rows of these tasks: \[1\]"):
        results_by_rank([well(0, 1)], 2)


def test_a_traceback_that_is_on_stderr_too_is_shown_once():
    told = ("ValueError", "odd", "Traceback (most recent call last):\nValueError: odd\n", None)
    tail = f"before\n{told[2]}"
    ending = TaskOutcome(
        0, "h", rank=0, exit_code=1, stderr_tail=tail, result=pickle.dumps(("error", *told))
    )
    error, origin = worker_task_outcome.task_failure(ending)
    assert origin is None
    assert str(error).count("Traceback") == 1
    assert error.stderr_tail == tail


def test_a_result_that_cannot_be_unpickled_names_its_rank():
    spoilt = TaskOutcome(0, "h", rank=0, exit_code=0, result=b"\x80\x04cno_such_module\nthing\n.")
    with pytest.raises(FarandoleJobError, match=r"rank 0 on h returned a value .*no_such_module"):
        results_by_rank([spoilt], 1)

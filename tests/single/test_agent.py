# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An agent whose gang breaks up, with a launcher that plays a script."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from farandole._native import launcher
from farandole.runner import agent
from farandole.runner.agent import WorkerSpec, run_worker
from farandole.spark.job.agents import BARRIER_REJOIN_SECONDS


def outcome(**told: object) -> SimpleNamespace:
    """A worker's end; by default it was ended because another start of a task came."""
    plain = {
        "rank": 0,
        "exit_code": None,
        "signal_name": "SIGTERM",
        "stderr_tail": "",
        "aborted": True,
        "reason": "task 1 was started again, as attempt 5",
        "result": None,
        "retry": True,
    }
    return SimpleNamespace(**(plain | told))


GOOD = outcome(
    exit_code=0, signal_name=None, aborted=False, reason=None, result=b"result", retry=False
)


@pytest.fixture
def played(monkeypatch):
    """Plays outcomes; gives the attempts, whether agents wait for each other, and the pauses."""

    def play(work: WorkerSpec, *outcomes: SimpleNamespace):
        script, attempts, pauses = list(outcomes), [], []

        def run_agent(*_args: object, **options: object) -> SimpleNamespace:
            attempts.append((options["attempt"], options["together"]))
            return script.pop(0)

        monkeypatch.setattr(launcher, "run_agent", run_agent)
        monkeypatch.setattr(agent.time, "sleep", pauses.append)
        return run_worker(work, 0, 7), attempts, pauses

    return play


def test_an_agent_of_a_barrier_stage_that_is_left_alone_registers_again_as_a_later_start(played):
    ending, attempts, pauses = played(
        WorkerSpec("ticket", b"", rejoin_after=BARRIER_REJOIN_SECONDS), outcome(), GOOD
    )
    assert ending.has_succeeded
    assert attempts == [(7 << 16, True), ((7 << 16) + 1, True)]
    assert pauses == [BARRIER_REJOIN_SECONDS]


def test_an_agent_of_independent_tasks_registers_again_at_once(played):
    ending, attempts, pauses = played(
        WorkerSpec("ticket", b"", rejoin_after=0.0), outcome(), outcome(), GOOD
    )
    assert ending.has_succeeded
    assert len(attempts) == 3
    assert pauses == [0.0, 0.0]


def test_a_failure_and_an_end_without_spark_run_nothing_again(played):
    failed = outcome(
        exit_code=1,
        signal_name=None,
        aborted=False,
        retry=False,
        reason="rank 0 exited with code 1",
    )
    ending, attempts, _ = played(
        WorkerSpec("ticket", b"", rejoin_after=BARRIER_REJOIN_SECONDS), failed
    )
    assert (ending.exit_code, len(attempts)) == (1, 1)
    ending, attempts, _ = played(WorkerSpec("ticket", b""), outcome())
    assert (ending.aborted, attempts) == (True, [(7 << 16, False)])

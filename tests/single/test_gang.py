# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reactions of the driver to events, with a registrar and agents that play a script."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from types import SimpleNamespace

import pytest

from farandole.runner import gang
from farandole.runner.errors import FarandoleJobError
from farandole.runner.event_handler import LAST_LINES_NOTE, LINES_IN_TASK_LOG_NOTE
from farandole.runner.gang import GangAgents, JobOutput, run_gang
from farandole.runner.job_observer import JobObserver
from farandole.runner.worker_task_outcome import TaskOutcome, results_by_rank
from farandole.spark.job import task_rendezvous

FIELDS = ("task", "rank", "stream", "text", "data", "exit_code", "signal", "stderr_tail")


def event(kind: str, **told: object) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, dropped=0, **{name: told.get(name) for name in FIELDS})


class Script(GangAgents):
    """Plays both sides: each call of `events` hands out the next batch; the agents are done when
    told.
    """

    def __init__(
        self, *batches: list[SimpleNamespace], endings: list[TaskOutcome] | None = None
    ) -> None:
        self.batches = list(batches)
        self.given = endings
        self.aborted: str | None = None
        self.cancelled = 0
        self.closed = False

    def events(self, _timeout: float) -> list[SimpleNamespace]:
        return self.batches.pop(0) if self.batches else []

    def rank_assignment(self) -> list[dict]:
        return [{"rank": rank, "task": rank, "host": f"host-{rank}"} for rank in range(2)]

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def close(self) -> None:
        self.closed = True

    def start_agents(self) -> None:
        pass

    def all_ended(self) -> bool:
        return self.cancelled > 0 or (self.given is not None and not self.batches)

    def cancel_agents(self) -> None:
        self.cancelled += 1

    def task_outcomes(self) -> list[TaskOutcome]:
        assert self.given is not None
        return self.given


def play(script: Script, on_progress=None, start_timeout=60.0, **output) -> list[TaskOutcome]:
    return run_gang(
        script, script, 2, JobOutput(**output), on_progress, start_timeout, "Spark tasks to start"
    )


STARTED = [event("registered", task=0), event("registered", task=1), event("assigned")]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    for name in (
        "_GRACE_AFTER_VERDICT",
        "_GRACE_AFTER_EXIT",
        "_GRACE_AFTER_ABORT",
        "_GRACE_FOR_ROWS",
    ):
        monkeypatch.setattr(gang, name, 0.0)


def test_the_verdicts_rank_is_blamed_when_its_task_brings_no_rows():
    script = Script(
        STARTED,
        [event("log", task=1, rank=1, stream="stderr", text="last words")],
        [event("exit", task=1, rank=1, signal=9)],
        [event("aborted", task=1, rank=1, text="rank 1 on host-1 was ended by SIGKILL")],
    )
    with pytest.raises(
        FarandoleJobError, match="rank 1 on host-1 was ended by signal SIGKILL"
    ) as caught:
        play(script, stdout=io.StringIO(), stderr=io.StringIO())
    assert caught.value.stderr_tail == "last words"
    assert script.aborted is not None
    assert script.cancelled > 0
    assert script.closed


def test_without_streams_the_exit_of_a_rank_has_its_last_lines_of_stderr():
    script = Script(STARTED, [event("exit", task=1, rank=1, signal=9, stderr_tail="last\nwords")])
    with pytest.raises(FarandoleJobError) as caught:
        play(script)
    assert caught.value.stderr_tail == "last\nwords"


class Lines(JobObserver):
    """Keeps the lines that it is told."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[str]] = {}

    def write_line(self, rank: int, stream: str, text: str) -> None:
        self.lines.setdefault((rank, stream), []).append(text)


def test_a_watcher_gets_the_last_lines_of_stderr_once_and_a_note_that_the_rest_is_elsewhere():
    ends = [
        event("exit", task=rank, rank=rank, exit_code=0, stderr_tail="a warning\nanother")
        for rank in range(2)
    ]
    for streams in ({}, {"stdout": io.StringIO(), "stderr": io.StringIO()}):
        watcher = Lines()
        script = Script(
            [*STARTED, event("log", task=1, rank=1, stream="stdout", text="here")], ends, endings=[]
        )
        with contextlib.suppress(FarandoleJobError):
            run_gang(script, script, 2, JobOutput(**streams), None, 60.0, "tasks", watcher)
        if streams:
            assert watcher.lines == {(1, "stdout"): ["here"]}
        else:
            assert watcher.lines[0, "stderr"] == [
                LINES_IN_TASK_LOG_NOTE,
                LAST_LINES_NOTE,
                "a warning",
                "another",
            ]
            assert watcher.lines[0, "stdout"] == [LINES_IN_TASK_LOG_NOTE]


def test_a_lost_agent_is_left_to_spark_which_starts_the_gang_again(capsys):
    again = [event("registered", task=task) for task in (1, 0)]
    script = Script(
        STARTED,
        [event("lost", task=1, rank=1, text="its agent's connection closed")],
        [event("aborted", task=1, rank=1, text="rank 1 on host-1 was lost")],
        [],
        [*again, event("assigned")],
        [event("exit", task=0, rank=0, exit_code=0), event("exit", task=1, rank=1, exit_code=0)],
        endings=[],
    )
    assert play(script) == []
    assert script.aborted is None
    said = capsys.readouterr().err
    assert "task 1 (rank 1 on host-1) was lost: its agent's connection closed" in said
    assert said.count("started again by Spark") == 1


class Clock:
    """Time that passes when a script says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(gang.time, "monotonic", lambda: self.now)

    def passes(self, script: Script, *seconds: float) -> None:
        """So many with each batch of the script."""
        left, batch = list(seconds), script.events

        def events(timeout: float) -> list[SimpleNamespace]:
            self.now += left.pop(0) if left else 0.0
            return batch(timeout)

        script.events = events


def well(*tasks: int) -> list[SimpleNamespace]:
    return [event("exit", task=task, rank=task, exit_code=0) for task in tasks]


def answer(task: int, value: str) -> SimpleNamespace:
    return event("result", task=task, rank=task, data=pickle.dumps(("ok", value)))


def test_a_task_that_is_started_again_before_its_loss_is_noticed_gives_the_new_gang_no_time_limit(
    monkeypatch,
):
    script = Script(
        STARTED,
        # The verdict on the old generation comes behind the registration that it follows from.
        [
            event("registered", task=1),
            event("aborted", text="task 1 was started again, as attempt 2"),
        ],
        [event("registered", task=0), event("assigned")],
        [],
        well(0, 1),
        endings=[],
    )
    Clock(monkeypatch).passes(script, 1, 7200, 5, 601, 1)
    assert play(script, start_timeout=600.0) == []


def test_a_worker_of_the_old_gang_that_ends_late_does_not_end_the_new_one(monkeypatch):
    script = Script(
        STARTED,
        [
            event("lost", task=1, rank=1, text="gone"),
            event("aborted", task=1, rank=1, text="rank 1 was lost"),
        ],
        [event("registered", task=1)],
        [event("exit", task=0, rank=0, signal=9)],
        [event("registered", task=0), event("assigned")],
        [],
        [],
        well(0, 1),
        endings=[],
    )
    Clock(monkeypatch).passes(script, 1, 7200, 1, 1, 4, 60, 60, 1)
    assert play(script) == []


def test_results_of_the_old_gang_are_none_of_the_new_one(monkeypatch):
    script = Script(
        STARTED,
        [
            event("registered", task=1),
            event("aborted", text="task 1 was started again, as attempt 2"),
        ],
        [answer(0, "old"), *well(0)],
        [event("registered", task=0), event("assigned")],
        [answer(1, "new"), *well(1)],
        *([] for _ in range(30)),
        [answer(0, "new"), *well(0)],
        [],
        endings=[
            TaskOutcome(0, "host-0", refused="the job is done"),
            TaskOutcome(1, "host-1", refused="the job is done"),
        ],
    )
    Clock(monkeypatch).passes(script, *([1] * 40))
    assert results_by_rank(play(script), 2) == ["new", "new"]


def test_results_that_only_rows_would_bring_are_given_up_when_no_rows_come(monkeypatch):
    script = Script(STARTED, well(0, 1), *([] for _ in range(100)), endings=[])
    Clock(monkeypatch).passes(script, *([1] * 102))
    with pytest.raises(
        FarandoleJobError,
        match=r"all workers ended successfully, but Spark has not .* for 60 s.*store=",
    ):
        play(script, start_timeout=60.0)


class Spilled:
    """A store in which the host of a gang has written down what happens."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.away = False

    def list_files(self, _folder: str) -> list[str]:
        return sorted(self.files)

    def read_file(self, name: str) -> bytes:
        if self.away:
            raise OSError("the store is away")
        return json.dumps({"kind": self.files[name]}).encode()


def test_records_are_read_when_the_store_is_back(monkeypatch):
    monkeypatch.setattr(task_rendezvous, "_EVENT_INTERVAL", 0.0)
    spilled = Spilled()
    tail = task_rendezvous.StoredEventReader(spilled)
    spilled.files["events/1-1.jsonl"], spilled.away = "registered", True
    assert list(tail.new_events()) == []
    spilled.away = False
    assert [event.kind for event in tail.new_events()] == ["registered"]
    assert list(tail.new_events()) == []


def test_a_job_older_than_its_start_timeout_is_given_that_time_again_when_an_executor_is_lost(
    monkeypatch,
):
    lost = [
        event("lost", task=1, rank=1, text="gone"),
        event("aborted", task=1, rank=1, text="rank 1 was lost"),
    ]
    script = Script(
        STARTED,
        lost,
        [event("registered", task=1)],
        [event("registered", task=0), event("assigned")],
        [event("exit", task=0, rank=0, exit_code=0), event("exit", task=1, rank=1, exit_code=0)],
        endings=[],
    )
    # Hours of training, then less than the limit for each step on the way back.
    Clock(monkeypatch).passes(script, 1, 7200, 50, 50, 1)
    assert play(script, start_timeout=60.0) == []


def test_an_incomplete_gang_is_given_up_with_the_reason_for_its_end(monkeypatch):
    script = Script(
        STARTED, [event("aborted", task=1, rank=1, text="rank 1 on host-1 was lost: silence")]
    )
    Clock(monkeypatch).passes(script, 1, 7200, 59, 2)
    with pytest.raises(
        TimeoutError,
        match=r"within 60 s after the last one ended: rank 1 on host-1 was lost: silence",
    ):
        play(script, start_timeout=60.0)
    assert script.closed


def test_an_error_of_spark_that_follows_a_loss_names_the_lost_rank_and_its_host(monkeypatch):
    script = Script(
        STARTED,
        [event("lost", task=1, rank=1, text="its agent was silent for 5.0 s")],
        [event("aborted", task=1, rank=1, text="rank 1 on host-1 was lost")],
        [event("registered", task=0)],
        endings=[],
    )

    told = FarandoleJobError(
        "the Spark job has failed: worker lost", rank=0, host="host-0", exit_code=3
    )
    told.exception_type, told.__cause__ = "builtins.KeyError", KeyError("x")

    def endings():
        raise told

    monkeypatch.setattr(script, "task_outcomes", endings)
    with pytest.raises(
        FarandoleJobError,
        match=(
            r"worker lost; before that, task 1 \(rank 1 on host-1\) was lost: its agent was "
            r"silent"
        ),
    ) as caught:
        play(script, stdout=io.StringIO(), stderr=io.StringIO())
    error = caught.value
    assert (error.rank, error.host, error.exit_code, error.exception_type) == (
        0,
        "host-0",
        3,
        "builtins.KeyError",
    )
    assert isinstance(error.__cause__, KeyError)


def test_published_results_answer_for_rows_that_spark_lost(capsys):
    script = Script(
        STARTED,
        [event("result", task=task, rank=task, data=pickle.dumps(("ok", task))) for task in (0, 1)],
        [event("exit", task=task, rank=task, exit_code=0) for task in (0, 1)],
        endings=[
            TaskOutcome(0, "host-0", refused="the job is done"),
            TaskOutcome(1, "host-1", refused="the job is done"),
        ],
    )
    assert results_by_rank(play(script), 2) == [0, 1]
    assert "the driver has their results" in capsys.readouterr().err


def test_published_results_answer_for_rows_that_never_come(monkeypatch, capsys):
    script = Script(
        STARTED,
        [event("result", task=task, rank=task, data=pickle.dumps(("ok", task))) for task in (0, 1)],
        [event("exit", task=task, rank=task, exit_code=0) for task in (0, 1)],
        # Spark has lost an executor, and runs nothing again.
        *([] for _ in range(60)),
        endings=[],
    )
    Clock(monkeypatch).passes(script, 1, 7200, *([1] * 61))
    assert results_by_rank(play(script), 2) == [0, 1]
    assert script.cancelled
    assert len(script.batches) > 40
    assert "the driver has their results" in capsys.readouterr().err


def test_a_published_failure_is_raised_with_its_traceback_when_no_rows_come():
    told = ("error", "ValueError", "odd", "Traceback of the odd one", None)
    script = Script(
        STARTED,
        [event("result", task=1, rank=1, data=pickle.dumps(told))],
        [event("exit", task=1, rank=1, exit_code=1)],
    )
    with pytest.raises(
        FarandoleJobError, match="rank 1 on host-1 failed: ValueError: odd"
    ) as caught:
        play(script)
    assert caught.value.remote_traceback == "Traceback of the odd one"


def test_registered_tasks_get_an_error_at_the_timeout():
    script = Script([event("registered", task=1)])
    with pytest.raises(
        TimeoutError, match=r"Timed out waiting for Spark tasks to start.* 1 of 2 tasks"
    ):
        play(script, start_timeout=0.0)
    assert script.closed


def test_records_of_other_kinds_do_not_reach_the_callback():
    seen = []
    script = Script(
        STARTED,
        [
            event("metric", rank=1, text="progress", data=json.dumps({"step": 3}).encode()),
            event("metric", rank=1, text="stall", data=b"\x00"),
        ],
        endings=[],
    )
    play(script, on_progress=lambda rank, record: seen.append((rank, record)))
    assert seen == [(1, {"step": 3})]


def test_dropped_lines_are_counted_not_hidden(capsys):
    late = event("log", task=0, rank=0, stream="stdout", text="here")
    late.dropped = 12
    out = io.StringIO()
    play(Script(STARTED, [late], endings=[]), stdout=out)
    assert out.getvalue() == "[0]<stdout>:here\n"
    assert "dropped 12 lines of workers" in capsys.readouterr().err


def test_silence_is_kept_at_verbose_0(capsys):
    play(Script(STARTED, [event("lost", task=0, text="gone")], endings=[]), verbose=0)
    assert capsys.readouterr() == ("", "")

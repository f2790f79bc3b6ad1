# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports a run to Spark's Training tab and the run viewer: its state, epochs, ranks and events.

The reports go to the Spark plugin and to the run's journal. Without both, the functions here do
nothing. They never raise an exception.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import secrets
import time
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.runner import timelines
from farandole.runner.job_observer import REPORTS_VARIABLE, JobObserver
from farandole.runner.show.history import flatten_history_entry
from farandole.runner.show.metrics_export import export_run_metrics
from farandole.runner.show.train_job_status import report_train_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from farandole.runner.show.run_reporter import RunReportReceiver

_STEP_INTERVAL = 0.5
_RANK_INTERVAL = 1.0
_LOGGED_RANK_INTERVAL = 30.0
"""Seconds between the rows of ranks that the event log keeps."""
_TIME_GAUGES: Final = (
    ("stepSeconds", "step_seconds"),
    ("reduceSeconds", "reduce_seconds"),
    ("waitSeconds", "data_seconds"),
)
_HIDDEN_ENTRY_KEYS: Final = ("epoch", "seconds", "rows", "steps")
_MAX_EVENT_CHARACTERS = 2000
_CURRENT_RUN: ContextVar[TrainingRun | None] = ContextVar("farandole_training", default=None)


class TrainingRun(JobObserver):
    """Reports one run to the receivers.

    Args:
        shim: The plugin; `None` where there is none.
        name: The user's name for the run.
        kind: The estimator's class, or `run`.
        parameters: Plain values by name.
        others: Other receivers.
    """

    def __init__(
        self,
        shim: RunReportReceiver | None,
        name: str = "",
        kind: str = "",
        parameters: Mapping[str, Any] = {},
        others: Iterable[RunReportReceiver | None] = (),
    ) -> None:
        self._shim = shim
        self._reporters: list[RunReportReceiver] = [
            reporter for reporter in (shim, *others) if reporter is not None
        ]
        self._id = f"{int(time.time() * 1000):x}-{secrets.token_hex(3)}"
        self._run: dict[str, Any] = {
            "name": name,
            "what": kind,
            "state": "running",
            "started": _now_millis(),
            "restarts": 0,
            "losses": 0,
            "tags": [],
            "parameters": {key: json_safe(value) for key, value in parameters.items()},
        }
        with contextlib.suppress(Exception):  # a process whose user has no name
            self._run["user"] = getpass.getuser()
        self._seats: list[dict[str, Any]] = []
        self._rank_facts: dict[int, dict[str, Any]] = {}
        self._executors: dict[int, str] = {}
        self._exit_states: dict[int, str] = {}
        self._poll_callback: Callable[[], None] | None = None
        self._events = 0
        self._step_at = self._ranks_at = self._logged_at = -math.inf
        self._put_run()

    def handle_tick(self) -> None:
        """Like `JobObserver.handle_tick`."""
        if self._poll_callback is not None:
            self._poll_callback()

    def set_poll_callback(self, ask: Callable[[], None]) -> None:
        """Sets a function that every `handle_tick` calls, if there is a plugin.

        Args:
            ask: Asks the plugin for events of the job.
        """
        if self._shim is not None:
            self._poll_callback = ask

    def worker_variables(self) -> dict[str, str | None]:
        """Returns variables that make workers report their progress."""
        return {REPORTS_VARIABLE: "1"} if self._reporters else {}

    def set_job_tag(self, tag: str, size: int) -> None:
        """Sets the tag of the Spark jobs of the run, by which the tab finds their stages.

        Args:
            tag: A job's tag.
            size: Number of ranks.
        """
        self._run["tags"].append(tag)
        self._run["size"] = size
        self._put_run()

    def set_placements(self, seats: Iterable[Mapping[str, Any]]) -> None:
        """Takes the places of the ranks, when they are known or have changed.

        Args:
            seats: One for each rank.
        """
        if not self._reporters:
            return
        self._exit_states.clear()
        self._seats = [
            {"rank": seat["rank"], "task": seat["task"], "host": seat["host"]} for seat in seats
        ]
        self._seats.sort(key=lambda seat: seat["rank"])
        self._run["size"] = len(self._seats)
        self._put_run()
        self._put_ranks(logged=True)

    def record_location(self, task: int, where: str) -> None:
        """Takes the executor of a task.

        Args:
            task: Number of the task.
            where: Number of the executor.
        """
        if self._reporters:
            self._executors[task] = where

    def has_executor(self, executor: str) -> bool:
        """Returns whether a task of the run is, or was, in an executor.

        Args:
            executor: The executor's number.
        """
        return executor in self._executors.values()

    def executor_of_rank(self, rank: int | None) -> str | None:
        """Returns the executor of a rank; `None` where it is not known.

        Args:
            rank: Number of the rank; `None` has no executor.
        """
        return next(
            (self._executors.get(seat["task"]) for seat in self._seats if seat["rank"] == rank),
            None,
        )

    def update_rank_facts(self, task: int, record: Mapping[str, Any]) -> None:
        """Takes a worker's report about itself, possibly before the worker has a rank.

        Args:
            task: Number of the worker's task.
            record: The worker's process, GPU and use of time.
        """
        if not self._reporters:
            return
        facts = self._rank_facts.setdefault(task, {})
        pid = facts.get("pid")
        if pid is not None and record.get("pid", pid) != pid:
            facts.clear()  # of an earlier process of the task
        facts.update({name: json_safe(value) for name, value in record.items()})
        now = time.monotonic()
        if now - self._ranks_at >= _RANK_INTERVAL:
            self._put_ranks(logged=now - self._logged_at >= _LOGGED_RANK_INTERVAL)

    def mark_worker_gone(self, task: int, state: str) -> None:
        """Like `JobObserver.mark_worker_gone`."""
        if not self._reporters:
            return
        self._exit_states[task] = state
        # All ranks of a gang may leave in one moment. The last report of the ranks is at the end of
        # the run.
        if time.monotonic() - self._ranks_at >= _RANK_INTERVAL:
            self._put_ranks(logged=False)

    def write_line(self, rank: int, stream: str, text: str) -> None:
        """Like `JobObserver.write_line`."""
        for reporter in self._reporters:
            reporter.write_line(rank, stream, text)

    def publish_timeline(self, location: str) -> None:
        """Reports that the timeline of all ranks is written.

        Args:
            location: Path or URL of the file.
        """
        is_here = Path(location).is_file()
        self._run |= {"timeline": location, "timeline_is_here": is_here}
        for reporter in self._reporters if is_here else ():
            reporter.publish_timeline(self._id, location)
        self._put_run()

    def record_progress(self, record: Mapping[str, Any]) -> None:
        """Takes a report of an estimator's training function.

        Args:
            record: A report that `farandole.runner.report_validation` has checked.
        """
        if not self._reporters:
            return
        kind = record.get("kind")
        if kind == "step":
            now = time.monotonic()
            if now - self._step_at >= _STEP_INTERVAL:
                self._step_at = now
                self._put_row("step", record, logged=False)
                self._report_rate(record)
        elif kind == "epoch":
            entry = record["entry"]
            numbers = {
                name: value
                for name, value in flatten_history_entry(entry).items()
                if name not in _HIDDEN_ENTRY_KEYS
            }
            body = {"epoch": entry["epoch"], "loss": numbers.get("loss"), "values": numbers}
            more = {name: entry.get(name) for name in ("seconds", "rows")}
            self._put_row(
                f"epoch/{entry['epoch']:08d}",
                body | more | {"rows_per_second": record.get("rows_per_second")},
            )
            self._report_rate(record)

    def add_event(self, event_text: str, reason: str | None) -> None:
        """Shows an event: a rank was lost, an executor was removed, or the job started again.

        Args:
            event_text: The event in a few words.
            reason: Reason of the event, if known.
        """
        self._events += 1
        body = {
            "time": _now_millis(),
            "what": event_text[:_MAX_EVENT_CHARACTERS],
            "reason": (reason or "")[:_MAX_EVENT_CHARACTERS],
        }
        self._put_row(f"event/{self._events:06d}", body)

    def record_loss(self, event_text: str, reason: str | None) -> None:
        """Shows the loss of a worker or a host, and counts it.

        Args:
            event_text: The worker or host in a few words.
            reason: Reason of the loss, if known.
        """
        self._run["losses"] += 1
        self.add_event(event_text, reason)
        self._put_run()

    def record_restart(self, reason: str) -> None:
        """Reports that the job starts again after a failure.

        Args:
            reason: Reason of the failure.
        """
        self._run["restarts"] += 1
        self.add_event("restart", reason)
        self._put_run()
        self._set_gauge("restarts", self._run["restarts"])

    def mark_ended(self, error: BaseException | None) -> None:
        """Reports the end of the run.

        Args:
            error: The failure; `None` after success.
        """
        stopped = isinstance(error, KeyboardInterrupt)
        self._run |= {
            "state": "ended" if error is None else "interrupted" if stopped else "failed",
            "ended": _now_millis(),
        }
        if error is not None:
            self._run["reason"] = (
                str(getattr(error, "reason", "") or error) or type(error).__name__
            )[:_MAX_EVENT_CHARACTERS]
        if self._seats:
            self._put_ranks(logged=True)
        self._put_run()

    def _report_rate(self, record: Mapping[str, Any]) -> None:
        speed = record.get("rows_per_second")
        if isinstance(speed, int | float) and math.isfinite(speed):
            self._set_gauge("rowsPerSecond", speed)

    def _set_gauge(self, name: str, value: float) -> None:
        for reporter in self._reporters:
            reporter.set_gauge(name, value)

    def _put_ranks(self, *, logged: bool) -> None:
        self._ranks_at = time.monotonic()
        self._logged_at = self._ranks_at if logged else self._logged_at
        ranks = [
            seat
            | {"executor": self._executors.get(seat["task"])}
            | self._rank_facts.get(seat["task"], {})
            | self._rank_state(seat)
            for seat in self._seats
        ]
        self._put_row("ranks", {"ranks": ranks}, logged=logged)
        for gauge, name in _TIME_GAUGES:
            known = [value for one in ranks if isinstance(value := one.get(name), int | float)]
            if known:
                self._set_gauge(gauge, sum(known) / len(known))

    def _rank_state(self, seat: Mapping[str, Any]) -> dict[str, str]:
        state = self._exit_states.get(seat["task"])
        return {} if state is None else {"state": state}

    def _put_run(self) -> None:
        self._put_row("run", self._run)

    def _put_row(self, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        for reporter in self._reporters:
            # a record that JSON cannot hold: the training continues without it
            with contextlib.suppress(Exception):
                reporter.put_row(self._id, key, json_safe(dict(body)), logged=logged)


@contextlib.contextmanager
def report_run(
    shim: RunReportReceiver | None,
    name: str,
    kind: str,
    parameters: Mapping[str, Any] = {},
    *others: RunReportReceiver | None,
    metrics_address: str | None = None,
) -> Iterator[TrainingRun]:
    """Reports the events of the run inside to the plugin and other receivers.

    If a run is already in progress in this context, that run receives the events.

    Args:
        shim: The plugin; `None` where there is none.
        name: The user's name for the run.
        kind: The estimator's class, or `run`.
        parameters: Plain values by name.
        *others: Other receivers.
        metrics_address: Address that serves the metrics; default: `FARANDOLE_METRICS`.

    Raises:
        ValueError: The address is wrong.
        OSError: Its port is taken.
    """
    outer = _CURRENT_RUN.get()
    if outer is not None:
        yield outer
        return
    with export_run_metrics(name or kind, metrics_address) as metrics, report_train_job() as status:
        others = (metrics, status, *others)
        if all(one is None for one in (shim, *others)):
            yield SILENT_RUN
            return
        run = TrainingRun(shim, name, kind, parameters, others)
        timelines.on_trace_written(run.publish_timeline)
        token = _CURRENT_RUN.set(run)
        try:
            yield run
        except BaseException as error:
            run.mark_ended(error)
            raise
        else:
            run.mark_ended(None)
        finally:
            _CURRENT_RUN.reset(token)


def current_run() -> TrainingRun:
    """Returns the run that is in progress in this context; without one, a run that reports
    nothing.
    """
    return _CURRENT_RUN.get() or SILENT_RUN


def json_safe(value: Any) -> Any:
    """Returns a value without numbers that JSON does not have: they become text.

    Args:
        value: Anything that JSON can write otherwise.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_safe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _now_millis() -> int:
    return int(time.time() * 1000)


SILENT_RUN: Final = TrainingRun(None)
"""The run of a job that reports nothing."""

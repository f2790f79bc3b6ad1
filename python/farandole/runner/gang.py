# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's side of a job on any launcher: it handles the events of the agents and ends the job.

A gang either returns the outcome of every task, or leaves nothing running: `run_gang` returns only
after the registrar is closed and every agent that it could reach has reported the end of its
worker.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from farandole.common import pickling
from farandole.runner.errors import FarandoleJobError, signal_name
from farandole.runner.event_handler import EventHandler
from farandole.runner.job_observer import NULL_OBSERVER
from farandole.runner.pickle_errors import describe_unpicklable
from farandole.runner.worker_task_outcome import TaskOutcome, task_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole._native.registrar import Event, Registrar, Seat
    from farandole.runner.job_observer import JobObserver
    from farandole.runner.rank_files import RankOutputFiles

_EVENT_WAIT_SECONDS = 0.25
_ROW_WAIT_SECONDS = 0.02
_GRACE_AFTER_VERDICT = 3.0
_GRACE_AFTER_EXIT = 15.0
_GRACE_AFTER_ABORT = 3.0
_GRACE_FOR_ROWS = 0.5
_ROW_TIMEOUT = 10.0
"""Seconds to wait for Spark's rows when the registrar already has all results."""
_GRACE_AFTER_CANCEL = 10.0
_WAIT_REPORT_INTERVAL = 15.0
_AGENT_CHECK_INTERVAL = 1.0
_MAX_TAIL_LINES = 50
_log = logging.getLogger("farandole")


class GangAgents(ABC):
    """The job that runs one agent per task: a Spark job, or threads of this process."""

    @abstractmethod
    def start_agents(self) -> None:
        """Starts the agents and returns at once."""

    @abstractmethod
    def all_ended(self) -> bool:
        """Returns whether all agents have returned, or never will."""

    @abstractmethod
    def cancel_agents(self) -> None:
        """Asks for a quick end; may be called again and again."""

    def out_of_band_events(self) -> list[Any]:
        """Returns events that did not come by the registrar."""
        return []

    def has_ended_before_registering(self) -> bool:
        """Returns whether an agent is known to have ended, though it has not registered."""
        return False

    def may_already_run_unregistered(self) -> bool:
        """Returns whether the agents may be at work though they have not registered here."""
        return False

    def wait_reason(self) -> str | None:
        """Returns the reason why the agents wait before they start, if it is known."""
        return None

    @abstractmethod
    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns how each task ended, once `all_ended`; raises the error that kept the agents from
        running.
        """


@dataclass
class JobOutput:
    """The streams to which the driver writes output of workers and messages of the gang.

    Attributes:
        stdout: Stream for the workers' stdout; `None` leaves it where the workers run.
        stderr: The same for stderr.
        timestamp: Whether each line starts with the time.
        verbose: 0 prints nothing, 1 the reason why the job waits, 2 also the host of each rank.
        written: Streams with lines that may not have been shown yet.
        files: Files that also receive each rank's lines.
    """

    stdout: TextIO | None = None
    stderr: TextIO | None = None
    timestamp: bool = False
    verbose: int = 1
    written: set[str | None] = field(default_factory=set)
    files: RankOutputFiles | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be written to, before anything starts."""
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            if stream is not None and not callable(getattr(stream, "write", None)):
                raise TypeError(f"{name} must be a stream of text: {stream!r}")

    @property
    def streams_worker_lines(self) -> bool:
        """Whether workers' lines come to the driver."""
        return self.stdout is not None or self.stderr is not None

    def write_line(self, rank: int | None, stream: str | None, text: str) -> None:
        """Writes one line of a worker."""
        target = self.stdout if stream == "stdout" else self.stderr
        if target is None:
            # Only one stream was given: lines of the other stream must not be lost.
            target = sys.stdout if stream == "stdout" else sys.stderr
        when = time.asctime() if self.timestamp else ""
        target.write(f"{when}[{'?' if rank is None else rank}]<{stream}>:{text}\n")
        if self.files is not None and rank is not None:
            try:
                self.files.write_line(rank, stream, text)
            except OSError as error:
                # The lines are on the stream, too. The job continues without their files.
                files, self.files = self.files, None
                with contextlib.suppress(OSError):
                    files.close()
                _log.warning("the output of ranks is no longer written to files: %s", error)
        self.written.add(stream)

    def flush(self) -> None:
        """Makes the lines seen; once for many, as a flush may cost more than a line."""
        for stream in self.written:
            target = self.stdout if stream == "stdout" else self.stderr
            (target or (sys.stdout if stream == "stdout" else sys.stderr)).flush()
        self.written.clear()

    def print_message(self, message: str, level: int = 1) -> None:
        """Prints a message about the gang for the user."""
        if self.verbose >= level:
            sys.stderr.write(f"farandole: {message}\n")
            sys.stderr.flush()


@dataclass
class _GangState:
    forming_since: float
    registered: set[int] = field(default_factory=set)
    assigned: bool = False
    seats: list[Seat] = field(default_factory=list)
    ended: dict[int, Event] = field(default_factory=dict)
    failed: Event | None = None
    verdict: Event | None = None
    give_up_at: float = float("inf")
    results: dict[int, bytes] = field(default_factory=dict)
    succeeded_since: float | None = None
    tails: dict[int, list[str]] = field(default_factory=dict)
    lost: str = ""
    """The first task that a working gang lost, with the reason; cleared when the next gang
    works.
    """

    @property
    def is_forming(self) -> bool:
        """Whether tasks are awaited: at the beginning, and after the loss of one that may be
        started again.
        """
        return not self.assigned or (self.verdict is not None and self.failed is None)


def pickle_payload(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Returns the function and its arguments, as every worker reads them.

    Raises:
        TypeError: It is no function, or something cannot be pickled; the message names it.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function: {fn!r}")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes):
        raise TypeError(f"args must be a list or a tuple of arguments: {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments by name: {kwargs!r}")
    given = (fn, tuple(args), dict(kwargs or {}))
    try:
        return pickling.pickle_by_value(given)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        parts = {name: fn} | {f"argument {position}": one for position, one in enumerate(given[1])}
        parts |= {f"argument {keyword!r}": one for keyword, one in given[2].items()}
        reason = describe_unpicklable(parts) or str(error)
        raise TypeError(
            f"{name} and its arguments cannot be pickled for the workers: {reason}"
        ) from error


def run_gang(
    registrar: Registrar,
    agents: GangAgents,
    size: int,
    output: JobOutput,
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    start_timeout: float,
    activity: str,
    watcher: JobObserver = NULL_OBSERVER,
) -> list[TaskOutcome]:
    """Runs a gang from its first registration to its last worker's end.

    Args:
        registrar: The job's meeting point; closed when this returns or raises.
        agents: The tasks that run the agents.
        size: Number of tasks.
        output: Receiver of the output lines.
        on_progress: Called with (rank, record) on this thread for every record of a worker.
        start_timeout: Seconds all tasks may take to register.
        activity: The reason for the wait until then, as in "Spark tasks to start".
        watcher: Receives the events of the job.

    Returns:
        How every task ended, failures included.

    Raises:
        FarandoleJobError: A worker failed and its agent could not bring its ending along in time.
        TimeoutError: Not all tasks registered in time.
        KeyboardInterrupt: The user interrupted; nothing is left running.
    """
    gang = _GangRun(registrar, output, on_progress, watcher, agents, size, start_timeout, activity)
    try:
        return gang.run()
    except BaseException as error:
        gang.end_gang(f"the driver gave up: {type(error).__name__}")
        raise
    finally:
        registrar.close()
        if output.files is not None:
            with contextlib.suppress(OSError):  # every line was flushed, or a warning was logged
                output.files.close()


@dataclass
class _GangRun(EventHandler):
    agents: GangAgents
    size: int
    start_timeout: float
    activity: str
    seen: _GangState = field(default_factory=lambda: _GangState(time.monotonic()))

    def run(self) -> list[TaskOutcome]:
        self.agents.start_agents()
        started = time.monotonic()
        news_at, look_at = started + _WAIT_REPORT_INTERVAL, started + _AGENT_CHECK_INTERVAL
        while not self.agents.all_ended():
            rows_next = len(self.seen.ended) == self.size
            self.handle_waiting_events(_ROW_WAIT_SECONDS if rows_next else _EVENT_WAIT_SECONDS)
            self.watcher.handle_tick()
            now = time.monotonic()
            if now > self.seen.give_up_at:
                raise self.first_observed_failure()
            if self.all_succeeded() and not self.should_wait_for_result_rows(now):
                break
            if not self.seen.assigned:
                if now >= look_at:
                    look_at = now + _AGENT_CHECK_INTERVAL
                    if self.agents.has_ended_before_registering():
                        # The row of the task, which has the reason, comes when no other task waits.
                        self.registrar.abort("a task ended before it could register")
                if now >= news_at:
                    news_at = now + _WAIT_REPORT_INTERVAL
                    self.output.print_message(
                        f"waiting for {self.activity}: {len(self.seen.registered)} of {self.size} "
                        "are here"
                    )
            # Each generation has its own time limit: a job may have trained for hours before it
            # loses an executor.
            if (
                self.seen.is_forming
                and now - self.seen.forming_since > self.start_timeout
                and not self.agents.may_already_run_unregistered()
            ):
                raise TimeoutError(self.start_timeout_message())
        self.handle_waiting_events(0.0)
        return self.task_outcomes()

    def should_wait_for_result_rows(self, now: float) -> bool:
        """Returns whether to wait for rows after all workers have succeeded.

        If an executor was lost while a task of another executor was ending, Spark may never run
        the stage again.

        Raises:
            FarandoleJobError: The rows did not come in time, and there is no other copy of the
                results.
        """
        since = self.seen.succeeded_since = self.seen.succeeded_since or now
        if self.has_all_published_results():
            if now - since <= _ROW_TIMEOUT:
                return True
            self.output.print_message(
                f"Spark has returned no rows for {_ROW_TIMEOUT:g} s, although all workers ended "
                "successfully"
            )
            self.cancel_agents()
            return False
        if now - since > self.start_timeout:
            raise FarandoleJobError(
                "all workers ended successfully, but Spark has not returned their results for "
                f"{self.start_timeout:g} s; "
                "with store=, results do not pass through Spark"
            )
        return True

    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns the outcome of each task: the agent's row, or, if Spark has lost the row, the
        result that the worker published.
        """
        outcomes: list[TaskOutcome] = []
        lost: FarandoleJobError | None = None
        try:
            outcomes = self.agents.task_outcomes()
        except FarandoleJobError as error:
            lost = error
        if (
            lost is None
            and len(outcomes) == self.size
            and all(outcome.has_succeeded for outcome in outcomes)
        ):
            return outcomes
        if self.has_all_published_results():
            self.output.print_message(
                "Spark lost rows of a job whose workers had all ended successfully; the driver "
                "has their results"
            )
            return [
                self.outcome_from_event(self.seen.ended[task]) for task in sorted(self.seen.results)
            ]
        if lost is not None and self.seen.lost:
            # Spark reports a lost executor after its own timeout and without a rank; the registrar
            # knows the rank and the host.
            lost.add_reason(f"before that, {self.seen.lost}")
        if lost is not None:
            raise lost
        return outcomes

    def all_succeeded(self) -> bool:
        ended = self.seen.ended
        return len(ended) == self.size and all(event.exit_code == 0 for event in ended.values())

    def has_all_published_results(self) -> bool:
        """Returns whether all workers have succeeded and the published result of each is known."""
        return self.all_succeeded() and len(self.seen.results) == self.size

    def outcome_from_event(self, event: Event) -> TaskOutcome:
        """Returns an ending from the registrar's own knowledge, with a result of at most 16 MiB."""
        task = event.task or 0
        return TaskOutcome(
            task,
            self.host_of_task(task) or "",
            rank=event.rank,
            exit_code=event.exit_code,
            signal_name=signal_name(event.signal) if event.signal is not None else None,
            stderr_tail="\n".join(self.seen.tails.get(task, [])) or event.stderr_tail or "",
            result=self.seen.results.get(task),
        )

    def host_of_task(self, task: int | None) -> str | None:
        return next((seat["host"] for seat in self.seen.seats if seat["task"] == task), None)

    def out_of_band_events(self) -> Iterable[Any]:
        return self.agents.out_of_band_events()

    def handle_result(self, event: Event) -> None:
        if self.seen.assigned:
            self.seen.results[event.task or 0] = event.data or b""

    def handle_registered(self, event: Event) -> None:
        task = event.task or 0
        if task in self.seen.registered and self.seen.assigned:
            # After an executor was lost, Spark runs the whole stage again: the state of the old
            # attempt no longer counts.
            self.output.print_message(f"task {task} was started again by Spark; a new gang forms")
            self.watcher.record_restart(f"task {task} was started again by Spark")
            self.seen = _GangState(time.monotonic(), lost=self.seen.lost)
        self.seen.registered.add(task)

    def handle_assigned(self, event: Event) -> None:
        # All events since the tasks began to register, also a verdict, were about the generation
        # before.
        self.seen = _GangState(time.monotonic(), set(range(self.size)), assigned=True)
        self.seen.seats = list(
            getattr(event, "seats", None) or self.registrar.rank_assignment() or []
        )
        self.show_placements(self.seen.seats, "task")

    def handle_exit(self, event: Event) -> None:
        if not self.seen.assigned:
            return  # a late one of the generation before
        if event.task is not None:
            self.seen.ended[event.task] = event
        self.show_exit(event)
        if self.seen.verdict is not None:
            return  # ended by it
        if self.seen.failed is None and (event.exit_code != 0 or event.signal is not None):
            # The task may be a survivor that lost its peer: a verdict, if one comes, names the
            # cause. If the registrar of the ranks is on an executor, a lost host sends no
            # verdict, and Spark starts all tasks again.
            grace = (
                self.start_timeout
                if self.agents.may_already_run_unregistered()
                else _GRACE_AFTER_EXIT
            )
            self.seen.failed, self.seen.give_up_at = event, time.monotonic() + grace

    def handle_lost(self, event: Event) -> None:
        who = (
            "" if event.rank is None else f" (rank {event.rank} on {self.host_of_task(event.task)})"
        )
        message = f"task {event.task}{who} was lost: {event.text}"
        self.output.print_message(message)
        if self.seen.assigned:
            self.seen.lost = self.seen.lost or message
        self.watcher.record_loss(f"task {event.task}{who} was lost", event.text)
        if event.task is not None:
            self.watcher.mark_worker_gone(event.task, "lost")
        if not self.seen.assigned and event.task is not None:
            self.seen.registered.discard(event.task)

    def handle_aborted(self, event: Event) -> None:
        self.seen.verdict = event
        ended = self.seen.ended.get(event.task) if event.task is not None else None
        if ended is not None:
            self.seen.failed, self.seen.give_up_at = ended, time.monotonic() + _GRACE_AFTER_VERDICT
        else:
            # An agent was lost or replaced: Spark decides whether its task runs again.
            self.seen.failed, self.seen.give_up_at = None, float("inf")
            self.seen.forming_since = time.monotonic()

    def handle_log(self, event: Event) -> None:
        if event.stream == "stderr" and event.task is not None:
            tail = self.seen.tails.setdefault(event.task, [])
            tail.append(event.text or "")
            del tail[:-_MAX_TAIL_LINES]
        super().handle_log(event)

    def first_observed_failure(self) -> FarandoleJobError:
        """Returns the first failure as the registrar reported it, in case its task returns no
        details.
        """
        event, verdict = self.seen.failed, self.seen.verdict
        if event is not None:
            error, error.__cause__ = task_failure(self.outcome_from_event(event))
            return error
        reason = verdict.text if verdict is not None else None
        return FarandoleJobError(
            reason or "the job was ended", rank=verdict.rank if verdict is not None else None
        )

    def start_timeout_message(self) -> str:
        verdict, short_of = self.seen.verdict, self.agents.wait_reason()
        if verdict is not None:
            return (
                f"no new gang has formed within {self.start_timeout:g} s after the last one "
                f"ended: {verdict.text}"
            )
        return (
            f"Timed out waiting for {self.activity}. Please check that you have enough resources "
            f"to run all Farandole processes: after {self.start_timeout:g} s "
            f"{len(self.seen.registered)} of {self.size} tasks had "
            f"registered{f'; {short_of}' if short_of else ''}"
            f"{f'; before that, {self.seen.lost}' if self.seen.lost else ''}"
        )

    def end_gang(self, reason: str) -> None:
        """Kills the workers, then the tasks that run the agents, and waits until both are gone."""
        self.registrar.abort(reason)
        self.handle_events_until(_GRACE_AFTER_ABORT, self.have_workers_ended)
        self.handle_events_until(
            _GRACE_FOR_ROWS if self.seen.registered else 0.0, self.agents.all_ended
        )
        self.cancel_agents()

    def cancel_agents(self) -> None:
        """Ends the tasks that run the agents, if they can be reached."""
        deadline = time.monotonic() + _GRACE_AFTER_CANCEL
        while not self.agents.all_ended() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # a session that is gone has no jobs
                self.agents.cancel_agents()
            self.handle_events_until(0.5, self.agents.all_ended)

    def have_workers_ended(self) -> bool:
        return not self.seen.assigned or len(self.seen.ended) >= self.size

    def handle_events_until(self, limit: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit
        while not done() and time.monotonic() < deadline:
            for event in self.registrar.events(0.05):
                if event.kind in ("exit", "lost") and event.task is not None:
                    self.seen.ended.setdefault(event.task, event)
                elif event.kind == "log":
                    self.handle_log(event)
            self.output.flush()

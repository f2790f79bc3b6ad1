# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's side of a job on any launcher: it handles the events of the agents and ends the job.

A gang either returns the outcome of every task, or leaves nothing running: `conduct` returns only
after the registrar is closed and every agent that it could reach has reported the end of its
worker.
"""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from farandole.common import pickling
from farandole.runner.errors import FarandoleJobError, signal_name
from farandole.runner.hearing import Hearing, how_ended
from farandole.runner.outcome import Ending, failure
from farandole.runner.pickles import culprit
from farandole.runner.watcher import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole._native.registrar import Event, Registrar, Seat
    from farandole.runner.rank_files import RankFiles
    from farandole.runner.watcher import Watcher

_WAIT = 0.25
_WAIT_FOR_ROWS = 0.02
_GRACE_AFTER_VERDICT = 3.0
_GRACE_AFTER_EXIT = 15.0
_GRACE_AFTER_ABORT = 3.0
_GRACE_FOR_ROWS = 0.5
_ROWS_WITHIN = 10.0
"""Seconds that Spark is waited for when the registrar has everything that its rows could say."""
_GRACE_AFTER_CANCEL = 10.0
_NEWS_EVERY = 15.0
_LOOK_EVERY = 1.0
_TAIL = 50


class Agents(ABC):
    """The job that runs one agent per task: a Spark job, or threads of this process."""

    @abstractmethod
    def start(self) -> None:
        """Starts the agents and returns at once."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether all agents have returned, or never will."""

    @abstractmethod
    def cancel(self) -> None:
        """Asks for a quick end; may be called again and again."""

    def news(self) -> list[Any]:
        """Events that did not come by the registrar."""
        return []

    def gave_up(self) -> bool:
        """Returns whether an agent is known to have ended, though it has not registered."""
        return False

    def meets_elsewhere(self) -> bool:
        """Returns whether the agents may be at work though they have not registered here."""
        return False

    def short_of(self) -> str | None:
        """The reason for which the agents wait before they start, if it is known."""
        return None

    @abstractmethod
    def endings(self) -> list[Ending]:
        """Returns how each task ended, once `done`; raises the error that kept the agents from
        running.
        """


@dataclass
class Output:
    """The streams to which the driver writes output of workers and messages of the gang.

    Attributes:
        stdout: Stream for the workers' stdout; `None` leaves it where the workers run.
        stderr: The same for stderr.
        timestamp: Whether each line starts with the time.
        verbose: 0 says nothing, 1 says what the user waits for, 2 also says the place of each rank.
        written: Streams with lines that may not have been shown yet.
        files: Where each rank's lines go besides.
    """

    stdout: TextIO | None = None
    stderr: TextIO | None = None
    timestamp: bool = False
    verbose: int = 1
    written: set[str | None] = field(default_factory=set)
    files: RankFiles | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be written to, before anything starts."""
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            if stream is not None and not callable(getattr(stream, "write", None)):
                raise TypeError(f"{name} must be a stream of text: {stream!r}")

    @property
    def streaming(self) -> bool:
        """Whether workers' lines come to the driver."""
        return self.stdout is not None or self.stderr is not None

    def line(self, rank: int | None, stream: str | None, text: str) -> None:
        """Writes one line of a worker."""
        target = self.stdout if stream == "stdout" else self.stderr
        if target is None:
            # Only one stream was given: the other's lines still must not vanish.
            target = sys.stdout if stream == "stdout" else sys.stderr
        when = time.asctime() if self.timestamp else ""
        target.write(f"{when}[{'?' if rank is None else rank}]<{stream}>:{text}\n")
        if self.files is not None and rank is not None:
            self.files.write(rank, stream, text)
        self.written.add(stream)

    def flush(self) -> None:
        """Makes the lines seen; once for many, as a flush may cost more than a line."""
        for stream in self.written:
            target = self.stdout if stream == "stdout" else self.stderr
            (target or (sys.stdout if stream == "stdout" else sys.stderr)).flush()
        self.written.clear()

    def say(self, message: str, level: int = 1) -> None:
        """Tells the user something about the gang."""
        if self.verbose >= level:
            sys.stderr.write(f"farandole: {message}\n")
            sys.stderr.flush()


@dataclass
class _Seen:
    forming_since: float
    registered: set[int] = field(default_factory=set)
    assigned: bool = False
    seats: list[Seat] = field(default_factory=list)
    ended: dict[int, Event] = field(default_factory=dict)
    failed: Event | None = None
    verdict: Event | None = None
    give_up_at: float = float("inf")
    results: dict[int, bytes] = field(default_factory=dict)
    well_since: float | None = None
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


def payload(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
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
        return pickling.dumps(given)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        parts = {name: fn} | {f"argument {place}": one for place, one in enumerate(given[1])}
        parts |= {f"argument {place!r}": one for place, one in given[2].items()}
        why = culprit(parts) or str(error)
        raise TypeError(
            f"{name} and its arguments cannot be pickled for the workers: {why}"
        ) from error


def conduct(
    registrar: Registrar,
    agents: Agents,
    size: int,
    output: Output,
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    start_timeout: float,
    activity: str,
    watcher: Watcher = NOBODY,
) -> list[Ending]:
    """Runs a gang from its first registration to its last worker's end.

    Args:
        registrar: The job's meeting point; closed when this returns or raises.
        agents: What runs the agents.
        size: Number of tasks.
        output: Where lines go.
        on_progress: Called with (rank, record) on this thread for every record of a worker.
        start_timeout: Seconds all tasks may take to register.
        activity: The reason for the wait until then, as in "Spark tasks to start".
        watcher: Is told what happens.

    Returns:
        How every task ended, failures included.

    Raises:
        FarandoleJobError: A worker failed and its agent could not bring its ending along in time.
        TimeoutError: Not all tasks registered in time.
        KeyboardInterrupt: The user interrupted; nothing is left running.
    """
    gang = _Gang(registrar, agents, size, output, on_progress, start_timeout, activity, watcher)
    try:
        return gang.run()
    except BaseException as error:
        gang.end(f"the driver gave up: {type(error).__name__}")
        raise
    finally:
        registrar.close()
        if output.files is not None:
            output.files.close()


class _Gang(Hearing):
    def __init__(
        self,
        registrar: Registrar,
        agents: Agents,
        size: int,
        output: Output,
        on_progress: Callable[[int, dict[str, Any]], None] | None,
        start_timeout: float,
        activity: str,
        watcher: Watcher,
    ) -> None:
        super().__init__(registrar, output, on_progress, watcher)
        self.agents = agents
        self.size = size
        self.start_timeout = start_timeout
        self.activity = activity
        self.seen = _Seen(time.monotonic())

    def run(self) -> list[Ending]:
        self.agents.start()
        started = time.monotonic()
        news_at, look_at = started + _NEWS_EVERY, started + _LOOK_EVERY
        while not self.agents.done():
            rows_next = len(self.seen.ended) == self.size
            self.pump(_WAIT_FOR_ROWS if rows_next else _WAIT)
            self.watcher.look()
            now = time.monotonic()
            if now > self.seen.give_up_at:
                raise self.seen_failure()
            if self.all_ended_well() and not self.waits_for_rows(now):
                break
            if not self.seen.assigned:
                if now >= look_at:
                    look_at = now + _LOOK_EVERY
                    if self.agents.gave_up():
                        # Its row says why, and comes when the others no longer wait for it.
                        self.registrar.abort("a task ended before it could register")
                if now >= news_at:
                    news_at = now + _NEWS_EVERY
                    self.output.say(
                        f"waiting for {self.activity}: {len(self.seen.registered)} of {self.size} "
                        "are here"
                    )
            # Each generation has its own time: a job may have trained for hours when it loses an
            # executor.
            if (
                self.seen.is_forming
                and now - self.seen.forming_since > self.start_timeout
                and not self.agents.meets_elsewhere()
            ):
                raise TimeoutError(self.not_started())
        self.pump(0.0)
        return self.endings()

    def waits_for_rows(self, now: float) -> bool:
        """Returns whether rows are still worth waiting for, now that all workers have ended well.

        Spark may never run a stage again whose executor was lost while another's task was ending.

        Raises:
            FarandoleJobError: They did not come in time, and there is no other copy of the results.
        """
        since = self.seen.well_since = self.seen.well_since or now
        if self.has_results():
            if now - since <= _ROWS_WITHIN:
                return True
            self.output.say(
                f"Spark has returned no rows for {_ROWS_WITHIN:g} s, although all workers ended "
                "successfully"
            )
            self.cancel()
            return False
        if now - since > self.start_timeout:
            raise FarandoleJobError(
                "all workers ended successfully, but Spark has not returned their results for "
                f"{self.start_timeout:g} s; "
                "with store=, results do not pass through Spark"
            )
        return True

    def endings(self) -> list[Ending]:
        """Returns how each task ended: as its agent reports, or as this generation published if
        Spark lost its row.
        """
        told: list[Ending] = []
        lost: FarandoleJobError | None = None
        try:
            told = self.agents.endings()
        except FarandoleJobError as error:
            lost = error
        if lost is None and len(told) == self.size and all(ending.succeeded for ending in told):
            return told
        if self.has_results():
            self.output.say(
                "Spark lost rows of a job whose workers had all ended successfully; the driver "
                "has their results"
            )
            return [self.ending(self.seen.ended[task]) for task in sorted(self.seen.results)]
        if lost is not None and self.seen.lost:
            # Spark reports a lost executor by its own words and timeout; the registrar knows the
            # rank and the host.
            lost.add_reason(f"before that, {self.seen.lost}")
        if lost is not None:
            raise lost
        return told

    def all_ended_well(self) -> bool:
        ended = self.seen.ended
        return len(ended) == self.size and all(event.exit_code == 0 for event in ended.values())

    def has_results(self) -> bool:
        """Returns whether all workers ended well, and what each has published is known."""
        return self.all_ended_well() and len(self.seen.results) == self.size

    def ending(self, event: Event) -> Ending:
        """Returns an ending from the registrar's own knowledge, with a result of at most 16 MiB."""
        task = event.task or 0
        return Ending(
            task,
            self.host(task) or "",
            rank=event.rank,
            exit_code=event.exit_code,
            signal_name=signal_name(event.signal) if event.signal is not None else None,
            stderr_tail="\n".join(self.seen.tails.get(task, [])) or event.stderr_tail or "",
            result=self.seen.results.get(task),
        )

    def host(self, task: int | None) -> str | None:
        return next((seat["host"] for seat in self.seen.seats if seat["task"] == task), None)

    def news(self) -> Iterable[Any]:
        return self.agents.news()

    def take(self, event: Event) -> None:
        match event.kind:
            case "log":
                self.log(event)
            case "metric":
                self.metric(event)
            case "registered":
                self.registered(event)
            case "assigned":
                self.assigned(event)
            case "exit":
                self.exited(event)
            case "lost":
                self.lost(event)
            case "aborted":
                self.aborted(event)
            case "result":
                if self.seen.assigned:
                    self.seen.results[event.task or 0] = event.data or b""

    def registered(self, event: Event) -> None:
        task = event.task or 0
        if task in self.seen.registered and self.seen.assigned:
            # Spark runs the whole stage again after an executor was lost: what the old generation
            # said is past.
            self.output.say(f"task {task} was started again by Spark; a new gang forms")
            self.watcher.restarted(f"task {task} was started again by Spark")
            self.seen = _Seen(time.monotonic(), lost=self.seen.lost)
        self.seen.registered.add(task)

    def assigned(self, event: Event) -> None:
        # All events since the tasks began to register, also a verdict, were about the generation
        # before.
        self.seen = _Seen(time.monotonic(), set(range(self.size)), assigned=True)
        self.seen.seats = list(getattr(event, "seats", None) or self.registrar.assignment() or [])
        self.watcher.seats(self.seen.seats)
        for seat in self.seen.seats:
            self.output.say(
                f"rank {seat['rank']} is task {seat['task']} on {seat['host']}", level=2
            )

    def exited(self, event: Event) -> None:
        if not self.seen.assigned:
            return  # a late one of the generation before
        if event.task is not None:
            self.seen.ended[event.task] = event
            self.watcher.left(event.task, how_ended(event))
        self.last_words(event)
        if self.seen.verdict is not None:
            return  # ended by it
        if self.seen.failed is None and (event.exit_code != 0 or event.signal is not None):
            # It may be a survivor that lost its peer: the verdict knows better, if one comes. If
            # the gang meets at an executor, a lost host sends no verdict, and Spark starts all
            # tasks again.
            grace = self.start_timeout if self.agents.meets_elsewhere() else _GRACE_AFTER_EXIT
            self.seen.failed, self.seen.give_up_at = event, time.monotonic() + grace

    def lost(self, event: Event) -> None:
        who = "" if event.rank is None else f" (rank {event.rank} on {self.host(event.task)})"
        what = f"task {event.task}{who} was lost: {event.text}"
        self.output.say(what)
        if self.seen.assigned:
            self.seen.lost = self.seen.lost or what
        self.watcher.event(f"task {event.task}{who} was lost", event.text)
        if event.task is not None:
            self.watcher.left(event.task, "lost")
        if not self.seen.assigned and event.task is not None:
            self.seen.registered.discard(event.task)

    def aborted(self, event: Event) -> None:
        self.seen.verdict = event
        ended = self.seen.ended.get(event.task) if event.task is not None else None
        if ended is not None:
            self.seen.failed, self.seen.give_up_at = ended, time.monotonic() + _GRACE_AFTER_VERDICT
        else:
            # An agent was lost or replaced: whether its task runs again is for Spark to say.
            self.seen.failed, self.seen.give_up_at = None, float("inf")
            self.seen.forming_since = time.monotonic()

    def log(self, event: Event) -> None:
        if event.stream == "stderr" and event.task is not None:
            tail = self.seen.tails.setdefault(event.task, [])
            tail.append(event.text or "")
            del tail[:-_TAIL]
        super().log(event)

    def seen_failure(self) -> FarandoleJobError:
        """Returns the first failure as the registrar told it, for when its task does not come
        back with more.
        """
        event, verdict = self.seen.failed, self.seen.verdict
        if event is not None:
            error, error.__cause__ = failure(self.ending(event))
            return error
        reason = verdict.text if verdict is not None else None
        return FarandoleJobError(
            reason or "the job was ended", rank=verdict.rank if verdict is not None else None
        )

    def not_started(self) -> str:
        verdict, short_of = self.seen.verdict, self.agents.short_of()
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

    def end(self, reason: str) -> None:
        """Kills the workers, then whatever runs the agents, and waits until both are gone."""
        self.registrar.abort(reason)
        self.wait(_GRACE_AFTER_ABORT, self.workers_ended)
        self.wait(_GRACE_FOR_ROWS if self.seen.registered else 0.0, self.agents.done)
        self.cancel()

    def cancel(self) -> None:
        """Ends what runs the agents, as far as it can be reached."""
        deadline = time.monotonic() + _GRACE_AFTER_CANCEL
        while not self.agents.done() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # a session that is gone has no jobs
                self.agents.cancel()
            self.wait(0.5, self.agents.done)

    def workers_ended(self) -> bool:
        return not self.seen.assigned or len(self.seen.ended) >= self.size

    def wait(self, limit: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit
        while not done() and time.monotonic() < deadline:
            for event in self.registrar.events(0.05):
                if event.kind in ("exit", "lost") and event.task is not None:
                    self.seen.ended.setdefault(event.task, event)
                elif event.kind == "log":
                    self.log(event)
            self.output.flush()

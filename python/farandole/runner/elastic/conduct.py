# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's side of an elastic job on any launcher.

The registrar decides which workers are in the world, and when the job is done. This module starts
workers and receives their records.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from farandole.common.exceptions import FarandoleInternalError
from farandole.runner.errors import FarandoleJobError
from farandole.runner.hearing import Hearing, how_ended
from farandole.runner.outcome import Ending, failure, results
from farandole.runner.watcher import NOBODY
from farandole.runner.worker import EXECUTOR as WHERE

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native.registrar import Event, Registrar
    from farandole.runner.gang import Output
    from farandole.runner.watcher import Watcher

_WAIT = 0.25
_REFUSALS = 3
"""Tasks in a row that could not start a worker, before any world, after which the job is
hopeless.
"""
_ROWS_WITHIN = 15.0
_OF_THE_NETWORK = (f"{FarandoleInternalError.__module__}.{FarandoleInternalError.__qualname__}",)
"""Exceptions that say that peers or the registrar were lost."""


class Workers(Protocol):
    """Starts the workers of an elastic job.

    Attributes:
        endings: How workers ended, by task.
        refusals: Why workers could not be started, in order.
        dismissed: Tasks that were asked to leave.
    """

    endings: dict[int, Ending]
    refusals: list[str]
    dismissed: set[int]

    def start(self) -> None:
        """Starts the first workers, and returns at once."""

    def end(self) -> None:
        """Starts no more workers, and ends those that wait or run."""


class Departures(Protocol):
    """Tells which workers are about to lose their hosts."""

    def worker(self, task: int, where: str) -> None:
        """Takes note of where a worker is, as it reported."""

    def news(self) -> list[tuple[int, str]]:
        """Workers that have to leave since the last call, and why."""
        ...


def conduct(
    registrar: Registrar,
    crew: Workers,
    output: Output,
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    departures: Departures | None = None,
    watcher: Watcher = NOBODY,
    *,
    ends_on_error: bool = False,
) -> list[Any]:
    """Runs an elastic job to its end.

    Args:
        registrar: The job's meeting point; closed when this returns or raises.
        crew: What starts workers.
        output: Where lines go.
        on_progress: Called with (rank, record) on this thread for every record of a worker.
        departures: Names workers whose hosts are about to leave, if that can be known.
        watcher: Is told what happens.
        ends_on_error: Whether the job ends when the function raises on one rank, and not only when
            it does on all of a world. An error of the network, such as a lost peer, is no such
            exception.

    Returns:
        What the function returned on each rank of the last world, rank 0 first.

    Raises:
        FarandoleJobError: The job failed, or could not continue.
    """
    job = _Job(
        registrar, crew, output, on_progress, departures, watcher, ends_on_error=ends_on_error
    )
    try:
        return job.run()
    finally:
        registrar.close()
        crew.end()
        if output.files is not None:
            output.files.close()


class _Job(Hearing):
    def __init__(
        self,
        registrar: Registrar,
        crew: Workers,
        output: Output,
        on_progress: Callable[[int, dict[str, Any]], None] | None,
        departures: Departures | None,
        watcher: Watcher,
        *,
        ends_on_error: bool,
    ) -> None:
        super().__init__(registrar, output, on_progress, watcher)
        self.crew = crew
        self.departures = departures
        self.ends_on_error = ends_on_error
        self.worlds = 0
        self.exits: dict[int, Event] = {}
        self.results: dict[int, bytes] = {}
        self.failed: Event | None = None
        self.finished = False
        self.gone_last: int | None = None

    def run(self) -> list[Any]:
        self.crew.start()
        while not self.finished:
            self.pump(_WAIT)
            self.watcher.look()
            if self.failed is not None:
                self.pump(_WAIT)  # a result may come with the exit
                error, origin = self.failure(self.failed)
                raise error from origin
            if self.ends_on_error:
                self.raise_own()
            if not self.worlds and len(self.crew.refusals) >= _REFUSALS:
                raise FarandoleJobError(f"no worker could be started: {self.crew.refusals[-1]}")
            for task, reason in self.departures.news() if self.departures is not None else ():
                self.output.say(f"worker {task} is asked to leave: {reason}")
                self.registrar.dismiss(task, reason)
        return self.returned()

    def raise_own(self) -> None:
        """Raises the exception that the function has raised on some rank, if it has."""
        for task, event in list(self.exits.items()):
            if not event.exit_code or task not in self.results:
                continue  # it has returned, was ended by a signal, or was ended without a word
            error, origin = failure(self.ending(task))
            if error.exception_type not in _OF_THE_NETWORK:
                raise error from origin
            del self.exits[task], self.results[task]

    def returned(self) -> list[Any]:
        seats = sorted(self.registrar.assignment() or [], key=lambda seat: seat["rank"])
        deadline = time.monotonic() + _ROWS_WITHIN
        missing = [seat for seat in seats if self.ending(seat["task"]).result is None]
        while missing and time.monotonic() < deadline:
            # Results beyond what the registrar takes come with the workers' ends.
            self.pump(_WAIT)
            missing = [seat for seat in seats if self.ending(seat["task"]).result is None]
        endings = [self.ending(seat["task"], seat["rank"], seat["host"]) for seat in seats]
        return results(endings, len(seats))

    def ending(self, task: int, rank: int | None = None, host: str = "") -> Ending:
        by_rows, event = self.crew.endings.get(task), self.exits.get(task)
        result = self.results.get(task)
        if result is None and by_rows is not None:
            result = by_rows.result
        return Ending(
            task,
            host or (by_rows.host if by_rows is not None else ""),
            rank=rank if rank is not None or event is None else event.rank,
            exit_code=event.exit_code
            if event is not None
            else (by_rows.exit_code if by_rows is not None else None),
            stderr_tail=(event.stderr_tail or "") if event is not None else "",
            result=result,
        )

    def failure(self, event: Event) -> tuple[FarandoleJobError, BaseException | None]:
        task = event.task
        if (
            task is None
            and self.gone_last is not None
            and (event.text or "").startswith(f"worker {self.gone_last} ")
        ):
            task = self.gone_last  # whose error says more than its exit code
        if task is not None and task in self.exits:
            return failure(self.ending(task))
        return FarandoleJobError(event.text or "the job failed"), None

    def take(self, event: Event) -> None:
        match event.kind:
            case "log":
                self.log(event)
            case "metric":
                self.metric(event)
            case "assigned":
                self.assigned()
            case "exit":
                if event.task is not None:
                    self.exits[event.task] = event
                    self.watcher.left(event.task, how_ended(event))
                self.last_words(event)
            case "result":
                self.results[event.task or 0] = event.data or b""
            case "lost" | "dismissed":
                self.gone(event)
            case "aborted":
                self.failed = self.failed or (None if self.finished else event)
            case "finished":
                self.finished = True

    def gone(self, event: Event) -> None:
        self.gone_last = event.task
        who = f"worker {event.task}" if event.rank is None else f"rank {event.rank}"
        if event.kind == "dismissed":
            self.crew.dismissed.add(event.task or 0)
            who += " leaves:"
        self.output.say(f"{who} {event.text}")
        self.watcher.event(f"{who} is gone", event.text)
        if event.task is not None:
            self.watcher.left(event.task, "lost" if event.kind == "lost" else "ended")

    def metric(self, event: Event) -> None:
        if event.text == WHERE and event.task is not None and event.data is not None:
            self.watcher.located(event.task, event.data.decode())
            if self.departures is not None:
                self.departures.worker(event.task, event.data.decode())
        else:
            super().metric(event)

    def assigned(self) -> None:
        self.worlds += 1
        seats = self.registrar.assignment() or []
        self.output.say(f"world {self.worlds} has {len(seats)} ranks")
        self.watcher.seats(seats)
        if self.worlds > 1:
            self.watcher.restarted(f"world {self.worlds} has {len(seats)} ranks")
        for seat in seats:
            self.output.say(
                f"rank {seat['rank']} is worker {seat['task']} on {seat['host']}", level=2
            )

    def log(self, event: Event) -> None:
        if self.output.streaming:
            super().log(event)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Handles the registrar's events in the driver of any job: writes lines of output, and passes
records on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from farandole.runner import reports, timelines
from farandole.runner.watcher import EVENT, RANK
from farandole.stores import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farandole._native.registrar import Event, Registrar
    from farandole.runner.gang import Output
    from farandole.runner.watcher import Watcher

PROGRESS = "progress"
"""Kind of the records that `farandole.spark.task.report` sends."""
STAYS = "(farandole: the lines of this rank are in the log of its task)"
LAST = "(farandole: the last lines of stderr follow)"


class Hearing(ABC):
    """Takes the events of a job.

    Args:
        registrar: The job's meeting point.
        output: Where lines go.
        on_progress: Called with (rank, record) for every record of a worker.
        watcher: Is told what happens.
    """

    def __init__(
        self,
        registrar: Registrar,
        output: Output,
        on_progress: Callable[[int, dict[str, Any]], None] | None,
        watcher: Watcher,
    ) -> None:
        self.registrar = registrar
        self.output = output
        self.on_progress = on_progress
        self.watcher = watcher

    @abstractmethod
    def take(self, event: Event) -> None:
        """Takes one event."""

    def news(self) -> Iterable[Any]:
        """Events that did not come by the registrar."""
        return ()

    def pump(self, timeout: float) -> None:
        """Takes the events that there are, or that come in time."""
        try:
            for event in (*self.registrar.events(timeout), *self.news()):
                self.take(event)
        finally:
            self.output.flush()

    def metric(self, event: Event) -> None:
        """Hands over what a worker reports, and answers a worker that asks for the key of a run."""
        if event.text == keys.KIND:
            keys.answer(self.registrar, event.data or b"")
            return
        if event.data is not None and event.text is not None:
            record(
                (event.task or 0, event.rank),
                event.text,
                event.data,
                self.watcher,
                self.on_progress,
            )

    def log(self, event: Event) -> None:
        """Writes a line of a worker."""
        if event.dropped:
            self.output.say(
                f"{event.dropped} lines of workers were dropped: the driver could not keep up"
            )
        self.output.line(event.rank, event.stream, event.text or "")
        if event.rank is not None:
            self.watcher.line(event.rank, event.stream or "stderr", event.text or "")

    def last_words(self, event: Event) -> None:
        """Passes on the end of a worker's stderr, if the worker's lines stay in the log of its
        task.

        Args:
            event: Of the worker's exit.
        """
        if self.output.streaming or event.rank is None:
            return
        self.watcher.line(event.rank, "stdout", STAYS)
        for line in (STAYS, LAST, *(event.stderr_tail or "").splitlines()):
            self.watcher.line(event.rank, "stderr", line)


def how_ended(event: Event) -> str:
    """Describes in one word how a worker ended by itself.

    Args:
        event: Of its exit.
    """
    return "ended" if event.exit_code == 0 and event.signal is None else "failed"


def record(
    who: tuple[int, int | None],
    kind: str,
    data: bytes,
    watcher: Watcher,
    on_progress: Callable[[int, dict[str, Any]], None] | None = None,
) -> None:
    """Hands over a record of a worker or of its agent. A malformed one is left out, with a warning.

    Args:
        who: Its task, and its rank where it has one.
        kind: What the record is.
        data: What it holds.
        watcher: Receives the worker's events and progress.
        on_progress: Called with (rank, record) for progress.
    """
    task, rank = who
    if kind == timelines.KIND:
        timelines.take(task, data)
    if kind not in (RANK, EVENT, PROGRESS):
        return
    try:
        told = reports.parsed(data)
    except reports.MalformedError as error:
        reports.warn(f"task {task}" if rank is None else f"rank {rank}", error)
        return
    if kind == RANK:
        watcher.said(task, told)
        return
    if kind == EVENT:
        what, reason = (str(told.get(name) or "") for name in ("what", "reason"))
        watcher.event(what or "an event", reason)
        return
    watcher.record(told)
    if on_progress is not None:
        on_progress(rank or 0, told)

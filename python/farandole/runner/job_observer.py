# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports about a running job: its ranks, their use of time, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from farandole import _variables as variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


RANK_KIND: Final = "rank"
"""Kind of the records in which a worker reports its process, its GPU and its use of time."""

EVENT_KIND: Final = "event"
"""Kind of the records in which a worker says that something has happened, such as a stall."""

REPORTS_VARIABLE: Final = variables.SPARK_TOLD
"""Variable of workers whose driver shows the reports of `farandole.spark.task`."""


class JobObserver:
    """Base of the classes that show a job; shows nothing itself. Its methods are called on the
    thread of the job, and never raise an exception.
    """

    def handle_tick(self) -> None:
        """Is called a few times a second."""

    def set_placements(self, seats: Iterable[Mapping[str, Any]]) -> None:
        """Takes the places of the ranks, when they are known or have changed.

        Args:
            seats: One for each rank.
        """

    def record_location(self, task: int, where: str) -> None:
        """Takes the executor or node of a task.

        Args:
            task: Number of the task.
            where: Name of the executor or node, as the worker or the cluster manager gives it.
        """

    def update_rank_facts(self, task: int, record: Mapping[str, Any]) -> None:
        """Takes a worker's report about itself, possibly before the worker has a rank.

        Args:
            task: Number of the worker's task.
            record: The worker's process, GPU and use of time.
        """

    def mark_worker_gone(self, task: int, state: str) -> None:
        """Takes note that a worker no longer takes part.

        Args:
            task: Number of the worker's task.
            state: `ended`, `failed` or `lost`.
        """

    def write_line(self, rank: int, stream: str, text: str) -> None:
        """Takes a line that a worker has printed, if lines come to the driver.

        Args:
            rank: Rank of the worker.
            stream: `stdout` or `stderr`.
            text: The line without its end.
        """

    def record_progress(self, record: Mapping[str, Any]) -> None:
        """Takes a report of a training function.

        Args:
            record: The argument of `farandole.spark.task.report`.
        """

    def add_event(self, event_text: str, reason: str | None) -> None:
        """Receives an event: a rank was lost, an executor was removed, or the job started again.

        Args:
            event_text: The event in a few words.
            reason: Reason of the event, if known.
        """

    def record_loss(self, event_text: str, reason: str | None) -> None:
        """Receives the loss of a worker or a host, which is an event, too.

        Args:
            event_text: The worker or host in a few words.
            reason: Reason of the loss, if known.
        """
        self.add_event(event_text, reason)

    def record_restart(self, reason: str) -> None:
        """Takes note that the job starts again after a failure.

        Args:
            reason: Reason of the failure.
        """


NULL_OBSERVER: Final = JobObserver()
"""The observer of a job that is not shown."""

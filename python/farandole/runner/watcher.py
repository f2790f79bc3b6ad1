# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports about a running job: its ranks, where their time goes, and what happens to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


RANK: Final = "rank"
"""Kind of the records in which a worker says what it is and where its time goes."""

EVENT: Final = "event"
"""Kind of the records in which a worker says that something has happened, such as a stall."""

TOLD: Final = "FARANDOLE_SPARK_TOLD"
"""Variable of workers whose driver shows what its ranks say of themselves, by
`farandole.spark.task`.
"""


class Watcher:
    """Shows nothing; what shows a job derives from it. Its methods are called on the job's
    thread, and never raise.
    """

    def look(self) -> None:
        """Is called a few times a second."""

    def seats(self, seats: Iterable[Mapping[str, Any]]) -> None:
        """The places of the ranks, when they are known or have changed.

        Args:
            seats: One for each rank.
        """

    def located(self, task: int, where: str) -> None:
        """In which executor, or the like, a task is.

        Args:
            task: Its number.
            where: As its worker or its host's manager calls it.
        """

    def said(self, task: int, record: Mapping[str, Any]) -> None:
        """A worker's report about itself, possibly before it has a rank.

        Args:
            task: Number of its task.
            record: Its process, GPU, and where its time goes.
        """

    def left(self, task: int, how: str) -> None:
        """A worker no longer takes part.

        Args:
            task: Number of its task.
            how: `ended`, `failed` or `lost`.
        """

    def line(self, rank: int, stream: str, text: str) -> None:
        """A line that a worker has printed, if lines come to the driver.

        Args:
            rank: Its rank.
            stream: `stdout` or `stderr`.
            text: Without its end.
        """

    def record(self, record: Mapping[str, Any]) -> None:
        """A report of a training function.

        Args:
            record: What `farandole.spark.task.report` was given.
        """

    def event(self, what: str, reason: str | None) -> None:
        """Receives an event: a rank was lost, an executor was removed, or the job started again.

        Args:
            what: In a few words.
            reason: Why, where known.
        """

    def restarted(self, reason: str) -> None:
        """The job starts again after a failure.

        Args:
            reason: Of the failure.
        """


NOBODY: Final = Watcher()
"""For a job that is not watched."""

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A queue of jobs for a number of slots.

A job gets all of its slots at once or waits, first come, first served. So two jobs never hold half
of their slots each, and small jobs cannot overtake a large one without limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from farandole.common.counted_noun import format_counted_noun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_SLOT_WAIT: Final = 86_400.0
"""Seconds that a job waits for the slots of other jobs if no limit is given. Each of those jobs
has its own limit.
"""

_MIN_START_SECONDS = 0.1
_SLOT_CHECK_INTERVAL = 0.25
_WAIT_REPORT_INTERVAL = 15.0


class SlotQueue:
    """The slots of a cluster or a host.

    Args:
        total: Returns the number of slots; called repeatedly, because executors come and go.
        awaited: Name of the resource that a job waits for, for messages.
    """

    def __init__(self, total: Callable[[], int], awaited: str = "slots") -> None:
        self._total = total
        self._awaited = awaited
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._jobs: dict[object, int] = {}

    @contextlib.contextmanager
    def hold_slots(
        self,
        number: int,
        report_wait: Callable[[str], None],
        max_wait_seconds: float = MAX_SLOT_WAIT,
    ) -> Iterator[float]:
        """Holds slots for one job.

        A job that needs more slots than there are runs when no other does: its backend then reports
        the missing slots.

        Args:
            number: Slots of the job.
            report_wait: Receives the reason for the wait, at once and every 15 s.
            max_wait_seconds: The longest wait, in seconds.

        Yields:
            Seconds that the job has waited.

        Raises:
            TimeoutError: The slots did not become free in time; the message names their holders.
        """
        job, next_report_at, began = object(), 0.0, time.monotonic()
        with self._changed:
            self._queue.append(job)
            try:
                while not self._may_take_slots(job, number):
                    if time.monotonic() >= next_report_at:
                        next_report_at = time.monotonic() + _WAIT_REPORT_INTERVAL
                        report_wait(self._wait_message(job, number))
                    if time.monotonic() - began >= max_wait_seconds:
                        late = (
                            f"Timed out waiting for {self._awaited}: 0 of {number} after "
                            f"{max_wait_seconds:g} s"
                        )
                        raise TimeoutError(f"{late}; {self._wait_message(job, number)}")
                    self._changed.wait(_SLOT_CHECK_INTERVAL)
                self._jobs[job] = number
            finally:
                self._queue.remove(job)
                self._changed.notify_all()
        try:
            yield time.monotonic() - began
        finally:
            with self._changed:
                del self._jobs[job]
                self._changed.notify_all()

    @contextlib.contextmanager
    def hold_slots_within_start_timeout(
        self,
        number: int,
        report_wait: Callable[[str], None],
        start_timeout: float | None,
        limit: float,
    ) -> Iterator[float]:
        """Holds slots for one job; the wait for them counts as a part of the start.

        Args:
            number: As `hold_slots`.
            report_wait: As `hold_slots`.
            start_timeout: Seconds for the wait and the start together, as the user gave them.
                `None` waits up to `MAX_SLOT_WAIT`, and leaves `limit` for the start.
            limit: Seconds for the start: `start_timeout`, or its default.

        Yields:
            Seconds that are left for the start.

        Raises:
            TimeoutError: As `hold_slots`.
        """
        with self.hold_slots(
            number, report_wait, MAX_SLOT_WAIT if start_timeout is None else limit
        ) as waited:
            yield limit if start_timeout is None else max(limit - waited, _MIN_START_SECONDS)

    def _may_take_slots(self, job: object, number: int) -> bool:
        if self._queue[0] is not job:
            return False
        return not self._jobs or sum(self._jobs.values()) + number <= self._total()

    def _wait_message(self, job: object, number: int) -> str:
        return (
            f"a job of {format_counted_noun(number, 'process')} waits for slots: "
            f"{sum(self._jobs.values())} of {self._total()} are held by "
            f"{format_counted_noun(len(self._jobs), 'job')}, "
            f"{format_counted_noun(self._queue.index(job), 'job')} ahead in the queue"
        )

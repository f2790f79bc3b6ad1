# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Starts the workers of an elastic job, one thread for each that it may have."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.runner.worker_task_outcome import TaskOutcome

_RESTART_DELAY = 1.0
_MAX_RESTART_DELAY = 30.0
_SHUTDOWN_TIMEOUT = 20.0


class ElasticAgentPool(ABC):
    """Starts the workers of an elastic job, each under a number that no other has had.

    Attributes:
        endings: Outcomes of workers, by task.
        refusals: Reasons why workers could not be started, in order.
        dismissed: Tasks of workers that must leave.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._running: set[int] = set()
        self.endings: dict[int, TaskOutcome] = {}
        self.refusals: list[str] = []
        self.dismissed: set[int] = set()

    @abstractmethod
    def start_workers(self) -> None:
        """Starts the first workers, and returns at once."""

    @abstractmethod
    def end_workers(self) -> None:
        """Starts no more workers, and ends all that wait or run."""

    @abstractmethod
    def fewest_consecutive_refusals(self) -> int:
        """Returns how often in a row no worker could start, in the thread or slot with the
        fewest.
        """

    def is_running(self, task: int) -> bool:
        """Returns whether the agent of a worker has not ended, so its outcome may still come."""
        return task in self._running

    @contextlib.contextmanager
    def _hold_new_task_number(self) -> Iterator[int]:
        """Yields the number of the next worker, which counts as running inside."""
        with self._lock:
            task = next(self._numbers)
        self._running.add(task)
        try:
            yield task
        finally:
            self._running.discard(task)

    def _has_returned(self, task: int) -> bool:
        """Returns whether the function of a worker has returned, so no other worker follows."""
        outcome = self.endings.get(task)
        return outcome is not None and outcome.has_succeeded and task not in self.dismissed


class ThreadedAgentPool(ElasticAgentPool):
    """One thread for each worker that the job may have; each runs one worker after the other.

    Args:
        max_workers: Largest number of workers.
        thread: Makes a thread of a function and a name.
    """

    def __init__(
        self, max_workers: int, thread: Callable[[Callable[[], None], str], threading.Thread]
    ) -> None:
        super().__init__()
        self._threads = [
            thread(partial(self._run_workers, number), f"farandole-worker-{number}")
            for number in range(max_workers)
        ]
        self._refusals_in_row = [0] * max_workers

    @abstractmethod
    def _run_worker(self, task: int) -> str | None:
        """Runs one worker to its end, and notes its outcome if known. If no worker could start,
        returns the reason.
        """

    def _prepare_thread(self) -> None:
        """Prepares a thread; called in each thread before its first worker."""
        return

    def _cancel_workers(self) -> None:
        """Ends workers that wait or run; called repeatedly until the threads have ended."""
        return

    def start_workers(self) -> None:
        """Starts the first workers."""
        for thread in self._threads:
            thread.start()

    def end_workers(self) -> None:
        """Starts no more workers, and ends all that wait or run."""
        self._stopped.set()
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            self._cancel_workers()
            for thread in self._threads:
                thread.join(0.1)

    def fewest_consecutive_refusals(self) -> int:
        """Returns how often in a row no worker could start, in the thread with the fewest."""
        return min(self._refusals_in_row)

    def _run_workers(self, number: int) -> None:
        self._prepare_thread()
        pause = _RESTART_DELAY
        while not self._stopped.is_set():
            with self._hold_new_task_number() as task:
                refused = self._run_worker(task)
            if refused is not None:
                self.refusals.append(refused)
            self._refusals_in_row[number] = (
                0 if refused is None else self._refusals_in_row[number] + 1
            )
            self._stopped.wait(pause)
            if self._has_returned(task):
                return
            outcome = self.endings.get(task)
            # A worker without an outcome has lost its host, unless it was refused.
            was_healthy = outcome.has_succeeded if outcome is not None else refused is None
            pause = _RESTART_DELAY if was_healthy else min(2 * pause, _MAX_RESTART_DELAY)

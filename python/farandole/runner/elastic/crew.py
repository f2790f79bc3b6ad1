# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Starts the workers of an elastic job, one thread for each that it may have."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.runner.outcome import Ending

_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_END_WITHIN = 20.0


class Crew(ABC):
    """One thread for each worker that the job may have; each runs one worker after the other.

    Args:
        most: Most workers.
        thread: Makes a thread of a function and a name.
    """

    def __init__(
        self, most: int, thread: Callable[[Callable[[], None], str], threading.Thread]
    ) -> None:
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            thread(self._work_on, f"farandole-worker-{number}") for number in range(most)
        ]
        self.endings: dict[int, Ending] = {}
        self.refusals: list[str] = []
        self.dismissed: set[int] = set()

    @abstractmethod
    def _one(self, task: int) -> str | None:
        """Runs one worker to its end, and notes how it ended if that is known; why it had none,
        if it had none.
        """

    def _begin(self) -> None:
        """Called in each thread before its first worker."""
        return

    def _cancel(self) -> None:
        """Ends what still waits or runs; called again and again until the threads have ended."""
        return

    def start(self) -> None:
        """Starts the first workers."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Starts no more workers, and ends those that wait or run."""
        self._over.set()
        deadline = time.monotonic() + _END_WITHIN
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            self._cancel()
            for thread in self._threads:
                thread.join(0.1)

    def _work_on(self) -> None:
        self._begin()
        pause = _PAUSE
        while not self._over.is_set():
            with self._lock:
                task = next(self._numbers)
            refused = self._one(task)
            if refused is not None:
                self.refusals.append(refused)
            self._over.wait(pause)
            ending = self.endings.get(task)
            if ending is not None and ending.succeeded:
                if task not in self.dismissed:
                    return  # its function has returned
                pause = _PAUSE
            elif refused is None and ending is None:
                pause = _PAUSE  # its host was lost
            else:
                pause = min(2 * pause, _LONGEST_PAUSE)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Completes operations in the background, for the holders of futures."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.torch.distributed._work import PendingOperation

    _Entry = tuple[PendingOperation, Callable[[], None], float | None]


class BackgroundCompleter:
    """Completes operations of one group in the background, in the order in which they were added.

    The callbacks of a future run in the thread that completes its operation, and a callback may
    itself wait for another operation of the group. So there is always a thread that runs no
    callback while operations wait.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._in_callbacks = 0
        self._closed = False

    def call_when_complete(
        self, pending: PendingOperation, then: Callable[[], None], end: float | None = None
    ) -> None:
        """Calls `then` when `pending` is over, or at `end`.

        Args:
            pending: The operation.
            then: The callback.
            end: Latest time of the callback, in seconds of the monotonic clock.
        """
        with self._changed:
            self._closed = False
            self._entries.append((pending, then, end))
            self._ensure_free_thread()
            self._changed.notify()

    def close(self) -> None:
        """Ends the threads after all given operations."""
        with self._changed:
            self._closed = True
            threads, self._threads = self._threads, []
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _ensure_free_thread(self) -> None:
        """Starts a thread if each one runs a callback. The caller holds the lock."""
        if self._entries and len(self._threads) <= self._in_callbacks:
            thread = threading.Thread(
                target=self._complete_operations, name="farandole-futures", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _complete_operations(self) -> None:
        while (entry := self._take_next_operation()) is not None:
            pending, then, end = entry
            pending.wait_until_over(None if end is None else max(0.0, end - time.monotonic()))
            with self._changed:
                self._in_callbacks += 1
                self._ensure_free_thread()
            try:
                then()
            finally:
                with self._changed:
                    self._in_callbacks -= 1
            del entry, pending, then  # an idle thread keeps no tensors

    def _take_next_operation(self) -> _Entry | None:
        with self._changed:
            while not self._entries:
                if self._closed:
                    return None
                self._changed.wait()
            return self._entries.popleft()

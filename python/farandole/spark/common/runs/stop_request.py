# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ends a fit in order while it runs, without an exception: it returns the model that it has.

The driver writes a file into the directory of the run. Rank 0 reads it, and all ranks agree on the
step after which they end. The file contains a token of this fit, so a file that an earlier fit has
left ends nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

import farandole.numpy as arrays
from farandole import _variables as variables
from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.stores.remote_store import RemoteStore

STOP_TOKEN_VARIABLE: Final = variables.SPARK_STOP
"""Variable of workers with the token that the stop file must contain."""

STOP_FILE: Final = "_stop"
"""Name of the file in the directory of the run."""

_STOP_CHECK_SECONDS = 1.0
"""Seconds between two looks at the store, and between two steps after which ranks may end,
about.
"""


_DOUBLE_CLICK_SECONDS = 2.0
"""Seconds after the first click in which another one is taken for the second of a double click."""


class StopRequest:
    """A request to stop one fit. Its methods may be called from any thread.

    Attributes:
        in_order: Whether the fit can end in order; a store that does not save runs has no place for
            the request.
        asked: Whether the fit was asked to end in order.
        ended: Whether the fit was asked to end at once.

    Args:
        store: Of the run.
        clock: In seconds.
    """

    def __init__(self, store: RemoteStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._asked_at = float("-inf")
        self._token = secrets.token_hex(16)
        self._was_reported = False
        self.in_order = store.run_path is not None
        self.asked = self.ended = False

    def stop_token_variables(self) -> dict[str, str]:
        """Variables of the workers."""
        return {STOP_TOKEN_VARIABLE: self._token} if self.in_order else {}

    def request_stop(self) -> None:
        """Ends the fit after the present step, or after the epoch if the framework cannot end
        within one.

        Raises:
            OSError: The store cannot be written.
        """
        if not self.in_order:
            self.interrupt_fit()
            return
        self._store.write(STOP_FILE, self._token.encode())
        self.asked, self._asked_at = True, self._clock()

    def end_unless_double_click(self) -> bool:
        """Ends the fit at once, unless it has just been asked to end in order, by the first click
        of a double click.

        Returns:
            Whether it ends.
        """
        if self._clock() - self._asked_at < _DOUBLE_CLICK_SECONDS:
            return False
        self.interrupt_fit()
        return True

    def interrupt_fit(self) -> None:
        """Ends the fit at once, with `KeyboardInterrupt` in the main thread."""
        self.ended = True
        _thread.interrupt_main()

    def raise_if_ended(self) -> None:
        """Raises an error if the fit was ended; called at each message of a worker.

        Raises:
            RuntimeError: The fit must end at once, and it runs in a thread that gets no
                `KeyboardInterrupt`, such as a thread of a search.
        """
        if self.ended and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the fit was ended, as asked for in the notebook")

    def is_stop_newly_requested(self) -> bool:
        """Returns whether the fit was asked to end since the last call."""
        news = self.asked and not self._was_reported
        self._was_reported = self.asked
        return news

    def close(self) -> None:
        """Removes the request."""
        if self.asked and self._store.run_path is not None:
            with contextlib.suppress(OSError):  # it must not be taken for another fit's
                native.Store(self._store.run_path).delete(STOP_FILE)


class StopCheck:
    """A check by which all ranks decide, after the same step, whether to end the run.

    If the fit cannot be stopped, the check costs nothing. All worlds of an elastic fit use the same
    `StopCheck`, which is closed at the end of the fit.

    Args:
        store: Store of the run.
        clock: Clock in seconds.
    """

    def __init__(self, store: RemoteStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._closed = threading.Event()
        self._token = os.environ.get(STOP_TOKEN_VARIABLE, "").encode()
        self._stop_found = threading.Event()
        self._reader: threading.Thread | None = None
        self.begin_epoch()

    def close(self) -> None:
        """Ends the thread that reads the store, without a wait for a read in progress."""
        self._closed.set()

    def begin_epoch(self) -> None:
        """Notes that an epoch begins, or continues in another world; called on every rank."""
        self._steps = self._last_check_step = 0
        self._next_check_step = 1
        self._last_check_time = self._clock()

    def should_stop_after_step(self, rank: int) -> bool:
        """Returns whether the run ends after this step. It is a collective call once a second,
        about.

        Args:
            rank: Of this process.
        """
        if not self._token:
            return False
        self._steps += 1
        if self._steps < self._next_check_step:
            return False
        each = max(self._clock() - self._last_check_time, 1e-6) / (
            self._steps - self._last_check_step
        )
        found, gap = self._agree_on_stop(rank, max(1, int(_STOP_CHECK_SECONDS / each)))
        self._last_check_step, self._next_check_step, self._last_check_time = (
            self._steps,
            self._steps + gap,
            self._clock(),
        )
        return found

    def should_stop_after_epoch(self, rank: int) -> bool:
        """Returns whether the run ends after this epoch; a collective call.

        Args:
            rank: Of this process.
        """
        return bool(self._token) and self._agree_on_stop(rank, 1)[0]

    def _agree_on_stop(self, rank: int, gap: int) -> tuple[bool, int]:
        """Returns rank 0's answer, and the number of steps until the next question."""
        mine = np.array([rank == 0 and self._is_stop_requested(), gap], np.int64)
        found, steps = arrays.broadcast(mine, 0, name="farandole.stop")
        return bool(found), int(steps)

    def _is_stop_requested(self) -> bool:
        if self._reader is None:
            self._reader = threading.Thread(
                target=self._poll_store, name="farandole-stop", daemon=True
            )
            self._reader.start()
        return self._stop_found.is_set()

    def _poll_store(self) -> None:
        """Polls the store, which may be slow, until the request is there."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # it is asked again
                if self._store.read(STOP_FILE) == self._token:
                    self._stop_found.set()
                    return
            self._closed.wait(_STOP_CHECK_SECONDS)

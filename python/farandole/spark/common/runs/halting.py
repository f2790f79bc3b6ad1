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
from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.stores.remote_store import RemoteStore

VARIABLE: Final = "FARANDOLE_SPARK_STOP"
"""Variable of workers whose fit can be stopped: what the file contains then."""

NAME: Final = "_stop"
"""Name of the file in the directory of the run."""

_EVERY = 1.0
"""Seconds between two looks at the store, and between two steps after which ranks may end,
about.
"""


_DOUBLE = 2.0
"""Seconds after the first click in which another one is taken for the second of a double click."""


class Stop:
    """Stops one fit. Its methods may be called from any thread.

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
        self._told = False
        self.in_order = store.run_path is not None
        self.asked = self.ended = False

    def variables(self) -> dict[str, str]:
        """Variables of the workers."""
        return {VARIABLE: self._token} if self.in_order else {}

    def ask(self) -> None:
        """Ends the fit after the present step, or after the epoch if the framework cannot end
        within one.

        Raises:
            OSError: The store cannot be written.
        """
        if not self.in_order:
            self.interrupt()
            return
        self._store.write(NAME, self._token.encode())
        self.asked, self._asked_at = True, self._clock()

    def end(self) -> bool:
        """Ends the fit at once, unless it has just been asked to end in order, by the first click
        of a double click.

        Returns:
            Whether it ends.
        """
        if self._clock() - self._asked_at < _DOUBLE:
            return False
        self.interrupt()
        return True

    def interrupt(self) -> None:
        """Ends the fit at once, with `KeyboardInterrupt` in the main thread."""
        self.ended = True
        _thread.interrupt_main()

    def check(self) -> None:
        """Called when a worker has sent something.

        Raises:
            RuntimeError: The fit is to end at once, and its thread gets no `KeyboardInterrupt`,
                like those of a search.
        """
        if self.ended and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the fit was ended, as asked for in the notebook")

    def is_news(self) -> bool:
        """Returns whether the fit was asked to end since the last call."""
        news = self.asked and not self._told
        self._told = self.asked
        return news

    def close(self) -> None:
        """Removes the request."""
        if self.asked and self._store.run_path is not None:
            with contextlib.suppress(OSError):  # it must not be taken for another fit's
                native.Store(self._store.run_path).delete(NAME)


class Halt:
    """Tells one rank whether to end the run; all ranks get the same answer after the same step.

    If the fit cannot be stopped, it costs nothing. One serves all worlds of an elastic fit, and is
    closed at its end.

    Args:
        store: Of the run.
        clock: In seconds.
    """

    def __init__(self, store: RemoteStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._closed = threading.Event()
        self._token = os.environ.get(VARIABLE, "").encode()
        self._found = threading.Event()
        self._reader: threading.Thread | None = None
        self.begins()

    def close(self) -> None:
        """Ends the thread that reads the store. A read that is under way is not waited for."""
        self._closed.set()

    def begins(self) -> None:
        """An epoch begins, or continues in another world; on every rank."""
        self._steps = self._before = 0
        self._next = 1
        self._since = self._clock()

    def after_step(self, rank: int) -> bool:
        """Returns whether the run ends after this step. It is a collective call once a second,
        about.

        Args:
            rank: Of this process.
        """
        if not self._token:
            return False
        self._steps += 1
        if self._steps < self._next:
            return False
        each = max(self._clock() - self._since, 1e-6) / (self._steps - self._before)
        found, gap = self._agree(rank, max(1, int(_EVERY / each)))
        self._before, self._next, self._since = self._steps, self._steps + gap, self._clock()
        return found

    def after_epoch(self, rank: int) -> bool:
        """Returns whether the run ends after this epoch; a collective call.

        Args:
            rank: Of this process.
        """
        return bool(self._token) and self._agree(rank, 1)[0]

    def _agree(self, rank: int, gap: int) -> tuple[bool, int]:
        """Rank 0's answer, and after how many steps to ask again."""
        mine = np.array([rank == 0 and self._is_asked(), gap], np.int64)
        found, steps = arrays.broadcast(mine, 0, name="farandole.stop")
        return bool(found), int(steps)

    def _is_asked(self) -> bool:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="farandole-stop", daemon=True)
            self._reader.start()
        return self._found.is_set()

    def _read(self) -> None:
        """Looks at the store, which may be slow, until the request is there."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # it is asked again
                if self._store.read(NAME) == self._token:
                    self._found.set()
                    return
            self._closed.wait(_EVERY)

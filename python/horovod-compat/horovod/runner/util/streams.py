# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A pipe between threads."""

from __future__ import annotations

import threading
from typing import AnyStr, Generic


class Pipe(Generic[AnyStr]):
    """Hands texts or bytes from a thread to another; holds one at a time, so that a writer waits
    for its reader.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: AnyStr | None = None
        self._closed = False

    def write(self, buf: AnyStr) -> None:
        """Waits until what was written before has been read, and leaves the next.

        Raises:
            RuntimeError: The pipe is closed, or is closed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._held is None or self._closed)
            if self._closed:
                raise RuntimeError("Pipe is closed")
            self._held = buf
            self._changed.notify_all()

    def read(self, length: int = -1) -> AnyStr | None:
        """Waits until there is something, and takes it.

        Args:
            length: The most that is taken, if it is above 0; the next call takes what is left.

        Returns:
            What was written; `None` when the pipe is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None or self._closed)
            held = self._held
            if held is None:
                return None
            if 0 < length < len(held):
                taken, self._held = held[:length], held[length:]
            else:
                taken, self._held = held, None
            self._changed.notify_all()
            return taken

    def flush(self) -> None:
        """Does nothing: nothing is held back."""

    def close(self) -> None:
        """Lets readers take what is left, and writers fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

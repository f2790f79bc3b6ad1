# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Marks of this process in directories of a store: files that show which process writes or uses a
directory.

Processes of this host ask the kernel whether this process is alive. Other hosts trust a mark for
some time after it was written. So a thread of this process writes its marks again in time, as long
as the process lives.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time

from farandole._native.store import Store as NativeStore

_AT_EXIT = 2.0
"""Seconds that the end of a process waits for stores."""
_AT_LEAST = 0.1
"""Seconds that each mark has of them whatever the others took: a store that works needs no more."""
_TICK = 60.0
"""Seconds between two looks at which marks are due."""
_RENEWAL = 6 * 3600.0
"""Seconds after which a mark is written again that others believe for a week."""
_TIMES = 10
"""The number of times a mark is written again within its validity."""
_LOCK = threading.Lock()
_HELD: set[Mark] = set()
_log = logging.getLogger("farandole")


class Mark:
    """A mark of this process, from now until it is released.

    Args:
        url: The directory.
        name: The file's, as the native store gave it.
        lasts: Seconds that processes elsewhere believe it, as it was given to the native store;
            default: a week.
    """

    def __init__(self, url: str, name: str, lasts: float | None = None) -> None:
        self.url = url
        self._mark = name
        self._pid = os.getpid()
        self._every = _RENEWAL if lasts is None else lasts / _TIMES
        self._due = time.monotonic() + self._every
        # Held while the file is deleted or replaced, so that no renewal writes it again.
        self._touching = threading.Lock()
        with _LOCK:
            _HELD.add(self)
            _renewer.start()

    def renew(self) -> None:
        """Says that the process still lives.

        Raises:
            OSError: the store does not answer.
        """
        with self._touching:
            if not self._is_held():
                return
            self._due = time.monotonic() + self._every
            if not NativeStore(self.url).renew(self._mark):
                with _LOCK:
                    _HELD.discard(self)
                _log.warning(
                    "%s/%s, by which this process holds the directory, is gone: another process "
                    "may use or delete what is there. Was this process stopped for long, or its "
                    "host asleep?",
                    self.url,
                    self._mark,
                )

    def is_there(self) -> bool:
        """Renews the mark; whether it was there, and this process's.

        Raises:
            OSError: the store does not answer.
        """
        with self._touching:
            return self._is_held() and NativeStore(self.url).renew(self._mark)

    def forget(self) -> None:
        """Renews the mark no longer, and does not delete it either."""
        with self._touching:
            self._let_go()

    def is_at(self, url: str, name: str) -> bool:
        """Returns whether this is the mark of that name in that directory.

        Args:
            url: The directory.
            name: The file's.
        """
        return (self.url, self._mark, self._pid) == (url, name, os.getpid())

    def is_due(self) -> bool:
        """Returns whether the mark must be renewed now."""
        return time.monotonic() >= self._due

    def release(self, patience: float | None = None) -> None:
        """Takes the mark away.

        Args:
            patience: Seconds after which a store that does not answer is given up; default: that of
                its retries.
        """
        waits = self._touching.acquire(timeout=-1 if patience is None else patience)
        try:
            if self._let_go():
                NativeStore(self.url).delete(self._mark, patience)
        finally:
            if waits:
                self._touching.release()

    def _is_held(self) -> bool:
        """Returns whether this process itself holds the mark, and not a parent of it."""
        with _LOCK:
            return self in _HELD and self._pid == os.getpid()

    def _let_go(self) -> bool:
        """Holds the mark no longer; whether this process, and no parent of it, held it until
        now.
        """
        with _LOCK:
            held = self in _HELD
            _HELD.discard(self)
        return held and self._pid == os.getpid()


class _Renewer:
    """The thread that renews marks, one in a process that has marks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pid = 0

    def start(self) -> None:
        """Starts it, unless it runs; the caller holds the lock."""
        if self._thread is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._run, name="farandole-marks", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        waits = threading.Event()
        while not waits.wait(_TICK):
            renew_all()


_renewer = _Renewer()


def is_held(url: str, name: str) -> bool:
    """Returns whether this process holds a mark.

    Args:
        url: The directory.
        name: The file's.
    """
    with _LOCK:
        return any(mark.is_at(url, name) for mark in _HELD)


def renew_all(*, due: bool = True) -> None:
    """Renews the marks of this process; a store that does not answer is asked again next time.

    Args:
        due: Whether only those are meant whose time has come.
    """
    with _LOCK:
        held = [one for one in _HELD if not due or one.is_due()]
    for mark in held:
        try:
            mark.renew()
        except OSError as error:
            _log.warning("the mark of this process in %s could not be renewed: %s", mark.url, error)


def release_all() -> None:
    """Deletes all marks of this process, at its end.

    An unreachable store must not delay the end. A mark that stays there counts until others see
    that the process has ended, or until its time is over if they cannot see it.
    """
    end = time.monotonic() + _AT_EXIT
    for mark in list(_HELD):
        with contextlib.suppress(OSError):
            mark.release(max(end - time.monotonic(), _AT_LEAST))


atexit.register(release_all)

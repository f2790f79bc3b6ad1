# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lease files of this process in directories of a store: they show which process writes or uses a
directory.

Processes of this host ask the kernel whether this process is alive. Other hosts trust a lease file
for some time after its last write. Therefore a thread of this process renews its lease files in
time until the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time

from farandole._native.store import Store as NativeStore

_EXIT_RELEASE_SECONDS = 2.0
"""Seconds that the end of a process waits for stores."""
_MIN_RELEASE_SECONDS = 0.1
"""Seconds of this time that are reserved for each lease file: a working store needs no more."""
_RENEWER_INTERVAL = 60.0
"""Seconds between two checks for lease files that are due."""
_DEFAULT_RENEWAL_PERIOD = 6 * 3600.0
"""Seconds between renewals of a lease file that other hosts trust for a week."""
_RENEWALS_PER_DURATION = 10
"""The number of times a lease file is renewed within its validity."""
_HELD_LOCK = threading.Lock()
_HELD_FILES: set[LeaseFile] = set()
_log = logging.getLogger("farandole")


def _free_lock_after_fork() -> None:
    """Frees the lock in a forked child: the thread that held it does not exist there. Lease files
    belong to the parent.
    """
    global _HELD_LOCK  # noqa: PLW0603 - a lock that another thread held cannot be released
    _HELD_LOCK = threading.Lock()
    _HELD_FILES.clear()


os.register_at_fork(after_in_child=_free_lock_after_fork)


class LeaseFile:
    """A lease file that this process holds, from now until it is released.

    Args:
        url: The directory.
        name: The file's, as the native store gave it.
        lasts: Seconds that processes on other hosts trust the file, as passed to the native store;
            default: a week.
    """

    def __init__(self, url: str, name: str, lasts: float | None = None) -> None:
        self.url = url
        self._file_name = name
        self._pid = os.getpid()
        self._renewal_period = (
            _DEFAULT_RENEWAL_PERIOD if lasts is None else lasts / _RENEWALS_PER_DURATION
        )
        self._next_renewal = time.monotonic() + self._renewal_period
        # Held while the file is deleted or replaced, so that no renewal writes it again.
        self._file_lock = threading.Lock()
        with _HELD_LOCK:
            _HELD_FILES.add(self)
            _renewer.ensure_running()

    def renew_if_held(self) -> None:
        """Renews the lease file if this process still holds it.

        Raises:
            OSError: the store does not answer.
        """
        if not self._is_own_process():
            return
        with self._file_lock:
            if not self._is_held_here():
                return
            is_renewed = NativeStore(self.url).renew_mark(self._file_name)
            self._next_renewal = time.monotonic() + self._renewal_period
            if not is_renewed:
                with _HELD_LOCK:
                    _HELD_FILES.discard(self)
                _log.warning(
                    "%s/%s, by which this process holds the directory, is gone: another process "
                    "may use or delete what is there. Was this process stopped for long, or its "
                    "host asleep?",
                    self.url,
                    self._file_name,
                )

    def renew_and_check_held(self) -> bool:
        """Renews the lease file; returns whether the file existed and this process holds it.

        Raises:
            OSError: the store does not answer.
        """
        if not self._is_own_process():
            return False
        with self._file_lock:
            return self._is_held_here() and NativeStore(self.url).renew_mark(self._file_name)

    def stop_renewing(self) -> None:
        """Stops renewing the lease file, without deleting it."""
        if not self._is_own_process():
            return
        with self._file_lock:
            self._give_up_holding()

    def is_lease_of(self, url: str, name: str) -> bool:
        """Returns whether this is the lease file of a name in a directory.

        Args:
            url: The directory.
            name: The file's.
        """
        return (self.url, self._file_name, self._pid) == (url, name, os.getpid())

    def is_renewal_due(self) -> bool:
        """Returns whether the lease file must be renewed now."""
        return time.monotonic() >= self._next_renewal

    def delete_if_held(self, max_wait_seconds: float | None = None) -> None:
        """Deletes the lease file if this process still holds it.

        Args:
            max_wait_seconds: Seconds to wait for a store that does not answer; default: the time of
                the store's retries.
        """
        if not self._is_own_process():
            return
        waits = self._file_lock.acquire(
            timeout=-1 if max_wait_seconds is None else max_wait_seconds
        )
        try:
            if self._give_up_holding():
                NativeStore(self.url).delete(self._file_name, max_wait_seconds)
        finally:
            if waits:
                self._file_lock.release()

    def _is_own_process(self) -> bool:
        """Returns whether this process created the lease file. In a forked child, `_file_lock` may
        be locked forever by a thread that exists only in the parent.
        """
        return self._pid == os.getpid()

    def _is_held_here(self) -> bool:
        """Returns whether this process, not its parent, holds the lease file."""
        with _HELD_LOCK:
            return self in _HELD_FILES and self._pid == os.getpid()

    def _give_up_holding(self) -> bool:
        """Releases the lease file; returns whether this process, not its parent, held it."""
        with _HELD_LOCK:
            held = self in _HELD_FILES
            _HELD_FILES.discard(self)
        return held and self._pid == os.getpid()


class _LeaseRenewer:
    """The thread that renews the lease files of this process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pid = 0

    def ensure_running(self) -> None:
        """Starts the thread, unless it runs; the caller holds the lock."""
        if self._thread is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._thread = threading.Thread(
                target=self._run_renewals, name="farandole-leases", daemon=True
            )
            self._thread.start()

    def _run_renewals(self) -> None:
        waits = threading.Event()
        while not waits.wait(_RENEWER_INTERVAL):
            renew_lease_files()


_renewer = _LeaseRenewer()


def holds_lease_file(url: str, name: str) -> bool:
    """Returns whether this process holds a lease file.

    Args:
        url: The directory.
        name: The file's.
    """
    with _HELD_LOCK:
        return any(held.is_lease_of(url, name) for held in _HELD_FILES)


def renew_lease_files(*, due: bool = True) -> None:
    """Renews the lease files of this process; a failed renewal is repeated at the next call.

    Args:
        due: Whether to renew only the lease files that are due.
    """
    with _HELD_LOCK:
        held = [one for one in _HELD_FILES if not due or one.is_renewal_due()]
    for lease_file in held:
        try:
            lease_file.renew_if_held()
        except OSError as error:
            _log.warning(
                "the lease file of this process in %s could not be renewed: %s",
                lease_file.url,
                error,
            )


def release_lease_files() -> None:
    """Deletes all lease files of this process, at its end.

    An unreachable store must not delay the end. A lease file that stays there counts until other
    processes see that this process has ended. If they cannot see it, the lease file expires.
    """
    end = time.monotonic() + _EXIT_RELEASE_SECONDS
    for lease_file in list(_HELD_FILES):
        with contextlib.suppress(OSError):
            lease_file.delete_if_held(max(end - time.monotonic(), _MIN_RELEASE_SECONDS))


atexit.register(release_lease_files)

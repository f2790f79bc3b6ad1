# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The lease by which one job writes the commits of a run.

Rank 0 holds the lease. In the next world of an elastic job, another process may be rank 0. The
lease contains the job, so the new rank 0 takes it at once, even if the old one still lives. A
process of another job takes it only if its holder is dead, or, if that is on another host, has not
renewed it for `LASTS` seconds.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from farandole._native.store import Store as NativeStore
from farandole.stores import marks
from farandole.stores.marks import Mark

LASTS: Final = 180.0
"""Seconds after which a holder elsewhere that says nothing no longer holds its run."""
_LONGEST: Final = 600.0
"""Seconds that a driver of a fit on another host may hold a run without a word."""
_LEEWAY: Final = 60.0
"""Seconds by which clocks of hosts may differ."""
_LINGERS: Final = 15.0
"""Seconds that a worker may outlive a driver that was killed; longer with a longer peer timeout."""
_LOOKS_EVERY: Final = 1.0
_LEASE: Final = "_lease-"
_JOB: Final = "FARANDOLE_JOB"
_FINGERPRINT: Final = slice(32, 64)
_log = logging.getLogger("farandole")
_TAKING = threading.Lock()
"""Held from the look at a directory until the lease is registered, so that no other thread
deletes it.
"""


class RunInUseError(RuntimeError):
    """Another driver or job trains the run."""


class Tenure:
    """The lease of this process on a run; not held at first.

    Args:
        run_path: URL of the run's directory.
        run_id: Its name, for messages.
    """

    def __init__(self, run_path: str, run_id: str) -> None:
        self._run_path = run_path
        self._run_id = run_id
        self._mark: Mark | None = None

    def begin(self) -> None:
        """Takes the lease, unless this process holds it. Waits if its holder may be lost, or about
        to end.

        Raises:
            RunInUseError: Another job, a fit, or another training of this process holds the run.
            OSError: The store cannot be used.
        """
        if self._mark is not None:
            return
        store = NativeStore(self._run_path)
        began = time.monotonic()
        before: dict[str, dict[str, Any]] | None = None
        until = began + LASTS
        while True:
            with _TAKING:
                leases = self._take(store)
            if self._mark is not None:
                return
            if leases is None:
                continue
            if before is None:
                lasts = [float(one.get("lasts") or _LONGEST) for one in leases.values()]
                until = time.monotonic() + min(max(lasts, default=LASTS), _LONGEST) + _LEEWAY
            renewed = before is not None and any(
                before.get(name, one) != one for name, one in leases.items()
            )
            seen = any(map(_is_seen, leases.values()))
            if (renewed and not seen) or time.monotonic() > (began + _lingers() if seen else until):
                raise self._refusal("another job, or a fit, has it")
            if before is None:
                _log.warning(
                    "run %r in %s is held by another process, which may be lost or about to end: "
                    "waiting for at most %.0f s",
                    self._run_id,
                    self._run_path,
                    _lingers() if seen else until - began,
                )
            before = leases
            time.sleep(_LOOKS_EVERY)

    def _take(self, store: NativeStore) -> dict[str, dict[str, Any]] | None:
        """Takes the lease if nobody has it.

        Returns:
            The leases of others; `None` if the lease was taken, or an own one that was left behind
            was deleted.

        Raises:
            RunInUseError: Another training of this process holds the run.
            OSError: The store cannot be used.
        """
        lease = store.take(LASTS, job_of_this_process())
        if lease is not None:
            self._mark = Mark(self._run_path, lease, LASTS)
            return None
        leases = _leases(store)
        own = {
            name
            for name, lease in leases.items()
            if _is_seen(lease) and lease.get("pid") == os.getpid()
        }
        if any(marks.is_held(self._run_path, name) for name in own):
            raise self._refusal("another training of this process has it")
        for name in own:  # left by an earlier training, which could not delete it
            store.delete(name)
        return None if own else leases

    def check(self) -> None:
        """Renews the lease, before something is written.

        Raises:
            RunInUseError: This process does not hold it, or no longer.
        """
        mark = self._mark  # another thread may leave it
        if mark is None or not mark.is_there():
            raise self._refusal(
                "another process has taken it from this one, which was cut off or stopped for long"
            )

    def forget(self) -> None:
        """Holds the lease no longer, and leaves its file to the next rank 0 of this job."""
        if self._mark is not None:
            self._mark.forget()
            self._mark = None

    def end(self) -> None:
        """Gives the lease back."""
        mark, self._mark = self._mark, None
        if mark is not None:
            # the mark of a process that has ended does not count
            with contextlib.suppress(OSError):
                if mark.is_there():
                    mark.release()
            mark.forget()

    def _refusal(self, why: str) -> RunInUseError:
        return RunInUseError(
            f"run {self._run_id!r} is trained elsewhere: {why}: choose another run_id, or end the "
            f"other one. It holds {self._run_path}"
        )


def job_of_this_process() -> str | None:
    """Returns the job that a launcher of Farandole has started this process for; `None` in
    others.
    """
    return job_of(os.environ.get(_JOB, ""))


def job_of(ticket: str) -> str | None:
    """Returns the fingerprint of a job's certificate, which is not secret; `None` if the text is no
    ticket.

    All workers of the job have the same one, also after its registrar was started again.

    Args:
        ticket: Of the job.
    """
    body = ticket.partition(".")[2]
    try:
        found = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        return None
    return found[_FINGERPRINT].hex() or None


def _lingers() -> float:
    """Returns the seconds for which a holder on this host may be about to end."""
    try:
        peer_timeout = float(os.environ.get("FARANDOLE_PEER_TIMEOUT", ""))
    except ValueError:
        return _LINGERS
    return max(_LINGERS, 2 * peer_timeout + 5)


def _leases(store: NativeStore) -> dict[str, dict[str, Any]]:
    """The leases in a directory, by name. One that cannot be read is about to be written, or
    damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name, _, _, is_directory in store.look():
            if name.startswith(_LEASE) and not is_directory:
                with contextlib.suppress(ValueError, FileNotFoundError):
                    lease = json.loads(store.read(name))
                    found[name] = lease if isinstance(lease, dict) else {}
    return found


def _is_seen(lease: dict[str, Any]) -> bool:
    """Returns whether its process could be seen from here, so that it lives."""
    try:
        here = {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "namespace": str(Path("/proc/self/ns/pid").readlink()),
        }
    except OSError:
        return False
    return all(lease.get(name) == value for name, value in here.items())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The lease by which one job writes the commits of a run.

Rank 0 holds the lease. In the next world of an elastic job, another process may be rank 0. The lease contains the job,
so the new rank 0 takes it at once, even if the old one still lives. A process of another job takes it only if its
holder is dead, or, if that is on another host, has not renewed it for `LASTS` seconds.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from farandole._native.store import Store as NativeStore
from farandole.stores.marks import Mark

LASTS: Final = 180.0
"""Seconds after which a holder elsewhere that says nothing no longer holds its run."""
_LONGEST: Final = 600.0
"""Seconds that a driver of a fit on another host may hold a run without a word."""
_LEEWAY: Final = 10.0
_LOOKS_EVERY: Final = 1.0
_LEASE: Final = "_lease-"
_JOB: Final = "FARANDOLE_JOB"
_FINGERPRINT: Final = slice(32, 64)
_log = logging.getLogger("farandole")


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
        """Takes the lease, unless this process holds it. Waits if its holder may be lost with its host.

        Raises:
            RunInUseError: Another job, a fit, or another training of this process holds the run.
            OSError: The store cannot be used.
        """
        if self._mark is not None:
            return
        store = NativeStore(self._run_path)
        before: dict[str, dict[str, Any]] | None = None
        until = time.monotonic() + LASTS
        while True:
            lease = store.take(LASTS, job_of_this_process())
            if lease is not None:
                self._mark = Mark(self._run_path, lease, LASTS)
                return
            leases = _leases(store)
            if before is None:
                lasts = [float(one.get("lasts") or _LONGEST) for one in leases.values()]
                until = time.monotonic() + min(max(lasts, default=LASTS), _LONGEST) + _LEEWAY
            renewed = before is not None and any(before.get(name, one) != one for name, one in leases.items())
            if renewed or any(map(_is_seen, leases.values())) or time.monotonic() > until:
                raise self._refusal("another job, or a fit, has it")
            if before is None:
                _log.warning(
                    "run %r in %s is held by a process on another host, which may be lost: waiting for at most %.0f s",
                    self._run_id,
                    self._run_path,
                    until - time.monotonic(),
                )
            before = leases
            time.sleep(_LOOKS_EVERY)

    def check(self) -> None:
        """Renews the lease, before something is written.

        Raises:
            RunInUseError: This process does not hold it, or no longer.
        """
        if self._mark is None or not self._mark.is_there():
            raise self._refusal("another process has taken it from this one, which was cut off or stopped for long")

    def forget(self) -> None:
        """Holds the lease no longer, and leaves its file to the next rank 0 of this job."""
        if self._mark is not None:
            self._mark.forget()
            self._mark = None

    def end(self) -> None:
        """Gives the lease back."""
        mark, self._mark = self._mark, None
        if mark is not None:
            with contextlib.suppress(OSError):  # the mark of a process that has ended does not count
                if mark.is_there():
                    mark.release()
            mark.forget()

    def _refusal(self, why: str) -> RunInUseError:
        return RunInUseError(
            f"run {self._run_id!r} is trained elsewhere: {why}: choose another run_id, or end the other one. It holds "
            f"{self._run_path}"
        )


def job_of_this_process() -> str | None:
    """The job that a launcher of Farandole has started this process for; `None` in others.

    It is the fingerprint of the job's certificate, which is not secret. All workers of the job have the same one, also
    after its registrar was started again.
    """
    body = os.environ.get(_JOB, "").partition(".")[2]
    try:
        ticket = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        return None
    return ticket[_FINGERPRINT].hex() or None


def _leases(store: NativeStore) -> dict[str, dict[str, Any]]:
    """The leases in a directory, by name. One that cannot be read is about to be written, or damaged."""
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
    here = {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": str(Path("/proc/self/ns/pid").readlink()),
    }
    return all(lease.get(name) == value for name, value in here.items())

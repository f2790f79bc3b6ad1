# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The lease by which one job writes the commits of a run.

Rank 0 holds the lease. In the next world of an elastic job, another process may be rank 0. The
lease contains the job, so the new rank 0 acquires the lease at once, even if the old rank 0 still
lives. A process of another job acquires the lease only if the holder is dead, or if a holder on
another host has not renewed it for `LEASE_DURATION` seconds.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole._native.store import Store as NativeStore
from farandole.stores import lease_files, small_files
from farandole.stores.lease_files import LeaseFile

LEASE_DURATION: Final = 180.0
"""Seconds without renewal after which a holder on another host loses its run."""
_MAX_LEASE_DURATION: Final = 600.0
"""Maximum seconds that a fit's driver on another host may hold a run without renewal."""
_CLOCK_SKEW_ALLOWANCE: Final = 60.0
"""Seconds by which clocks of hosts may differ."""
_MIN_LINGER_SECONDS: Final = 15.0
"""Seconds that a worker may outlive a driver that was killed; longer with a longer peer timeout."""
_LEASE_POLL_INTERVAL: Final = 1.0
_LEASE_PREFIX: Final = "_lease-"
_FINGERPRINT_BYTES: Final = slice(32, 64)
_log = logging.getLogger("farandole")
_ACQUIRE_LOCK = threading.Lock()
"""Held from the look at a directory until the lease is registered, so that no other thread
deletes it.
"""


def _free_acquire_lock_after_fork() -> None:
    """Frees the lock in a forked child: the thread that held it does not exist there."""
    global _ACQUIRE_LOCK  # noqa: PLW0603 - a lock that another thread held cannot be released
    _ACQUIRE_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_free_acquire_lock_after_fork)


class RunInUseError(RuntimeError):
    """Another driver or job trains the run."""


class RunLease:
    """The lease of this process on a run; not held at first.

    Args:
        run_path: URL of the run's directory.
        run_id: Its name, for messages.
    """

    def __init__(self, run_path: str, run_id: str) -> None:
        self._run_path = run_path
        self._run_id = run_id
        self._lease_file: LeaseFile | None = None

    def acquire_lease(self) -> None:
        """Takes the lease, unless this process holds it. Waits if its holder may be lost, or about
        to end.

        Raises:
            RunInUseError: Another job, a fit, or another training of this process holds the run.
            OSError: The store cannot be used.
        """
        if self._lease_file is not None:
            return
        store = NativeStore(self._run_path)
        began = time.monotonic()
        before: dict[str, dict[str, Any]] | None = None
        until = began + LEASE_DURATION
        while True:
            with _ACQUIRE_LOCK:
                leases = self._try_acquire(store)
            if self._lease_file is not None:
                return
            if leases is None:
                continue
            if before is None:
                lasts = [
                    float(lease.get("lasts") or _MAX_LEASE_DURATION) for lease in leases.values()
                ]
                until = (
                    time.monotonic()
                    + min(max(lasts, default=LEASE_DURATION), _MAX_LEASE_DURATION)
                    + _CLOCK_SKEW_ALLOWANCE
                )
            renewed = before is not None and any(
                before.get(name, lease) != lease for name, lease in leases.items()
            )
            seen = any(map(_is_on_this_host, leases.values()))
            if (renewed and not seen) or time.monotonic() > (
                began + _linger_seconds() if seen else until
            ):
                raise self._in_use_error("another job, or a fit, has it")
            if before is None:
                _log.warning(
                    "run %r in %s is held by another process, which may be lost or about to end: "
                    "waiting for at most %.0f s",
                    self._run_id,
                    self._run_path,
                    _linger_seconds() if seen else until - began,
                )
            before = leases
            time.sleep(_LEASE_POLL_INTERVAL)

    def _try_acquire(self, store: NativeStore) -> dict[str, dict[str, Any]] | None:
        """Acquires the lease if it is free.

        Returns:
            The leases of others; `None` if the lease was acquired, or if a lease that this job left
            behind was deleted.

        Raises:
            RunInUseError: Another training of this process holds the run.
            OSError: The store cannot be used.
        """
        lease = store.acquire_lease(LEASE_DURATION, own_job_fingerprint())
        if lease is not None:
            self._lease_file = LeaseFile(self._run_path, lease, LEASE_DURATION)
            return None
        leases = _read_leases(store)
        own = {
            name
            for name, lease in leases.items()
            if _is_on_this_host(lease) and lease.get("pid") == os.getpid()
        }
        if any(lease_files.holds_lease_file(self._run_path, name) for name in own):
            raise self._in_use_error("another training of this process has it")
        for name in own:  # left by an earlier training, which could not delete it
            store.delete(name)
        return None if own else leases

    def renew_or_raise(self) -> None:
        """Renews the lease, before something is written.

        Raises:
            RunInUseError: This process does not hold it, or no longer.
        """
        lease_file = self._lease_file  # another thread may leave it
        if lease_file is None or not lease_file.renew_and_check_held():
            raise self._in_use_error(
                "another process has taken it from this one, which was cut off or stopped for long"
            )

    def hand_over_lease(self) -> None:
        """Holds the lease no longer, and leaves its file to the next rank 0 of this job."""
        if self._lease_file is not None:
            self._lease_file.stop_renewing()
            self._lease_file = None

    def release_lease(self) -> None:
        """Gives the lease back."""
        lease_file, self._lease_file = self._lease_file, None
        if lease_file is not None:
            # the lease file of a process that has ended does not count
            with contextlib.suppress(OSError):
                if lease_file.renew_and_check_held():
                    lease_file.delete_if_held()
            lease_file.stop_renewing()

    def _in_use_error(self, reason: str) -> RunInUseError:
        return RunInUseError(
            f"run {self._run_id!r} is trained elsewhere: {reason}: choose another run_id, or end "
            f"the other one. It holds {self._run_path}"
        )


def own_job_fingerprint() -> str | None:
    """Returns the job that a launcher of Farandole has started this process for; `None` in
    others.
    """
    return job_fingerprint(read_setting(variables.JOB))


def job_fingerprint(ticket: str) -> str | None:
    """Returns the fingerprint of a job's certificate, which is not secret; `None` if the text is no
    ticket.

    All workers of the job have the same one, also after its registrar was started again.

    Args:
        ticket: Ticket of the job.
    """
    body = ticket.partition(".")[2]
    try:
        found = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        return None
    return found[_FINGERPRINT_BYTES].hex() or None


def _linger_seconds() -> float:
    """Returns the seconds for which a holder on this host may be about to end."""
    return max(_MIN_LINGER_SECONDS, 2 * read_setting(variables.PEER_TIMEOUT) + 5)


def _read_leases(store: NativeStore) -> dict[str, dict[str, Any]]:
    """Returns the leases in a directory, by name. An unreadable lease is about to be written, or
    damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name, _, _, is_directory in store.list_directory():
            if name.startswith(_LEASE_PREFIX) and not is_directory:
                with contextlib.suppress(small_files.DamagedFileError):
                    lease = small_files.read_json(store, name)
                    if lease is not None:
                        found[name] = lease if isinstance(lease, dict) else {}
    return found


def _is_on_this_host(lease: dict[str, Any]) -> bool:
    """Returns whether the lease's process is in this host's boot and PID namespace, so that this
    process can check whether it is alive.
    """
    try:
        own_identity = {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "namespace": str(Path("/proc/self/ns/pid").readlink()),
        }
    except OSError:
        return False
    return all(lease.get(name) == value for name, value in own_identity.items())

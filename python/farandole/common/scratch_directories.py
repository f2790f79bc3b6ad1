# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Temporary directories that are removed after their process has ended, even if it was killed.

An agent opens a directory for its worker and removes it when the worker has ended, also if the
worker was killed. If the agent itself is killed, its directory is removed when the same user opens
the next one on this host. A process holds a lock on its directory, and the kernel releases the lock
when the process ends.

Hosts may share the directory for temporary files, and NFS and Lustre keep the lock of a directory
on its host. Therefore the name of a directory contains the boot of its host, and a process removes
directories of its own boot only. Directories of an earlier boot of this host are removed after 30
days.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRATCH_VARIABLE: Final = variables.SCRATCH
"""Environment variable that contains the directory of a worker's agent."""

_DIRECTORY_PREFIX: Final = "work-"
_ID_CHARACTERS: Final = 8
"""Characters of the ids of the host and its boot in the name of a directory."""
_EARLIER_BOOT_RETENTION_SECONDS: Final = 30 * 24 * 3600.0
"""Age of directories that are removed although they are from another boot. Host names may not be
unique, so a directory of this host's name may be in use on another host.
"""
_MAX_CREATE_ATTEMPTS: Final = 100


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Creates an empty directory: in a worker, inside its agent's directory; elsewhere, a separate
    directory of this process.
    """
    given = os.environ.get(SCRATCH_VARIABLE)
    if given is None or not Path(given).is_dir():
        with hold_scratch_directory() as made:
            yield made
        return
    with tempfile.TemporaryDirectory(dir=given, ignore_cleanup_errors=True) as inside:
        yield Path(inside)


@contextlib.contextmanager
def hold_scratch_directory() -> Iterator[Path]:
    """Creates an empty, locked directory of this process; first removes directories whose processes
    are gone.
    """
    held = _create_locked_directory()
    if held is None:
        with tempfile.TemporaryDirectory(prefix="farandole-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    path, lock = held
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def boot_id() -> str:
    """Returns the id of the kernel's boot, which no other host has.

    Raises:
        OSError: The kernel does not show it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def remove_abandoned_directories(folder: Path) -> None:
    """Removes the directories of this host that no process holds.

    Args:
        folder: Directory of the files.

    Raises:
        OSError: The kernel does not show its boot id.
    """
    own_boot, own_host = _boot_and_host()
    for path in folder.glob(f"{_DIRECTORY_PREFIX}*-*-*"):
        boot, host, _ = path.name.removeprefix(_DIRECTORY_PREFIX).split("-", 2)
        with contextlib.suppress(OSError):
            age = time.time() - path.lstat().st_mtime
            if boot != own_boot and (host != own_host or age < _EARLIER_BOOT_RETENTION_SECONDS):
                continue
            lock = _try_lock_directory(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def private_user_directory() -> Path:
    """Returns a directory that only this user can look into.

    Another user may have created a directory of the same name in the directory for temporary
    files, so other places are tried, too.

    Raises:
        PermissionError: None of the places can be used; the message names each.
    """
    return _first_private_directory([_user_temp_directory(), *_private_fallback_directories()])


def _first_private_directory(places: list[Path]) -> Path:
    reasons = []
    for folder in places:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            reasons.append(str(error))
            continue
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not stat.S_IMODE(found.st_mode) & 0o077
        ):
            return folder
        reasons.append(f"{folder} is not this user's own directory")
    raise PermissionError("; ".join(reasons))


def _user_temp_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"farandole-{os.getuid()}"


def _private_fallback_directories() -> list[Path]:
    """Returns places in which other users can create nothing. They may be small or slow, so they
    are for sockets and other small files.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    folders = [Path(folder) for folder in (session, f"/run/user/{os.getuid()}") if folder]
    places = [folder / f"farandole-{os.getuid()}" for folder in folders]
    with contextlib.suppress(RuntimeError):  # a user without a home
        places.append(Path.home() / ".farandole")
    return [path for path in places if path.is_absolute()]


def _boot_and_host() -> tuple[str, str]:
    """Returns the ids of the kernel's boot and of the host in the names of directories."""
    host = hashlib.sha256(gethostname().encode()).hexdigest()
    return boot_id()[:_ID_CHARACTERS], host[:_ID_CHARACTERS]


def _create_locked_directory() -> tuple[Path, int] | None:
    """Returns a new directory and the descriptor that holds it; `None` where there is no place
    for one or no locks.
    """
    try:
        folder = _first_private_directory([_user_temp_directory()])
        remove_abandoned_directories(folder)
        prefix = _DIRECTORY_PREFIX + "-".join([*_boot_and_host(), ""])
        for _ in range(_MAX_CREATE_ATTEMPTS):
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            try:
                lock = _try_lock_directory(path)
            except FileNotFoundError:  # another process swept it before it was held
                continue
            except OSError:
                path.rmdir()  # which could not be removed later
                raise
            if lock is not None:
                return path, lock
    except OSError:
        pass
    return None


def _try_lock_directory(path: Path) -> int | None:
    """Holds a directory; `None` when another process does, or it was removed meanwhile."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None

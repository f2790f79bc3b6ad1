# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Bytes that all processes of a user on a host share, as one sealed file in memory.

The first process that needs the bytes writes them into a file of `memfd_create` and seals it, so
that no process can change it any more. The others find the file among the open files of the user's
processes in `/proc`, by its name, which contains the hash of the bytes. Each of them holds the file
open, so it exists as long as one process needs it. The kernel frees it when the last one ends, even
if that one was killed. The address of an abstract socket is the lock under which a file is made,
because the kernel frees it, too.

Processes of other users cannot open the file. A process of the same user is trusted, as it could
change the memory of this one. The content should nevertheless be of a format that contains no code.

Processes in different containers do not see each other, so each container has a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CREATION_WAIT_SECONDS: Final = 300.0
"""Time for which a process waits for the file that another one makes."""
_CREATION_POLL_SECONDS: Final = 0.05
_FILE_NAME_PREFIX: Final = "farandole-bytes-"


def open_host_memory_file(digest: str, read_content: Callable[[], bytes]) -> int | None:
    """Returns the descriptor of the file with some bytes, open for reading, which exists once for
    the user's processes on this host.

    Args:
        digest: hash of the bytes, in hexadecimal.
        read_content: returns the bytes; called by the process that makes the file.

    Returns:
        The descriptor, or `None` if the system has no such files.
    """
    if sys.platform != "linux":
        return None
    name = f"{_FILE_NAME_PREFIX}{digest}"
    found = _find_open_file(name)
    if found is not None:
        return found
    with _hold_creation_lock(name) as found:
        return _create_sealed_file(name, read_content()) if found is None else found


def _find_open_file(name: str) -> int | None:
    """Opens the file that another process of this user, or this process, has open.

    Args:
        name: name of the file.
    """
    own, wanted = os.getuid(), f"/memfd:{name} (deleted)"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        # The process may have ended, or may not be readable.
        with contextlib.suppress(OSError):
            if process.stat().st_uid != own:
                continue
            for link in (process / "fd").iterdir():
                opened = _open_if_sealed(link, wanted)
                if opened is not None:
                    return opened
    return None


def _open_if_sealed(link: Path, wanted: str) -> int | None:
    """Opens the file behind a link of `/proc`, if it has the wanted target and is complete."""
    with contextlib.suppress(OSError):
        if str(link.readlink()) == wanted:
            # Open for reading only: Linux before 6.7 maps no other descriptor of a sealed file.
            descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            if _is_sealed(descriptor):
                return descriptor
            os.close(descriptor)
    return None


def _is_sealed(descriptor: int) -> bool:
    import fcntl  # noqa: PLC0415 - only on Linux

    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


def _create_sealed_file(name: str, content: bytes) -> int:
    """Returns a new file with a content that no process can change.

    Args:
        name: name of the file, for `/proc`.
        content: the content.
    """
    import fcntl  # noqa: PLC0415 - only on Linux

    writable = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(writable, rest) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


@contextlib.contextmanager
def _hold_creation_lock(name: str) -> Iterator[int | None]:
    """Makes sure that one process of this user at a time makes the file.

    Yields:
        The descriptor of the file, if another process has made it in the meantime. `None` if this
        process is to make it: it has the lock, or it has waited in vain.
    """
    deadline = time.monotonic() + MAX_CREATION_WAIT_SECONDS
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0{name}-{os.getuid()}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    yield None
                    return
                found = _find_open_file(name)
                if found is not None:
                    yield found
                    return
                time.sleep(_CREATION_POLL_SECONDS)
            else:
                yield _find_open_file(name)
                return

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Bytes that all processes of a user on a host share, as one sealed file in memory.

The first process that needs the bytes writes them into a file of `memfd_create` and seals it, so
that no process can change it any more. The others find the file among the open files of the user's
processes in `/proc`, by its name, which contains the hash of the bytes. Each of them holds the file
open, so it exists as long as one process needs it. The kernel frees it when the last one ends, even
if that one was killed. The address of an abstract socket is the lock under which a file is made,
because the kernel frees it, too.

Another user cannot plant a file: each process that opens one checks the owner, the seals and the
hash of the bytes, and a file with other bytes is passed over. Nor can another user stop the making
of a file: a process waits for a lock only if its holder is a process of the same user.

Processes in different containers do not see each other, so each container has a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CREATION_WAIT_SECONDS: Final = 300.0
"""Time for which a process waits for the file that another one makes."""
_CREATION_POLL_SECONDS: Final = 0.05
_MAX_SILENT_LOCK_SECONDS: Final = 2.0
"""Time after which a lock whose holder does not say who it is counts as another user's."""
_FILE_NAME_PREFIX: Final = "farandole-bytes-"


def open_host_memory_file(digest: str, read_content: Callable[[], bytes]) -> int | None:
    """Returns the descriptor of the file with some bytes, open for reading, which exists once for
    the user's processes on this host.

    Args:
        digest: SHA-256 of the bytes, in hexadecimal.
        read_content: returns the bytes; called by the process that makes the file.

    Returns:
        The descriptor, or `None` if the system has no such files.

    Raises:
        ValueError: `read_content` returned bytes with another hash.
    """
    if sys.platform != "linux":
        return None
    found = _find_open_file(digest)
    if found is not None:
        return found
    with _hold_creation_lock(digest) as found:
        return _create_sealed_file(digest, read_content()) if found is None else found


def _find_open_file(digest: str) -> int | None:
    """Opens the file that another process of this user, or this process, has open.

    Args:
        digest: SHA-256 of its bytes.
    """
    own = os.geteuid()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        # The process may have ended, or may not be readable.
        with contextlib.suppress(OSError):
            if process.stat().st_uid != own:
                continue
            for link in (process / "fd").iterdir():
                opened = _open_if_genuine(link, digest)
                if opened is not None:
                    return opened
    return None


def _open_if_genuine(link: Path, digest: str) -> int | None:
    """Opens the file behind a link of `/proc`, if it is complete and has the bytes of a hash."""
    with contextlib.suppress(OSError):
        if str(link.readlink()) == f"/memfd:{_FILE_NAME_PREFIX}{digest} (deleted)":
            # Open for reading only: Linux before 6.7 maps no other descriptor of a sealed file.
            descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            if _is_genuine(descriptor, digest):
                return descriptor
            os.close(descriptor)
    return None


def _is_genuine(descriptor: int, digest: str) -> bool:
    """Returns whether a file is this user's, cannot change any more, and has the bytes of a hash.

    A process of this user may have a file open that another user made and sent to it.
    """
    import fcntl  # noqa: PLC0415 - only on Linux

    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    if (
        os.fstat(descriptor).st_uid != os.geteuid()
        or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals != seals
    ):
        return False
    with open(descriptor, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def _create_sealed_file(digest: str, content: bytes) -> int:
    """Returns a new file with a content that no process can change.

    Args:
        digest: SHA-256 of the content.
        content: the content.

    Raises:
        ValueError: the content has another hash.
    """
    import fcntl  # noqa: PLC0415 - only on Linux

    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{len(content)} bytes arrived damaged: their SHA-256 is not {digest}")
    name = f"{_FILE_NAME_PREFIX}{digest}"
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
def _hold_creation_lock(digest: str) -> Iterator[int | None]:
    """Makes sure that one process of this user at a time makes the file.

    Yields:
        The descriptor of the file, if another process has made it in the meantime. `None` if this
        process is to make it: it has the lock, it has waited in vain, or another user has the lock.
    """
    address = f"\0{_FILE_NAME_PREFIX}{digest}-{os.geteuid()}"
    deadline = time.monotonic() + MAX_CREATION_WAIT_SECONDS
    last_answer_time = time.monotonic()
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(address)
                lock.listen(socket.SOMAXCONN)  # so that the others can ask for the user
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    yield None
                    return
            else:
                yield _find_open_file(digest)
                return
            holder, now = _lock_holder_uid(address), time.monotonic()
            last_answer_time = last_answer_time if holder is None else now
            if (
                holder not in {None, os.geteuid()}
                or now - last_answer_time > _MAX_SILENT_LOCK_SECONDS
                or now > deadline
            ):
                yield None
                return
            found = _find_open_file(digest)
            if found is not None:
                yield found
                return
            time.sleep(_CREATION_POLL_SECONDS)


def _lock_holder_uid(address: str) -> int | None:
    """Returns the user of the process that listens at an address; `None` if none answers."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(address)
        size = struct.calcsize("3i")
        peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return struct.unpack("3i", peer)[1]
    return None

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Returns unused memory of the C library's heap to the system.

Workers keep memory that a training step frees, because the next step needs it again
(`launcher.ALLOCATOR`). But blocks of another size may not fit into the holes, and one small live
block keeps everything below it, so a program whose tensors change their sizes would grow without
limit. Therefore a thread checks the heap regularly. Memory that was unused for some seconds is
returned to the system if it is more than an eighth of the used memory.

If this happens again and again, the holes never fit: the memory is back within a second, spread
over the heap. Then large blocks get memory of their own, which is returned when they are freed. It
costs page faults, so programs whose tensors keep their sizes never come to this.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from farandole._native.launcher import ALLOCATOR

_INTERVAL = 0.25
"""Seconds between two looks."""

_SECONDS = 2.0
"""Seconds for which memory must be unused. A training step usually frees memory and takes it
again sooner.
"""

_LOOKS = 8
"""Looks within that time, at least: one of them is likely to find most of a step's memory in
use.
"""

_LEAST = 32 << 20
"""Bytes that are not worth the work."""

_SHARE = 8
"""Unused memory may be up to this fraction of the memory in use: one eighth."""

_CHURN = 4
_CHURN_SECONDS = 30.0
"""This many trims within this time mean that freed memory does not fit what is allocated next."""

_OWN = 1 << 20
"""Bytes from which a block then gets memory of its own."""

_M_MMAP_THRESHOLD = -3
"""The parameter of `mallopt(3)`."""

_of_process: int | None = None


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost"
        )
    )  # fmt: skip


class Heap:
    """The heap of this process, if its C library tells of it."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._info = library.mallinfo2
        self._info.restype = _Mallinfo
        self._trim = library.malloc_trim
        self._trim.argtypes = [ctypes.c_size_t]
        self._option = library.mallopt

    def used(self) -> int:
        """Returns the bytes that the program has and has not freed."""
        info = self._info()
        return info.uordblks + info.hblkhd

    def resident(self) -> int:
        """Returns the bytes of memory that are no pages of files."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise OSError("the kernel does not report it")

    def trim(self) -> None:
        """Returns unused memory to the system."""
        self._trim(0)

    def separate(self) -> None:
        """Gives large blocks, from now on, memory of their own."""
        self._option(_M_MMAP_THRESHOLD, _OWN)


class Watch:
    """Decides when to trim."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._looks: deque[tuple[float, int]] = deque()
        """Times of the last looks, each with the bytes that were resident and unused."""
        self._rest = 0
        """Bytes that a trim could not return, because other allocators hold them."""
        self._trims: deque[float] = deque(maxlen=_CHURN)
        """Times of the last trims."""

    def look(self, now: float) -> bool:
        """Returns one look, at this time in seconds; whether it trimmed."""
        used = self._heap.used()
        self._looks.append((now, self._heap.resident() - used))
        while len(self._looks) > _LOOKS and self._looks[1][0] <= now - _SECONDS:
            self._looks.popleft()
        if len(self._looks) < _LOOKS or self._looks[0][0] > now - _SECONDS:
            return False
        if min(unused for _, unused in self._looks) - self._rest <= max(_LEAST, used // _SHARE):
            return False
        self._heap.trim()
        self._looks.clear()
        self._rest = max(self._heap.resident() - self._heap.used(), 0)
        self._trims.append(now)
        if len(self._trims) == _CHURN and now - self._trims[0] <= _CHURN_SECONDS:
            self._heap.separate()
            self._trims.clear()
        return True


def start() -> None:
    """Starts the thread, once in a process, where the C library keeps freed memory because a
    launcher told it to.
    """
    global _of_process  # noqa: PLW0603 - as the heap is
    # As it was when the C library read it; a warm worker was forked from a process that has it.
    with suppress(OSError, AttributeError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        name = "MALLOC_TRIM_THRESHOLD_"
        if _of_process == os.getpid() or f"{name}={ALLOCATOR[name]}".encode() not in given:
            return
        watch = Watch(Heap())
        _of_process = os.getpid()
        threading.Thread(target=_run, args=(watch,), name="farandole-heap", daemon=True).start()


def _run(watch: Watch) -> None:
    pause = threading.Event()
    with suppress(OSError):
        while not pause.wait(_INTERVAL):
            watch.look(time.monotonic())

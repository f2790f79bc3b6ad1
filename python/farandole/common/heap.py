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

_SAMPLE_INTERVAL = 0.25
"""Seconds between two looks."""

_UNUSED_SECONDS = 2.0
"""Seconds for which memory must be unused. A training step usually frees memory and takes it
again sooner.
"""

_MIN_SAMPLES = 8
"""Looks within that time, at least: one of them is likely to find most of a step's memory in
use.
"""

_MIN_TRIM_BYTES = 32 << 20
"""Bytes that are not worth the work."""

_MIN_TRIM_DIVISOR = 8
"""Unused memory may be up to this fraction of the memory in use: one eighth."""

_CHURN_TRIMS = 4
_CHURN_SECONDS = 30.0
"""Time in seconds: `_CHURN_TRIMS` trims in it mean that freed blocks fit no later allocations."""

_MMAP_THRESHOLD_BYTES = 1 << 20
"""Size in bytes from which a block is then mapped separately."""

_M_MMAP_THRESHOLD = -3
"""The parameter of `mallopt(3)`."""

_trimmer_pid: int | None = None


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost"
        )
    )  # fmt: skip


class MallocHeap:
    """The heap of this process, if its C library has statistics of the heap."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._info = library.mallinfo2
        self._info.restype = _MallocInfo
        self._trim = library.malloc_trim
        self._trim.argtypes = [ctypes.c_size_t]
        self._option = library.mallopt

    def used_bytes(self) -> int:
        """Returns the bytes that the program has and has not freed."""
        info = self._info()
        return info.uordblks + info.hblkhd

    def anonymous_resident_bytes(self) -> int:
        """Returns the bytes of memory that are no pages of files."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise OSError("the kernel does not report it")

    def trim_unused(self) -> None:
        """Returns unused memory to the system."""
        self._trim(0)

    def map_large_blocks(self) -> None:
        """Makes malloc map large blocks separately from now on."""
        self._option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class HeapTrimmer:
    """Decides when to trim."""

    def __init__(self, heap: MallocHeap) -> None:
        self._heap = heap
        self._samples: deque[tuple[float, int]] = deque()
        """Times of the last samples, each with the number of resident unused bytes."""
        self._untrimmable_bytes = 0
        """Bytes that a trim could not return, because other allocators hold them."""
        self._trim_times: deque[float] = deque(maxlen=_CHURN_TRIMS)
        """Times of the last trims."""

    def sample_heap_and_trim(self, now: float) -> bool:
        """Takes one sample at the given time in seconds; returns whether it trimmed the heap."""
        used = self._heap.used_bytes()
        self._samples.append((now, self._heap.anonymous_resident_bytes() - used))
        while len(self._samples) > _MIN_SAMPLES and self._samples[1][0] <= now - _UNUSED_SECONDS:
            self._samples.popleft()
        if len(self._samples) < _MIN_SAMPLES or self._samples[0][0] > now - _UNUSED_SECONDS:
            return False
        if min(unused for _, unused in self._samples) - self._untrimmable_bytes <= max(
            _MIN_TRIM_BYTES, used // _MIN_TRIM_DIVISOR
        ):
            return False
        self._heap.trim_unused()
        self._samples.clear()
        self._untrimmable_bytes = max(
            self._heap.anonymous_resident_bytes() - self._heap.used_bytes(), 0
        )
        self._trim_times.append(now)
        if len(self._trim_times) == _CHURN_TRIMS and now - self._trim_times[0] <= _CHURN_SECONDS:
            self._heap.map_large_blocks()
            self._trim_times.clear()
        return True


def start_heap_trimmer() -> None:
    """Starts the trimmer thread, once in a process, if a launcher has configured the C library to
    keep freed memory.
    """
    global _trimmer_pid  # noqa: PLW0603 - as the heap is
    # As it was when the C library read it; a warm worker was forked from a process that has it.
    with suppress(OSError, AttributeError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        name = "MALLOC_TRIM_THRESHOLD_"
        if _trimmer_pid == os.getpid() or f"{name}={ALLOCATOR[name]}".encode() not in given:
            return
        watch = HeapTrimmer(MallocHeap())
        _trimmer_pid = os.getpid()
        threading.Thread(
            target=_run_trimmer, args=(watch,), name="farandole-heap", daemon=True
        ).start()


def map_large_blocks() -> None:
    """Makes the C library map large blocks of this process separately, if it can: for a program
    that often frees large blocks, and allocates small ones between them.
    """
    with suppress(OSError, AttributeError):
        MallocHeap().map_large_blocks()


def _run_trimmer(watch: HeapTrimmer) -> None:
    pause = threading.Event()
    with suppress(OSError):
        while not pause.wait(_SAMPLE_INTERVAL):
            watch.sample_heap_and_trim(time.monotonic())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Load of a rank's host, process and GPU, from `/proc` and NVIDIA's management library.

If the driver shows the ranks, each worker sends its load every few seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.runner import stalls
from farandole.runner.watcher import EVENT, RANK, TOLD

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY: Final = 2.0
"""Seconds between two looks."""

_IDLE: Final = (3, 4)
"""Fields of `/proc/stat` in which a processor waits."""
_KIB: Final = 1024
_LIBRARY: Final = "libnvidia-ml.so.1"
_TAKEN: Final[list[int]] = []
"""The GPU of this process, once it is known."""
_INTRODUCED: Final[list[int]] = []
"""This process, once its driver knows it."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpu:
    """One GPU, as NVML tells of it.

    Args:
        index: Its number among those that this process sees.
        library: NVML, loaded and started.
    """

    def __init__(self, index: int, library: Any) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        visible = [
            part.strip()
            for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if part.strip()
        ]
        name = visible[index] if index < len(visible) else str(index)
        if name.isdigit():
            refused = library.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(int(name)), ctypes.byref(self._handle)
            )
        else:
            refused = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle))
        if refused:
            raise OSError(f"NVML does not know GPU {name}: error {refused}")

    @classmethod
    def of(cls, index: int, name: str = _LIBRARY) -> Gpu | None:
        """Returns the GPU, or `None` where there is no NVML that knows it.

        Args:
            index: Its number among those that this process sees.
            name: The library's.
        """
        try:
            library = ctypes.CDLL(name)
            return cls(index, library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def look(self) -> dict[str, float]:
        """Returns its load from 0 to 1 and its memory in bytes, as far as it tells them."""
        seen: dict[str, float] = {}
        use, memory = _Utilization(), _Memory()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(use)) == 0:
            seen["gpu"] = use.gpu / 100
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0:
            seen |= {"gpu_memory": memory.used, "gpu_memory_total": memory.total}
        return seen


class Load:
    """Looks at the host, this process and its GPU.

    Args:
        proc: Where the kernel tells of processes.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._ticks()

    def look(self, gpu: Gpu | None = None) -> dict[str, float]:
        """Shares are from 0 to 1 and mean the time since the last look; sizes are in bytes.

        Args:
            gpu: The GPU of this process, if it has one.
        """
        busy, whole = now = self._ticks()
        before, self._before = self._before, now
        seen: dict[str, float] = {}
        if whole > before[1]:
            seen["cpu"] = min(max((busy - before[0]) / (whole - before[1]), 0.0), 1.0)
        host = self._fields("meminfo")
        if "MemTotal" in host and "MemAvailable" in host:
            seen |= {
                "memory": host["MemTotal"] - host["MemAvailable"],
                "memory_total": host["MemTotal"],
            }
        own = self._fields("self/status")
        if "VmRSS" in own:
            seen["process_memory"] = own["VmRSS"]
        return seen | (gpu.look() if gpu is not None else {})

    def _ticks(self) -> tuple[int, int]:
        """Ticks in which the host's processors worked, and all of them, since it started."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = [
                int(field)
                for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            ]
            return sum(fields) - sum(fields[place] for place in _IDLE), sum(fields)
        return 0, 0

    def _fields(self, name: str) -> dict[str, int]:
        """Lines such as `MemTotal:  16384 kB`, in bytes."""
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (self._proc / name).read_text().splitlines())
            return {
                line[0].rstrip(":"): int(line[1]) * _KIB for line in lines if line[2:] == ["kB"]
            }
        return {}


def takes(index: int) -> None:
    """Says which GPU this process computes on.

    Args:
        index: Its number among those that this process sees.
    """
    _TAKEN[:] = [index]


def introduce() -> None:
    """Reports identity, load and stalls of this process to a driver that shows its ranks.
    Further calls do nothing.
    """
    if TOLD not in os.environ or _INTRODUCED:
        return
    from farandole._native import launcher  # noqa: PLC0415 - other workers need not load it first

    def say(record: dict[str, Any]) -> None:
        launcher.report(RANK, json.dumps(record).encode())

    _INTRODUCED.append(os.getpid())
    say({"pid": os.getpid()})
    stalls.follow(lambda event: launcher.report(EVENT, json.dumps(event).encode()))
    watch(say)


def watch(say: Callable[[dict[str, Any]], object]) -> None:
    """Starts a thread that reports this process's load until it ends.

    Args:
        say: Gets a record for each look. An exception ends the thread.
    """

    def look() -> None:
        load, asked, gpu = Load(), False, None
        with contextlib.suppress(Exception):  # such as a driver that is gone
            while True:
                time.sleep(EVERY)
                if _TAKEN and not asked:
                    asked, gpu = True, Gpu.of(_TAKEN[0])
                say({"load": load.look(gpu)})

    threading.Thread(target=look, name="farandole-load", daemon=True).start()

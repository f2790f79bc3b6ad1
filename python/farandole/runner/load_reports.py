# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Load of a rank's host, process and GPU, from `/proc` and NVIDIA's management library, and its
progress.

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

from farandole.common.rank_progress import OWN_PROGRESS
from farandole.runner import stall_events
from farandole.runner.job_observer import EVENT_KIND, RANK_KIND, REPORTS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

REPORT_INTERVAL: Final = 2.0
"""Seconds between two samples."""

_IDLE_FIELDS: Final = (3, 4)
"""Fields of `/proc/stat` in which a processor waits."""
_BYTES_PER_KIB: Final = 1024
_NVML_LIBRARY: Final = "libnvidia-ml.so.1"
_USED_GPU: Final[list[int]] = []
"""The GPU of this process, once it is known."""
_INTRODUCED_PID: Final[list[int]] = []
"""This process, once its driver knows it."""


class _NvmlUtilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlGpu:
    """A GPU, observed through NVML.

    Args:
        index: Number of the GPU among the GPUs that this process sees.
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
    def find_gpu(cls, index: int, name: str = _NVML_LIBRARY) -> NvmlGpu | None:
        """Returns the GPU, or `None` where there is no NVML that knows it.

        Args:
            index: Number of the GPU among the GPUs that this process sees.
            name: File name of the library.
        """
        try:
            library = ctypes.CDLL(name)
            return cls(index, library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def sample_load(self) -> dict[str, float]:
        """Returns the load from 0 to 1 and the memory in bytes; omits values that NVML lacks."""
        seen: dict[str, float] = {}
        use, memory = _NvmlUtilization(), _NvmlMemory()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(use)) == 0:
            seen["gpu"] = use.gpu / 100
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0:
            seen |= {"gpu_memory": memory.used, "gpu_memory_total": memory.total}
        return seen


class LoadSampler:
    """Samples the load of the host, this process and its GPU.

    Args:
        proc: Directory of the process file system.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._cpu_ticks()

    def sample_load(self, gpu: NvmlGpu | None = None) -> dict[str, float]:
        """Returns shares from 0 to 1 over the time since the last sample, and sizes in bytes.

        Args:
            gpu: The GPU of this process, if it has one.
        """
        busy, whole = now = self._cpu_ticks()
        before, self._before = self._before, now
        seen: dict[str, float] = {}
        if whole > before[1]:
            seen["cpu"] = min(max((busy - before[0]) / (whole - before[1]), 0.0), 1.0)
        host = self._kib_fields_as_bytes("meminfo")
        if "MemTotal" in host and "MemAvailable" in host:
            seen |= {
                "memory": host["MemTotal"] - host["MemAvailable"],
                "memory_total": host["MemTotal"],
            }
        own = self._kib_fields_as_bytes("self/status")
        if "VmRSS" in own:
            seen["process_memory"] = own["VmRSS"]
        return seen | (gpu.sample_load() if gpu is not None else {})

    def _cpu_ticks(self) -> tuple[int, int]:
        """Returns the busy ticks and all ticks of the host's processors since the host started."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = [
                int(field)
                for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            ]
            return sum(fields) - sum(fields[index] for index in _IDLE_FIELDS), sum(fields)
        return 0, 0

    def _kib_fields_as_bytes(self, name: str) -> dict[str, int]:
        """Returns the fields of lines such as `MemTotal:  16384 kB`, in bytes."""
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (self._proc / name).read_text().splitlines())
            return {
                line[0].rstrip(":"): int(line[1]) * _BYTES_PER_KIB
                for line in lines
                if line[2:] == ["kB"]
            }
        return {}


def set_reported_gpu(index: int) -> None:
    """Sets the GPU that this process computes on.

    Args:
        index: Number of the GPU among the GPUs that this process sees.
    """
    _USED_GPU[:] = [index]


def start_rank_reports() -> None:
    """Reports identity, load and stalls of this process to a driver that shows its ranks.
    Further calls do nothing.
    """
    if REPORTS_VARIABLE not in os.environ or _INTRODUCED_PID:
        return
    from farandole._native import launcher  # noqa: PLC0415 - other workers need not load it first

    def report_rank(record: dict[str, Any]) -> None:
        launcher.report_record(RANK_KIND, json.dumps(record).encode())

    _INTRODUCED_PID.append(os.getpid())
    OWN_PROGRESS.measures_steps = True
    report_rank({"pid": os.getpid()})
    stall_events.forward_stall_reports(
        lambda event: launcher.report_record(EVENT_KIND, json.dumps(event).encode())
    )
    start_load_reports(report_rank)


def start_load_reports(report_sample: Callable[[dict[str, Any]], object]) -> None:
    """Starts a thread that reports this process's load until it ends.

    Args:
        report_sample: Receives a record for each sample. An exception ends the thread.
    """

    def report_load() -> None:
        load, asked, gpu = LoadSampler(), False, None
        with contextlib.suppress(Exception):  # such as a driver that is gone
            while True:
                time.sleep(REPORT_INTERVAL)
                if _USED_GPU and not asked:
                    asked, gpu = True, NvmlGpu.find_gpu(_USED_GPU[0])
                report_sample({"load": load.sample_load(gpu)} | OWN_PROGRESS.take_report())

    threading.Thread(target=report_load, name="farandole-load", daemon=True).start()

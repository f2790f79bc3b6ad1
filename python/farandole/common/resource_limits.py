# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cores and memory that this process can use: the least that the host, and each cgroup above the
process, allows.

A container's `/proc/meminfo`, `os.cpu_count()` and free space of `/dev/shm` show the host. The
limits of the container are in the files of its cgroup and of all cgroups above it. Versions 1 and 2
of cgroups have different files, and a host may have both.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
"""Smallest value that means no limit: version 1 writes a number for it."""


@dataclass(frozen=True)
class _ControllerFiles:
    """Names of the files of one controller in one version of cgroups."""

    controller: str
    limits: tuple[str, ...]
    usage: str = ""
    reclaimable: str = ""


_MEMORY_V2 = _ControllerFiles(
    "memory", ("memory.max", "memory.high"), "memory.current", "inactive_file"
)
_MEMORY_V1 = _ControllerFiles(
    "memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_CPU_V2 = _ControllerFiles("cpu", ("cpu.max",))
_CPU_V1 = _ControllerFiles("cpu", ("cpu.cfs_quota_us",))


def usable_cores(proc: Path = _PROC) -> int:
    """Returns the number of cores that this process can keep busy: those it may run on, and no more
    than the CPU time of each cgroup above it, rounded up.

    Args:
        proc: Path of the proc file system.
    """
    cores = len(os.sched_getaffinity(0))
    for files, folder in _cgroup_folders(proc, _CPU_V2, _CPU_V1):
        text = _read_text(folder / files.limits[0])
        if files is _CPU_V1:
            text = f"{text} {_read_text(folder / 'cpu.cfs_period_us')}"
        quota, _, period = text.partition(" ")
        # `max` and -1 mean no limit.
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory_bytes(proc: Path = _PROC) -> int:
    """Returns the bytes of memory that this process can still take: the free memory of the host,
    and no more than is left in each cgroup above this process. Pages of files that the
    kernel can drop count as free.

    Args:
        proc: Path of the proc file system.
    """
    free = _host_memory_bytes(proc, "MemAvailable")
    for files, folder, limit in _memory_limits(proc):
        used = _read_text(folder / files.usage)
        if used.isdigit():
            free = min(free, limit - int(used) + _reclaimable_bytes(files, folder))
    return max(0, free)


def memory_limit_bytes(proc: Path = _PROC) -> int:
    """Returns the bytes of memory that this process can have at most: the memory of the host, and
    no more than the limit of each cgroup above this process. It does not change with the
    load of the host.

    Args:
        proc: Path of the proc file system.
    """
    limits = (limit for _, _, limit in _memory_limits(proc))
    return min(_host_memory_bytes(proc, "MemTotal"), *limits, _UNLIMITED_BYTES)


def _host_memory_bytes(proc: Path, name: str) -> int:
    for line in _read_text(proc / "meminfo").splitlines():
        key, _, value = line.partition(":")
        fields = value.split()
        if key == name and fields and fields[0].isdigit():
            return int(fields[0]) * 1024
    return _UNLIMITED_BYTES


def _memory_limits(proc: Path) -> Iterator[tuple[_ControllerFiles, Path, int]]:
    for files, folder in _cgroup_folders(proc, _MEMORY_V2, _MEMORY_V1):
        texts = (_read_text(folder / name) for name in files.limits)
        limits = [int(text) for text in texts if text.isdigit()]
        if limits and min(limits) < _UNLIMITED_BYTES:
            yield files, folder, min(limits)


def _reclaimable_bytes(files: _ControllerFiles, folder: Path) -> int:
    for line in _read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == files.reclaimable and value.isdigit():
            return int(value)
    return 0


def _cgroup_folders(
    proc: Path, second: _ControllerFiles, first: _ControllerFiles
) -> Iterator[tuple[_ControllerFiles, Path]]:
    """Yields the folders of this process's cgroup and of all cgroups above it, each with the names
    of its files.

    Args:
        proc: Path of the proc file system.
        second: Files in version 2.
        first: Files in version 1.
    """
    for line in _read_text(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            files, kind, option = second, "cgroup2", ""
        elif first.controller in controllers.split(","):
            files, kind, option = first, "cgroup", first.controller
        else:
            continue
        for root, mount_point in _cgroup_mounts(proc, kind, option):
            # A container may see the host's path of its cgroup, and only its own cgroup mounted.
            inside = path.removeprefix(root) if path.startswith(root) else ""
            folder = mount_point / inside.strip("/")
            if ".." in folder.parts:
                folder = mount_point
            while True:
                yield files, folder
                if folder == mount_point:
                    break
                folder = folder.parent


def _cgroup_mounts(proc: Path, kind: str, option: str) -> Iterator[tuple[str, Path]]:
    """Yields the root inside the hierarchy, and the mount point, of each mount of a hierarchy."""
    for line in _read_text(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, described = before.split(), after.split()
        if (
            len(fields) > 4  # noqa: PLR2004 - number, parent, device, root, mount point
            and len(described) > 2  # noqa: PLR2004 - type, source, options
            and described[0] == kind
            and (not option or option in described[2].split(","))
        ):
            yield fields[3].rstrip("/"), Path(fields[4])


def _read_text(path: Path) -> str:
    """Returns the content of a file; an empty text if it cannot be read, because not every cgroup
    has every file.
    """
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

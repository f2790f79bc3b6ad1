# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory for decoded data: budgets of readers, and storage for `inmemory_cache_all`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.common.logs import start_logging
from farandole.common.resource_limits import available_memory_bytes, memory_limit_bytes
from farandole.data.arrays import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole._native.reader import Dataset

_log = logging.getLogger(__name__)

_SHARED_MEMORY_PATH = Path("/dev/shm")  # noqa: S108 - shared memory has no other name
_FREE_SPACE_FACTOR = 1.1
"""Times the data that has to be free: others use the memory, too."""
_MAX_BYTE_BUDGET = 512 << 20
_MIN_BYTE_BUDGET = 128 << 20
_MEMORY_SHARE = 4
"""The limit of memory divided by a reader's default budget: other readers, ranks and the model use
memory, too.
"""
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_CACHE_FILE_PREFIX = "farandole-cache-"
"""Begin of the names of the native reader's cache files."""
_STAT_BLOCK_BYTES = 512


def default_byte_budget() -> int:
    """Returns the bytes of data that a reader may hold by default."""
    share = memory_limit_bytes() // _MEMORY_SHARE
    return min(_MAX_BYTE_BUDGET, max(_MIN_BYTE_BUDGET, share))


class MemoryReservation:
    """Memory that this process is going to fill. It counts as long as this object lives.

    Attributes:
        needed: Its bytes.
        filled: Bytes that are filled.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.filled = 0
        _reservations.add(self)


_reservations: weakref.WeakSet[MemoryReservation] = weakref.WeakSet()


def reserve_memory(needed: int) -> MemoryReservation | None:
    """Reserves memory for rows that each rank of this host keeps for itself.

    Args:
        needed: Bytes that this process needs.

    Returns:
        The reservation. `None`, with a warning, if an equal share for each rank of the memory that
        is free and not promised is too small.
    """
    ranks = max(1, int(os.environ.get("HOROVOD_LOCAL_SIZE") or 1))
    free = _unreserved_memory_bytes() // ranks
    if free >= needed * _FREE_SPACE_FACTOR:
        return MemoryReservation(needed)
    _log.warning(
        "inmemory_cache_all: the rows of this process are not kept, because %.1f GiB of memory are "
        "free for each rank of this host, and %.1f GiB are needed: each epoch reads them again, in "
        "the order of the first one",
        free / 2**30,
        needed / 2**30,
    )
    return None


def _unreserved_memory_bytes() -> int:
    """Returns the memory that is free, without the memory that this process will still fill."""
    reserved = sum(max(0, one.needed - one.filled) for one in list(_reservations))
    return max(0, available_memory_bytes() - _unfilled_cache_bytes() - reserved)


def _unfilled_cache_bytes() -> int:
    """Returns the bytes that the readers of this process will still write into their cache files in
    memory. A new cache file has its full size, and takes memory when it is written.
    """
    unfilled: dict[tuple[int, int], int] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            path = descriptor.readlink()
            if path.name.startswith(_CACHE_FILE_PREFIX) and _is_memory_filesystem(path.parent):
                found = descriptor.stat()
                taken = found.st_blocks * _STAT_BLOCK_BYTES
                unfilled[found.st_dev, found.st_ino] = max(0, found.st_size - taken)
    return sum(unfilled.values())


def _is_memory_filesystem(folder: Path) -> bool:
    return folder == _SHARED_MEMORY_PATH or _file_system_kind(str(folder)) in _MEMORY_FILE_SYSTEMS


def _free_cache_bytes(folder: Path | str) -> int:
    """Returns the bytes for new cache files in a directory that is in memory."""
    on_device = shutil.disk_usage(folder).free - _unfilled_cache_bytes()
    return max(0, min(on_device, _unreserved_memory_bytes()))


def choose_cache_directory(dataset: Dataset, columns: Sequence[str] | None) -> str | None:
    """Returns a directory in shared memory if that is large enough, and if the cgroups of this
    process allow so much memory. Otherwise returns the directory for temporary files, whose pages
    stay in memory as long as there is room. Returns `None` if that is in memory, too.

    Args:
        dataset: Data set that is cached.
        columns: Columns of the data set; `None` for all.
    """
    # The reader warns if it cannot use the cache.
    start_logging()
    cached = [field for field in dataset.columns if columns is None or field.name in columns]
    needed = dataset.rows * sum(
        ELEMENT_BYTES.get(field.dtype, 8) * math.prod(field.shape) for field in cached
    )
    if _SHARED_MEMORY_PATH.is_dir() and os.access(_SHARED_MEMORY_PATH, os.W_OK):
        free = _free_cache_bytes(_SHARED_MEMORY_PATH)
        if free >= needed * _FREE_SPACE_FACTOR:
            return str(_SHARED_MEMORY_PATH)
        _log.warning(
            "inmemory_cache_all: %.1f GiB of %s are free within the limits of this process's "
            "cgroups, %.1f GiB are needed",
            free / 2**30,
            _SHARED_MEMORY_PATH,
            needed / 2**30,
        )
    folder = tempfile.gettempdir()
    if _file_system_kind(folder) not in _MEMORY_FILE_SYSTEMS:
        _log.warning("inmemory_cache_all: decoded data goes to %s", folder)
        return folder
    if _free_cache_bytes(folder) >= needed * _FREE_SPACE_FACTOR:
        return folder
    _log.warning(
        "inmemory_cache_all: decoded data is not kept, because %s is in memory, too: each epoch "
        "decodes it again. Set TMPDIR to a directory on a disk to keep it there",
        folder,
    )
    return None


def _file_system_kind(folder: str) -> str:
    """Returns the type of the file system of a directory; an empty text if it is unknown."""
    device = Path(folder).stat().st_dev
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return after.split()[0]
    return ""

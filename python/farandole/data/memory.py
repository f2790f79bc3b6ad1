# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Storage for decoded data, for `inmemory_cache_all`."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole._native.reader import Dataset

_log = logging.getLogger(__name__)

_SHARED_MEMORY_PATH = Path("/dev/shm")  # noqa: S108 - shared memory has no other name
_FREE_SPACE_FACTOR = 1.1
"""Times the data that has to be free: others use the memory, too."""

DECODED_ELEMENT_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
}


def cache_directory(dataset: Dataset, columns: Sequence[str] | None) -> str:
    """Returns a directory in shared memory if that is large enough, else the directory for
    temporary files, whose pages stay in memory, too.

    Args:
        dataset: What will be kept.
        columns: Which of its columns; `None`: all.
    """
    kept = [field for field in dataset.columns if columns is None or field.name in columns]
    needed = dataset.rows * sum(
        DECODED_ELEMENT_BYTES.get(field.dtype, 8) * math.prod(field.shape) for field in kept
    )
    if _SHARED_MEMORY_PATH.is_dir() and os.access(_SHARED_MEMORY_PATH, os.W_OK):
        free = shutil.disk_usage(_SHARED_MEMORY_PATH).free
        if free >= needed * _FREE_SPACE_FACTOR:
            return str(_SHARED_MEMORY_PATH)
        _log.warning(
            "inmemory_cache_all: %.1f GiB of %s are free, %.1f GiB are needed: decoded data goes "
            "to %s",
            free / 2**30,
            _SHARED_MEMORY_PATH,
            needed / 2**30,
            tempfile.gettempdir(),
        )
    return tempfile.gettempdir()

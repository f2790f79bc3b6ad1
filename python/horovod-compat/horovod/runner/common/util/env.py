# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Environment variables of workers, as scripts ask for them."""

from __future__ import annotations

import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]

_KEPT_BACK = re.compile(r"BASH_FUNC_.*|OLDPWD|.*\s.*", re.DOTALL)
_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether a variable of this name can be handed to a worker through a command line."""
    return _KEPT_BACK.fullmatch(v) is None


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size as the launcher has set them; `(0, 1)` in a process that nobody launched.

    Raises:
        ValueError: A variable holds no number.
    """
    for rank, size in _RANK_AND_SIZE:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1

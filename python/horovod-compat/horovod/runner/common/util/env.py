# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Environment variables of workers, as scripts ask for them."""

from __future__ import annotations

import os
import re

from horovod.runner.common.util.secret import HOROVOD_SECRET_KEY

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", HOROVOD_SECRET_KEY}
"""Beginnings of names that are not handed to workers."""
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
"""Program by which Kubeflow's MPI operator reaches workers, in place of ssh."""

_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Returns whether a variable of this name is handed to workers."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size as the launcher has set them; `(0, 1)` in a process without a launcher.

    Raises:
        RuntimeError: One of two variables is there without the other.
        ValueError: A variable holds no number.
    """
    for rank, size in _RANK_AND_SIZE:
        there = [name for name in (rank, size) if name in os.environ]
        if len(there) == 1 and not rank.startswith("RANK"):
            raise RuntimeError(
                f"rank and size are not known: of {rank} and {size} only {there[0]} is set"
            )
        if len(there) > 1:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Returns whether Kubeflow's MPI operator has started this process."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112 - Open MPI's

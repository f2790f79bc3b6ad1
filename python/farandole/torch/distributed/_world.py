# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The world of a default group.

A process that Farandole or another launcher has started knows its world from its environment. In
any other process, the ranks of the group form a world by the store of torch: rank 0 hosts a
registrar and publishes its ticket. So every `init_method` of torch works, with any launcher.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Final

from farandole import _variables as variables
from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.torch.distributed._groups import WorldStore, ensure_session_started

_START_TIMEOUT: Final = timedelta(minutes=5)
_SIZE_VARIABLES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)
"""Variables of launchers with the number of ranks."""


def join_world_of_group(store: Any, rank: int, size: int) -> None:
    """Joins the world of a default group, unless this process is in a world.

    Args:
        store: The store of the group.
        rank: This process's rank in the group.
        size: Number of ranks.

    Raises:
        FarandoleEnvironmentError: The ranks did not meet in time.
    """
    if basics.is_initialized():
        return
    if size > 1 and not _has_launcher_rank(size):
        _form_world_by_store(WorldStore(store, "ticket"), rank, size)
    ensure_session_started()


def _has_launcher_rank(size: int) -> bool:
    """Returns whether a launcher has started this process as one of `size`."""
    if variables.TASK in os.environ:
        return True
    return any(os.environ.get(name) == str(size) for name in _SIZE_VARIABLES)


def _form_world_by_store(store: WorldStore, rank: int, size: int) -> None:
    end = time.monotonic() + _START_TIMEOUT.total_seconds()
    store.set(f"host/{rank}", engine.shared_memory_identity())
    if rank == 0:
        late = [other for other in range(size) if not store.wait_for_key(f"host/{other}", end)]
        if late:
            raise FarandoleEnvironmentError(
                f"rank {', '.join(map(str, late))} of {size} did not call init_process_group "
                f"within {_START_TIMEOUT.total_seconds():.0f} s"
            )
        hosts = {store.get(f"host/{other}") for other in range(size)}
        ticket = engine.host_registrar(size, len(hosts) == 1)
        store.set("ticket", ticket)
    else:
        if not store.wait_for_key("ticket", end):
            raise FarandoleEnvironmentError(
                "rank 0 did not call init_process_group within "
                f"{_START_TIMEOUT.total_seconds():.0f} s"
            )
        ticket = store.get("ticket")
    basics.set_world_ticket(ticket, rank)

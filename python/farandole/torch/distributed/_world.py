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
from farandole.common.termination_notices import is_elastic_worker
from farandole.torch.distributed._groups import WorldStore, ensure_session_started
from farandole.torch.distributed._work import OperationTimeoutError

_START_TIMEOUT: Final = timedelta(minutes=5)
_RUNNING: Final = "running"
_LAUNCHED: Final = "launched"
_FORM: Final = "form"
_REFUSE: Final = "refuse"
_VOTES: Final = (_RUNNING, _LAUNCHED, _FORM, _REFUSE)
"""Ways to join a world: its session runs, the launcher has numbered the ranks, the ranks form it
by their store, or not at all."""
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


def join_world_by_vote(store: Any, rank: int, size: int, limit: timedelta) -> bool:
    """Joins the world of a default group of backend `"gloo"`, unless the session of a rank cannot
    be this world. All ranks decide the same.

    Args:
        store: The store of the group.
        rank: This process's rank in the group.
        size: Number of ranks.
        limit: Longest wait for the other ranks.

    Returns:
        Whether the group can run in the session.

    Raises:
        OperationTimeoutError: Not all ranks created the group in time.
        FarandoleEnvironmentError: The ranks did not form the world in time.
    """
    vote = _own_vote(rank, size)
    if size > 1 and not is_elastic_worker():
        votes = WorldStore(store, "as_gloo")
        number = (votes.add("entered", 1) - 1) // size
        verdict = _collect_votes(votes, number, vote, size, limit)
        if verdict == _FORM:
            _form_world_by_store(WorldStore(store, f"as_gloo/{number}"), rank, size)
    else:
        verdict = vote
    if verdict == _REFUSE:
        return False
    ensure_session_started()
    return True


def _own_vote(rank: int, size: int) -> str:
    """Returns how this process can join a world with a rank and a size."""
    if basics.is_initialized():
        return _RUNNING if (rank, size) == (basics.rank(), basics.size()) else _REFUSE
    if is_elastic_worker():
        return _LAUNCHED
    if variables.TASK in os.environ:
        launched = tuple(os.environ.get(f"HOROVOD_{name}") for name in ("RANK", "SIZE"))
        return _LAUNCHED if launched == (str(rank), str(size)) else _REFUSE
    if size > 1:
        # Not by the variables of another launcher: a script may give its ranks other numbers.
        return _FORM
    sizes = {os.environ[name] for name in _SIZE_VARIABLES if name in os.environ}
    return _LAUNCHED if sizes <= {"1"} else _REFUSE


def _collect_votes(votes: WorldStore, number: int, vote: str, size: int, limit: timedelta) -> str:
    """Returns the verdict of all ranks.

    Args:
        votes: The store of the ranks.
        number: Number of the vote in this store.
        vote: The vote of this process.
        size: Number of ranks.
        limit: Longest wait for the other ranks.
    """
    votes.add(f"{number}/{vote}", 1)
    verdict_key = f"{number}/verdict"
    if votes.add(f"{number}/voted", 1) == size:
        cast = {choice for choice in _VOTES if votes.add(f"{number}/{choice}", 0)}
        refused = _REFUSE in cast or {_RUNNING, _FORM} <= cast
        votes.set(verdict_key, _REFUSE if refused else _FORM if _FORM in cast else _LAUNCHED)
    elif not votes.wait_for_key(verdict_key, time.monotonic() + limit.total_seconds()):
        raise OperationTimeoutError(
            f"not all of {size} ranks created the default group within "
            f"{limit.total_seconds():.0f} s"
        )
    return votes.get(verdict_key)


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

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The session of this process: joining and leaving the world, and questions about it."""

from __future__ import annotations

import atexit
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farandole._native import engine
from farandole.common import logs, stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.common.process_sets import ProcessSet

_on_init: list[Callable[[], None]] = []


def on_init(reset: Callable[[], None]) -> None:
    """Has `reset` called whenever a new world begins; framework modules drop what belonged to the last one."""
    _on_init.append(reset)


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Joins the world this process was launched into, or a world of its own when nobody launched it.

    Does nothing while a session runs; may be called again after `shutdown`. Leaves the world by itself when the
    interpreter exits.

    Args:
        comm: `None`, or the ranks of the launched world that form this one, numbered anew in ascending order.
        process_sets: Sets to register, the same in the same order on all ranks; or `"dynamic"`, so that sets may be
            added and removed later.

    Raises:
        ValueError: When an argument is wrong, ranks ask for different sets, or this process was forked from an
            initialized one.
        FarandoleEnvironmentError: When the ticket, the registrar or a host refuses.
        FarandoleInternalError: When a peer failed while the world formed.
    """
    from farandole.common.process_sets import register  # noqa: PLC0415 - it imports this module

    if hasattr(comm, "Get_rank"):
        raise ValueError("comm must be a list of ranks, not an MPI communicator: there is no MPI")
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets must be a list of process sets or "dynamic": {process_sets!r}')
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    ranks = [process_set.ranks or [] for process_set in sets]
    for index, members in enumerate(ranks):
        if members in ranks[:index]:
            raise ValueError(f"process_sets[{index}] has the same ranks as an earlier one: {members}")
    logs.start()
    if not engine.init(None if comm is None else list(comm), ranks, process_sets == "dynamic"):
        return
    if engine.world().size > 1:
        stacks.start()  # alone, nobody asks what this process waits in
    for reset in _on_init:
        reset()
    for number, process_set in enumerate(sets, start=1):
        register(process_set, number)
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def shutdown() -> None:
    """Leaves the world; operations that still wait fail with `FarandoleInternalError`, here and on all ranks."""
    engine.shutdown()


def is_initialized() -> bool:
    """Whether this process has joined a world and not left it."""
    return engine.is_initialized()


def size() -> int:
    """Number of processes.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().size


def rank() -> int:
    """This process's number among all, from 0.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().rank


def local_size() -> int:
    """Number of processes on this host.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().local_size


def local_rank() -> int:
    """This process's number on its host, from 0: which GPU to take.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().local_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().cross_size


def cross_rank() -> int:
    """This host's number among those that have a process with this local rank.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().cross_rank


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI may be used from several threads: never, there is no MPI underneath.

    Raises:
        ValueError: Before `init`.
    """
    engine.world()
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries the operations: never."""
    return False


def mpi_built() -> bool:
    """Whether MPI was compiled in: never."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo carries the operations: never, the engine's own links do."""
    return False


def gloo_built() -> bool:
    """Whether Gloo was compiled in: never."""
    return False


@functools.cache
def _cuda() -> tuple[bool, int]:
    """Whether there is a driver of CUDA, and NCCL's version code."""
    from farandole._native import cuda  # noqa: PLC0415 - only for those who ask

    return cuda.built([folder for folder in sys.path if (Path(folder) / "nvidia").is_dir()])


def nccl_built() -> int:
    """Version code of the NCCL that reduces torch's tensors on GPUs, such as 23007; 0 where there is none.

    It is loaded when first asked for, so this host decides, not the build.
    """
    return _cuda()[1]


def ddl_built() -> bool:
    """Whether IBM's DDL was compiled in: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL was compiled in: never."""
    return False


def cuda_built() -> bool:
    """Whether the engine works on CUDA memory, which it does where there is a driver; from torch, that is."""
    return _cuda()[0]


def rocm_built() -> bool:
    """Whether the engine works on ROCm memory: never."""
    return False


class HorovodBasics:
    """The functions of this module as methods, as scripts that reach into Horovod expect them.

    Args:
        pkg_path: Not used: there is no library to find.
        *args: Not used.
    """

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:  # noqa: ARG002 - Horovod's signature
        for name in _METHODS:
            setattr(self, name, globals()[name])


_METHODS = (
    "init",
    "shutdown",
    "is_initialized",
    "size",
    "rank",
    "local_size",
    "local_rank",
    "cross_size",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The session of this process: joining and leaving the world, and questions about it."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Literal

from farandole._native import engine
from farandole.common import stacks

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
        comm: `None`, or all global ranks in ascending order. Worlds of part of the ranks are not offered.
        process_sets: `None` or empty. Sets besides the global one are not offered in this version.

    Raises:
        ValueError: When an argument asks for what is not offered, or this process was forked from an initialized one.
        FarandoleEnvironmentError: When the ticket, the registrar or a host refuses.
        FarandoleInternalError: When a peer failed while the world formed.
    """
    if process_sets:
        raise ValueError(f"process sets other than the global one are not offered in this version: {process_sets!r}")
    if not engine.init():
        return
    stacks.start()
    for reset in _on_init:
        reset()
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    if comm is not None and list(comm) != list(range(size())):
        world = size()
        shutdown()
        raise ValueError(f"comm must be None or all {world} ranks in ascending order: {comm!r}")


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


def nccl_built() -> int:
    """Version code of NCCL, 0 when operations do not use it: tensors on a GPU go through host memory."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL was compiled in: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL was compiled in: never."""
    return False


def cuda_built() -> bool:
    """Whether the engine works on CUDA memory: it does not, tensors on a GPU go through host memory."""
    return False


def rocm_built() -> bool:
    """Whether the engine works on ROCm memory: never."""
    return False

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The session of this process: joining the world, leaving it, and its properties."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from farandole._native import engine
from farandole._variables import JOB
from farandole.common import heap, logs, termination_notices, thread_stacks
from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.common.timeline import start_timeline, stop_timeline
from farandole.common.util import Adasum, Average, Max, Min, Product, Sum
from farandole.runner import load_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.common.process_sets import ProcessSet

_elastic_preloads: list[Callable[[], None]] = []
_init_callbacks: list[Callable[[], None]] = []
_world_ticket: tuple[str, int] | None = None
_MPI_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
)
"""Variables in which MPI's launchers tell a process its rank."""


def call_on_each_init(reset: Callable[[], None]) -> None:
    """Registers `reset` for the beginning of each new world; framework modules drop the state of
    the last one.
    """
    _init_callbacks.append(reset)


def call_before_elastic_join(load: Callable[[], None]) -> None:
    """Registers `load` for the moment before this process joins a world of an elastic job.

    Framework modules import there the modules that scripts use after `init`, because the other
    ranks of a running job wait for a new rank from then on.
    """
    _elastic_preloads.append(load)


def set_world_ticket(ticket: str, rank: int) -> None:
    """Makes every `init` in this process join the world of a ticket.

    For launchers that pass tickets to their workers themselves, such as Ray.

    Args:
        ticket: Result of `engine.host` on rank 0.
        rank: This process's rank there.
    """
    global _world_ticket  # noqa: PLW0603 - one rank a process
    _world_ticket = (ticket, rank)


@runtime_checkable
class MpiCommunicator(Protocol):
    """The interface of an mpi4py communicator for `init`."""

    def Get_rank(self) -> int:  # noqa: N802 - MPI's name
        """This process's number."""
        ...

    def Get_size(self) -> int:  # noqa: N802 - MPI's name
        """Returns the number of processes."""
        ...

    def allgather(self, sendobj: Any) -> list[Any]:
        """Returns the values of all processes, by rank."""
        ...

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Returns the value of the root."""
        ...


def init(
    comm: Sequence[int] | MpiCommunicator | None = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
) -> None:
    """Joins the world for which this process was started, or forms a world of one if it was started
    alone.

    The launcher may be `farandole run`, an estimator, mpirun, srun, jsrun, torchrun, or a script
    that sets Horovod's variables; see `docs/user-guide/running/other-launchers.md`. Does nothing
    while a session runs; may be called again after `shutdown`. Leaves the world by itself when the
    interpreter exits.

    Args:
        comm: `None` or an empty list for all ranks; the ranks of the launched world that form this
            one, renumbered in ascending order; or an mpi4py communicator, whose processes then form
            the world with its ranks. All of them call `init`, which sends the job's ticket through
            MPI; the collectives are Farandole's own.
        process_sets: Sets to register, the same in the same order on all ranks; or `"dynamic"`, so
            that sets may be added and removed later. In an elastic job, a later world keeps the
            sets of the previous world, with their remaining members; a new worker uses this list
            only to match the numbers of the sets.

    Raises:
        ValueError: When an argument is wrong, ranks ask for different sets, variables of the
            environment contradict each other, or this process was forked from an initialized one.
        FarandoleEnvironmentError: When the ticket, the registrar or a host refuses, or ranks that
            were started together do not meet: it never forms a world of one instead.
        FarandoleInternalError: When a peer failed while the world formed.
    """
    from farandole.common.process_sets import record_initial_set_numbers  # noqa: PLC0415 - it imports this module

    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(
            f'process_sets must be a list of process sets or "dynamic": {process_sets!r}'
        )
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    ranks = [process_set.ranks or [] for process_set in sets]
    for index, members in enumerate(ranks):
        if members in ranks[:index]:
            raise ValueError(
                f"process_sets[{index}] has the same ranks as an earlier one: {members}"
            )
    logs.start_logging()
    if not _begin_session(comm, ranks, process_sets == "dynamic"):
        return
    heap.start_heap_trimmer()
    load_reports.start_rank_reports()
    if engine.world().size > 1:
        thread_stacks.start_stack_server()  # a process alone gets no question about its stack
    for reset in _init_callbacks:
        reset()
    record_initial_set_numbers(sets)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def _begin_session(
    comm: Sequence[int] | MpiCommunicator | None, process_sets: list[list[int]], dynamic: bool
) -> bool:
    """Begins the session; false when one runs."""
    members, world_ticket = None, _world_ticket
    if isinstance(comm, MpiCommunicator):
        if engine.is_initialized():
            return False
        world_ticket = _agree_on_world_ticket(comm)
    elif comm is not None:
        members = list(comm) or None  # none at all are all of them, as in Horovod
    if termination_notices.is_elastic_worker() and not engine.is_initialized():
        for load_ahead in _elastic_preloads:
            load_ahead()
    with (
        termination_notices.handle_notice_signals()
    ):  # a spare waits here for as long as the job lasts
        if not engine.init(members, process_sets, dynamic, world_ticket):
            return False
    holder = engine.rank_not_inherited_variable()
    if holder is not None:
        os.environ[holder[0]] = holder[1]
    return True


def _agree_on_world_ticket(comm: MpiCommunicator) -> tuple[str, int]:
    """Returns the ticket of the world that a communicator's processes form, and this one's rank
    in it.
    """
    if not comm:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in the communicator")
    rank = comm.Get_rank()
    hosts = comm.allgather(engine.shared_memory_identity())
    ticket, failure = "", None
    if rank == 0:
        try:
            ticket = engine.host_registrar(comm.Get_size(), len(set(hosts)) == 1)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for an answer in any case
            failure = raised
    ticket, reason = comm.bcast((ticket, failure and str(failure)), root=0)
    if failure is not None:
        raise failure
    if reason is not None:
        raise FarandoleEnvironmentError(f"rank 0 of comm could not admit the other ranks: {reason}")
    return ticket, rank


def _leave_at_exit() -> None:
    """Leaves the world as the interpreter ends; the others hear it from the starter if this rank
    has failed.
    """
    shutdown()
    if getattr(sys, "last_value", None) is None:
        engine.announce_clean_exit()


def shutdown() -> None:
    """Leaves the world. Operations that still wait fail with `FarandoleInternalError` on all
    ranks.
    """
    engine.shutdown()


def is_initialized() -> bool:
    """Returns whether this process has joined a world and not left it."""
    return engine.is_initialized()


def size() -> int:
    """Returns the number of processes.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().size


def rank() -> int:
    """Returns the number of this process among all, from 0.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().rank


def local_size() -> int:
    """Returns the number of processes on this host.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().local_size


def local_rank() -> int:
    """Returns the number of this process on its host, from 0, for example to choose a GPU.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().local_rank


def cross_size() -> int:
    """Returns the number of hosts that have a process with this local rank.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().cross_size


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have a process with this local rank.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().cross_rank


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes.

    Raises:
        ValueError: Before `init`.
    """
    return engine.world().is_homogeneous


def mpi_threads_supported() -> bool:
    """Returns whether MPI may be used from several threads: never, because Farandole does not use
    MPI.

    Raises:
        ValueError: Before `init`.
    """
    engine.world()
    return False


def mpi_enabled() -> bool:
    """Returns whether MPI carries the operations: never, because the engine has its own links.

    In scripts that use Horovod's names, it says how the process was started: true under `mpirun`.
    """
    return _answers_as_horovod() and _is_started_by_mpi()


def mpi_built() -> bool:
    """Returns whether MPI was compiled in: never. In scripts that use Horovod's names, the same as
    `mpi_enabled`.
    """
    return mpi_enabled()


def gloo_enabled() -> bool:
    """Returns whether Gloo carries the operations: never, because the engine has its own links.

    In scripts that use Horovod's names, it says how the process was started: false under `mpirun`,
    true under `horovodrun` and in every other case.
    """
    return _answers_as_horovod() and not _is_started_by_mpi()


def gloo_built() -> bool:
    """Returns whether Gloo was compiled in: never. In scripts that use Horovod's names it is true,
    so that they need no MPI.
    """
    return _answers_as_horovod()


def _answers_as_horovod() -> bool:
    """Returns whether the script uses Horovod's names. In a worker that does not import `horovod`
    itself, the gradient convention shows that the program that started it has.
    """
    return "horovod" in sys.modules or engine.uses_horovod_gradients()


def _is_started_by_mpi() -> bool:
    """Returns whether an MPI launcher has started this process, and no launcher of Farandole."""
    return JOB not in os.environ and any(name in os.environ for name in _MPI_RANK_VARIABLES)


@functools.cache
def _detect_cuda_and_nccl() -> tuple[bool, int]:
    """Returns whether there is a CUDA driver, and the version code of NCCL."""
    from farandole._native import cuda  # noqa: PLC0415 - only for those who ask

    return cuda.has_driver_and_nccl_version(
        [folder for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    )


def nccl_built() -> int:
    """Returns the version code of the NCCL that reduces torch tensors on GPUs, such as 23007; 0
    without NCCL.

    It is loaded at the first call, so the result depends on this host and not on the build.
    """
    return _detect_cuda_and_nccl()[1]


def ddl_built() -> bool:
    """Returns whether IBM's DDL was compiled in: never."""
    return False


def ccl_built() -> bool:
    """Returns whether Intel's oneCCL was compiled in: never."""
    return False


def cuda_built() -> bool:
    """Returns whether the engine works on CUDA memory of torch, which it does if there is a
    driver.
    """
    return _detect_cuda_and_nccl()[0]


def rocm_built() -> bool:
    """Returns whether the engine works on ROCm memory: never."""
    return False


class HorovodBasics:
    """The functions of this module as methods, as scripts that reach into Horovod expect them.

    Args:
        pkg_path: Not used: there is no library to find.
        *args: Not used.
    """

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    is_initialized = staticmethod(is_initialized)
    size = staticmethod(size)
    rank = staticmethod(rank)
    local_size = staticmethod(local_size)
    local_rank = staticmethod(local_rank)
    cross_size = staticmethod(cross_size)
    cross_rank = staticmethod(cross_rank)
    is_homogeneous = staticmethod(is_homogeneous)
    mpi_threads_supported = staticmethod(mpi_threads_supported)
    mpi_enabled = staticmethod(mpi_enabled)
    mpi_built = staticmethod(mpi_built)
    gloo_enabled = staticmethod(gloo_enabled)
    gloo_built = staticmethod(gloo_built)
    nccl_built = staticmethod(nccl_built)
    ddl_built = staticmethod(ddl_built)
    ccl_built = staticmethod(ccl_built)
    cuda_built = staticmethod(cuda_built)
    rocm_built = staticmethod(rocm_built)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        """Takes Horovod's arguments."""

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets: the ranks that take part in an operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from farandole._native import engine
from farandole.common import basics


class ProcessSet:
    """Some ranks of the world.

    When the world of an elastic job changes, a registered set keeps its members in the next world,
    under their new ranks. New workers are in no set. A set without members is
    unregistered.

    Args:
        ranks_or_comm: The global ranks, in any order, as an iterable.

    Raises:
        ValueError: If an entry is not a rank, or appears twice.
    """

    mpi_comm = None
    """For Horovod's sake: there is no MPI, and so no communicator."""

    process_set_id: int | None = None
    """Number of the set while it is registered."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            raise ValueError(
                "a process set takes ranks, not an MPI communicator: Farandole does not use MPI"
            )
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"the ranks of a process set must be whole numbers, 0 or more: {ranks_or_comm!r}"
            )
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
            raise ValueError(
                f"the ranks of a process set must be whole numbers, 0 or more: {ranks!r}"
            )
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a process set must contain each rank only once: {ranks!r}")
        self._ranks: list[int] | None = sorted(ranks)

    @property
    def ranks(self) -> list[int] | None:
        """Its global ranks, ascending; `None` for the global set before `init`."""
        return self._ranks

    def size(self) -> int | None:
        """Returns the number of its ranks; `None` when it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's position in it; `None` when it is not registered.

        Raises:
            ValueError: When this process is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = basics.rank()
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not a member of {self!r}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Returns whether this process is a member, also before the set is registered."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __repr__(self) -> str:
        """Shows number and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __reduce__(self) -> tuple[object, ...] | str:
        """Pickles the set as its ranks: a copy, even in another process, is the set of these ranks
        that is registered in that process.
        """
        return _find_or_make_set, (self._ranks,)


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world that `init` has joined."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        """All global ranks; `None` before `init`."""
        return list(range(basics.size())) if basics.is_initialized() else None

    def __reduce__(self) -> str:
        """Pickles the set by name, because each process has only one."""
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks."""

_registered: weakref.WeakSet[ProcessSet] = weakref.WeakSet()


def _refresh_sets_for_world() -> None:
    """Sets do not outlive the world they were registered in, unless the next one of an elastic
    job has them too.
    """
    present = engine.process_sets() if engine.carried_process_sets() is not None else {}
    for process_set in list(_registered):
        if process_set.process_set_id in present:
            process_set._ranks = present[process_set.process_set_id]  # noqa: SLF001 - its own module's
        else:
            process_set.process_set_id = None
            _registered.discard(process_set)


basics.call_on_each_init(_refresh_sets_for_world)


def record_initial_set_numbers(given: list[ProcessSet]) -> None:
    """Records the engine's numbers of the sets that were passed to `init`.

    If the world has taken over the sets of the previous world, the initial sets of the job keep
    their numbers and their remaining members; a set without remaining members stays unregistered.
    """
    carried = engine.carried_process_sets()
    if carried is None:
        for number, process_set in enumerate(given, start=1):
            record_process_set_number(process_set, number)
        return
    present = engine.process_sets()
    for number, process_set in enumerate(given, start=1):
        if number in carried:
            process_set._ranks = present[number]  # noqa: SLF001 - its own module's
            record_process_set_number(process_set, number)


def record_process_set_number(process_set: ProcessSet, number: int) -> None:
    """Notes the engine's number of a set."""
    process_set.process_set_id = number
    _registered.add(process_set)


def _find_or_make_set(ranks: list[int]) -> ProcessSet:
    for known in _registered:
        if known.ranks == ranks:
            return known
    process_set = ProcessSet(ranks)
    for number, members in engine.process_sets().items() if basics.is_initialized() else ():
        if number != 0 and members == ranks:
            record_process_set_number(process_set, number)
    return process_set


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set while the world runs. Every rank calls it, member or not, in the same
    order.

    Needs `init(process_sets="dynamic")` or `FARANDOLE_DYNAMIC_PROCESS_SETS=1`. Waits until all
    ranks have called it. In an elastic job, if a set of these ranks continues from the previous
    world, it returns that set.

    Args:
        process_set: The set, or its global ranks.

    Returns:
        The set, registered.

    Raises:
        ValueError: When sets are fixed, a rank is unknown, or a set of these ranks is registered
            already.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"process set is registered already: {process_set!r}")
    record_process_set_number(process_set, engine.add_process_set(process_set.ranks or []))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. Every rank calls it, member or not, in the same order, and waits until
    all have called it.

    Args:
        process_set: A registered set.

    Returns:
        False, at once, when it is the global set or is not registered.

    Raises:
        ValueError: When sets are fixed.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    number = process_set.process_set_id
    if not engine.remove_process_set(number):
        return False
    for known in [one for one in _registered if one.process_set_id == number]:
        known.process_set_id = None
        _registered.discard(known)
    return True

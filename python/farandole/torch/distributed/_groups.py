# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets under the groups of torch.distributed.

torch informs only the members of a group, but the engine registers a process set with all ranks. So
all ranks, members and others, first agree on the next set: members call `agree_on_process_sets`
while they create the group, and torch calls `perform_nocolor_split` in the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.common import basics, process_sets
from farandole.numpy.plain import allgather_plain

if TYPE_CHECKING:
    from farandole.common.process_sets import ProcessSet

_known_sets: dict[tuple[int, ...], ProcessSet] = {}


def _forget_known_sets() -> None:
    _known_sets.clear()


basics.call_on_each_init(_forget_known_sets)


def join_world() -> None:
    """Starts the session, with sets that can be registered any time, unless it has started
    already.
    """
    if not basics.is_initialized():
        basics.init(process_sets="dynamic")


def agree_on_process_sets(ranks: list[int] | None) -> ProcessSet | None:
    """Registers the sets that any rank asks for, the same on all ranks; every rank calls it.

    Args:
        ranks: The global ranks of the requested group with this process, ascending; `None` for no
            group.

    Returns:
        The set of `ranks`.

    Raises:
        ValueError: If ranks disagree about the members of the sets.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    requested: list[list[int] | None] = allgather_plain(ranks, "distributed.group")
    for members in requested:
        for member in members or ():
            if requested[member] != members:
                raise ValueError(
                    f"new_group must be called with the same ranks everywhere: {requested}"
                )
    for members in requested:
        if members is not None and tuple(members) not in _known_sets:
            whole = len(members) == basics.size()
            _known_sets[tuple(members)] = (
                process_sets.global_process_set if whole else process_sets.add_process_set(members)
            )
    return None if ranks is None else _known_sets[tuple(ranks)]

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
    wishes: list[list[int] | None] = allgather_plain(ranks, "distributed.group")
    for wish in wishes:
        for member in wish or ():
            if wishes[member] != wish:
                raise ValueError(
                    f"new_group must be called with the same ranks everywhere: {wishes}"
                )
    for wish in wishes:
        if wish is not None and tuple(wish) not in _known_sets:
            whole = len(wish) == basics.size()
            _known_sets[tuple(wish)] = (
                process_sets.global_process_set if whole else process_sets.add_process_set(wish)
            )
    return None if ranks is None else _known_sets[tuple(ranks)]

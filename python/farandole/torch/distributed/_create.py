# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The function that torch calls for each new group."""

from __future__ import annotations

from typing import Any

import torch

from farandole.common import basics
from farandole.common.process_sets import global_process_set
from farandole.torch.distributed._backend import FarandoleBackend
from farandole.torch.distributed._groups import agree_on_process_sets, join_world
from farandole.torch.distributed._reconfigure import ReconfigurableBackend, ReconfigurableGroup
from farandole.torch.distributed._store import RegistrarStore


def create_backend(options: Any, _: Any) -> FarandoleBackend | ReconfigurableGroup:
    """Makes the backend of a new group; torch calls it in every member.

    Raises:
        ValueError: When torch's rank or size is not Farandole's, or the group is not supported.
    """
    if getattr(options, "enable_reconfigure", False):  # since torch 2.15
        return _create_reconfigurable_group(options)
    if not options.global_ranks_in_group:
        join_world()
        theirs, ours = (options.group_rank, options.group_size), (basics.rank(), basics.size())
        if theirs != ours:
            raise ValueError(
                f"torch.distributed was initialized with rank {theirs[0]} of {theirs[1]}, but this "
                f"process is rank {ours[0]} of {ours[1]}: start it with farandole run, or pass "
                "init_method='farandole://'"
            )
        # If a group is bound to a device, torch splits other groups from it, and also
        # calls the processes that are no members.
        options.process_group.bound_device_id = torch.device("cpu", 0)
        return FarandoleBackend(*ours, global_process_set, options.group_id)
    ranks = list(options.global_ranks_in_group)
    if not isinstance(options.split_from, FarandoleBackend):
        raise ValueError("groups of backend farandole need a default group of backend farandole")
    if not options.group_id.isdecimal():
        raise ValueError(
            "new_group(use_local_synchronization=True) is not supported: all ranks must call "
            "new_group"
        )
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks of a group must be in ascending order: {ranks}")
    process_set = agree_on_process_sets(ranks)
    assert process_set is not None  # noqa: S101 - `agree_on_process_sets` returns the requested set
    return FarandoleBackend(options.group_rank, options.group_size, process_set, options.group_id)


def _create_reconfigurable_group(options: Any) -> ReconfigurableGroup:
    """Returns a group that gets its members by `reconfigure`.

    Raises:
        ValueError: The group is no default group, or its store belongs to one world.
    """
    if options.global_ranks_in_group:
        raise ValueError("only the default group can be made with enable_reconfigure=True")
    if isinstance(options.store._underlying_non_prefix_store, RegistrarStore):  # noqa: SLF001 - torch has no other name for it
        raise ValueError(
            "enable_reconfigure=True needs a store that survives the loss of any member. The "
            "store of farandole://, which "
            "env:// also uses in processes that Farandole has started, ends with their world: "
            "pass store=, for example a torch.distributed.TCPStore of a process that stays"
        )
    backend = ReconfigurableBackend(
        options.group_rank, options.group_size, options.group_id, options.store, options.timeout
    )
    return ReconfigurableGroup(backend)

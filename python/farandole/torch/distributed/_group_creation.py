# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The function that torch calls for each new group."""

from __future__ import annotations

import sys
from typing import Any

import torch

from farandole.common import basics
from farandole.torch.distributed._backend import FarandoleBackend, make_member_backend
from farandole.torch.distributed._direct_group import HAS_PYTHON_BACKENDS, DirectGroup
from farandole.torch.distributed._groups import set_world_store, start_opening_member_set
from farandole.torch.distributed._process_group import FarandoleGroup
from farandole.torch.distributed._reconfigurable_groups import (
    ReconfigurableBackend,
    ReconfigurableGroup,
)
from farandole.torch.distributed._store import RegistrarStore
from farandole.torch.distributed._world import join_world_of_group


def create_backend(options: Any, _: Any) -> FarandoleBackend | FarandoleGroup:
    """Makes the backend of a new group; torch calls it in every member.

    Returns:
        The group, or its backend if the group has other backends, too. Only a group returns works
        of this backend.

    Raises:
        ValueError: When torch's rank or size is not Farandole's, or the group is not supported.
    """
    devices = _requested_devices(sys._getframe(1).f_locals)  # noqa: SLF001 - the function has no argument for them
    if devices is None and not HAS_PYTHON_BACKENDS:
        raise ValueError(
            "a group of farandole and other backends needs torch 2.14 or newer, and this is torch "
            f"{torch.__version__}: pass backend='farandole'"
        )
    if getattr(options, "enable_reconfigure", False):  # since torch 2.15
        return _create_reconfigurable_group(options)
    if not options.global_ranks_in_group:
        backend = _create_default_backend(options)
    else:
        backend = make_member_backend(list(options.global_ranks_in_group), options.timeout)
    if devices is None:
        return backend
    group_class = FarandoleGroup if HAS_PYTHON_BACKENDS else DirectGroup
    return group_class(backend, options.store, devices)


def _requested_devices(caller: dict[str, Any]) -> list[str] | None:
    """Returns the devices of a group that has only this backend; `None` for other groups.

    Args:
        caller: The locals of torch's function that makes the group.
    """
    config = caller.get("backend_config")
    if config is None:
        return ["cpu", "cuda"]
    backends = config.get_device_backend_map()
    return list(backends) if set(backends.values()) == {"farandole"} else None


def _create_default_backend(options: Any) -> FarandoleBackend:
    join_world_of_group(options.store, options.group_rank, options.group_size)
    theirs, ours = (options.group_rank, options.group_size), (basics.rank(), basics.size())
    if theirs != ours:
        raise ValueError(
            f"torch.distributed was initialized with rank {theirs[0]} of {theirs[1]}, but this "
            f"process is rank {ours[0]} of {ours[1]}: start it with farandole run, or pass "
            "init_method='farandole://'"
        )
    store = set_world_store(options.store)
    members = list(range(ours[1]))
    opening = start_opening_member_set(tuple(members), options.timeout.total_seconds())
    return FarandoleBackend(ours[0], members, opening, store, options.group_id, options.timeout)


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

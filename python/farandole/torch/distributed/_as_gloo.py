# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups of backend `"gloo"` on Farandole's engine.

torch makes all groups in one function, which is replaced here: it gets the backend `"farandole"`,
and torch's registry of groups then gets the requested name.

The engine has all operations of Gloo. It lacks some kinds of groups, and such a group is made by
Gloo as a whole. In a group of several backends, for example, torch hides the state, the result and
the source of works that are made in Python, and a program that polls `is_completed` would wait for
ever.

`ProcessGroup.name()` stays `"farandole"`: with the name `"gloo"`, DDP's C++ looks for a backend of
Gloo's type in the group, and fails.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from farandole.torch.distributed._process_group import FarandoleGroup
from farandole.torch.distributed._world import join_world_by_vote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("farandole")
_gloo_group_counts: Counter[str] = Counter()


def as_gloo() -> None:
    """Runs groups of backend `"gloo"` that this process creates from now on on Farandole's engine.

    The program is not changed: `torch.distributed.get_backend()` returns `"gloo"`. The variable
    `FARANDOLE_AS_GLOO=1` calls this function in every process that makes a group. Rank 0 logs once
    that the engine is Farandole's. A group that the engine cannot have is one of Gloo, and one line
    of the log counts these groups at the end. All ranks must call this function.

    Raises:
        RuntimeError: This process has a process group already.
    """
    create_group = distributed_c10d._new_process_group_helper  # noqa: SLF001 - the place where torch makes all groups
    if hasattr(create_group, "farandole_replaces"):
        return
    if distributed_c10d.is_initialized():
        raise RuntimeError(
            "as_gloo() must be called before the first process group is created: this process "
            f"has one of backend {distributed_c10d.get_backend()}"
        )
    distributed_c10d._new_process_group_helper = _replace_gloo(create_group)  # noqa: SLF001


def _replace_gloo(create_group: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create_group)

    @functools.wraps(create_group)
    def create_group_of_engine(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        requested = call.arguments["backend"]
        devices = distributed_c10d.BackendConfig(
            distributed_c10d.Backend(requested)
        ).get_device_backend_map()
        if "gloo" not in devices.values():
            return create_group(*arguments, **options)
        kind = _kind_without_engine(devices, call.arguments)
        if kind is not None:
            _count_group_of_gloo(kind, call.arguments["group_rank"])
            return create_group(*arguments, **options)
        pairs = ",".join(f"{device}:farandole" for device in devices)
        call.arguments["backend"] = distributed_c10d.Backend(pairs)
        group, store = create_group(*call.args, **call.kwargs)
        if isinstance(group, FarandoleGroup):  # or this process is no member
            world = distributed_c10d._world  # noqa: SLF001 - the registry of groups
            world.pg_map[group] = (requested, store)
            world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(requested))
        return group, store

    create_group_of_engine.farandole_replaces = create_group  # type: ignore[attr-defined] # marks it
    return create_group_of_engine


def _kind_without_engine(devices: Mapping[str, str], arguments: Mapping[str, Any]) -> str | None:
    """Joins the world of a default group. Returns `None` if the group can run on the engine, and
    otherwise the kind of the group, which is the same on all ranks.

    Args:
        devices: The backend of each device of the group.
        arguments: The arguments of torch's function.
    """
    if set(devices.values()) != {"gloo"}:
        return "of several backends"
    if arguments.get("enable_reconfigure"):
        return "with enable_reconfigure=True"
    if arguments["global_ranks_in_group"]:
        default_group = distributed_c10d._get_default_group()  # noqa: SLF001 - torch has no public name for it
        is_ours = isinstance(default_group, FarandoleGroup)
        return None if is_ours else "whose default group is on Gloo"
    rank, size = arguments["group_rank"], arguments["group_size"]
    if not join_world_by_vote(arguments["store"], rank, size, arguments["timeout"]):
        return "of other ranks than the job of Farandole"
    if rank == 0:
        _log_engine_once()
    return None


def _count_group_of_gloo(kind: str, rank: int) -> None:
    if rank != 0:
        return
    if not _gloo_group_counts:
        atexit.register(_log_groups_of_gloo)
    _gloo_group_counts[kind] += 1


def _log_groups_of_gloo() -> None:
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(_gloo_group_counts.items()))
    _log.warning("groups that ran on Gloo instead of the engine of Farandole: %s", counts)


@functools.cache
def _log_engine_once() -> None:
    _log.warning(
        'backend "gloo" of torch.distributed runs on the engine of Farandole (FARANDOLE_AS_GLOO)'
    )

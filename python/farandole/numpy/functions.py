# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Objects from one rank to all, and from all to all."""

from __future__ import annotations

from typing import Any

import cloudpickle

from farandole.common import basics, pickling
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.numpy._bytes import allgather_bytes, broadcast_bytes


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank; it travels by cloudpickle over links that the job's
    key secures.

    Args:
        obj: Value to send; ignored on other ranks.
        root_rank: The global rank that sends.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        `obj` itself on the root, a copy elsewhere.

    Raises:
        ValueError: When an argument is wrong.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    is_root = basics.rank() == root_rank
    data = broadcast_bytes(
        pickling.pickle_by_value(obj) if is_root else None,
        root_rank,
        _object_operation_name(name),
        process_set,
    )
    return obj if is_root else cloudpickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks; they travel as in
    `broadcast_object`.

    Args:
        obj: This rank's object.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        One object per member; this rank's own is a copy too.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return [
        cloudpickle.loads(data)
        for data in allgather_bytes(
            pickling.pickle_by_value(obj), _object_operation_name(name), process_set
        )
    ]


def _object_operation_name(name: str | None) -> str | None:
    return None if name is None else f"object.{name}"

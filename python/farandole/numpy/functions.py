# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Objects from one rank to all, and from all to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from farandole.common import basics, pickling
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.numpy._move import broadcast_, gather_with_rows

if TYPE_CHECKING:
    from farandole.numpy._arrays import Array


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank; it travels by cloudpickle over links that the job's key secures.

    Args:
        obj: What to send; ignored on other ranks.
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
    data = _dump(obj) if is_root else None
    size_name, data_name = (None, None) if name is None else (f"object.{name}.size", f"object.{name}.data")
    size = np.array([0 if data is None else data.size], dtype=np.int64).reshape(_SHAPE)
    broadcast_(size, root_rank, size_name, process_set)
    if data is None:
        data = np.empty(size.item(), dtype=np.uint8).reshape(_SHAPE)
    broadcast_(data, root_rank, data_name, process_set)
    return obj if is_root else _load(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks; they travel as in `broadcast_object`.

    Args:
        obj: This rank's object.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        One object per member; this rank's own is a copy too.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    whole, rows = gather_with_rows(_dump(obj), None if name is None else f"object.{name}", process_set)
    ends = np.cumsum(rows)
    return [_load(whole[end - count : end]) for end, count in zip(ends, rows, strict=True)]


_SHAPE = (-1, 1, 1, 1)
"""Objects travel in a shape of their own: what an unnamed array of another rank's meets is then no object."""


def _dump(obj: Any) -> Array:
    # A bytearray, since a view of bytes could not be written to.
    return np.frombuffer(bytearray(pickling.dumps(obj)), dtype=np.uint8).reshape(_SHAPE)


def _load(data: Array) -> Any:
    return cloudpickle.loads(data.reshape(-1).data)

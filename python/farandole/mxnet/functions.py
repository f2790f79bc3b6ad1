# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Objects from one rank to all, and from all to all."""

from __future__ import annotations

from typing import Any

import farandole.numpy as arrays


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the root's object on every rank.

    Args:
        obj: Value to send; ignored on other ranks.
        root_rank: The rank that sends.
        name: Names the operation across ranks.

    Returns:
        `obj` itself on the root, a copy elsewhere.
    """
    return arrays.broadcast_object(obj, root_rank, name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks.

    Args:
        obj: This rank's object.
        name: Names the operation across ranks.

    Returns:
        One object per rank; this rank's own is a copy too.
    """
    return arrays.allgather_object(obj, name)

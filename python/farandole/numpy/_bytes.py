# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Bytes from one rank to all, and from all to all: what objects and plain values travel as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farandole.numpy.data_movement import allgather_with_row_counts, broadcast_

if TYPE_CHECKING:
    from farandole.common.process_sets import ProcessSet
    from farandole.numpy._arrays import Array

_BYTES_SHAPE = (-1, 1, 1, 1)
"""A shape of their own: an unnamed array of another rank does not match it."""


def broadcast_bytes(
    data: bytes | None, root_rank: int, name: str | None, process_set: ProcessSet
) -> memoryview:
    """Returns the root's bytes on every rank.

    Args:
        data: Bytes to send; `None` on all ranks but the root.
        root_rank: The global rank that sends.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.
        process_set: The ranks that take part; this one must be a member.

    Raises:
        ValueError: An argument is wrong, or another rank sent something else.
        FarandoleInternalError: A peer failed or the session was shut down.
    """
    size_name, data_name = (None, None) if name is None else (f"{name}.size", f"{name}.data")
    array = None if data is None else _as_byte_array(data)
    size = np.array([0 if array is None else array.size], dtype=np.int64).reshape(_BYTES_SHAPE)
    broadcast_(size, root_rank, size_name, process_set)
    if array is None:
        array = np.empty(size.item(), dtype=np.uint8).reshape(_BYTES_SHAPE)
    broadcast_(array, root_rank, data_name, process_set)
    return array.reshape(-1).data


def allgather_bytes(data: bytes, name: str | None, process_set: ProcessSet) -> list[memoryview]:
    """Returns the bytes of all ranks, in the order of ranks.

    Args:
        data: This rank's bytes.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.
        process_set: The ranks that take part; this one must be a member.

    Raises:
        ValueError: Another rank sent something else.
        FarandoleInternalError: A peer failed or the session was shut down.
    """
    whole, rows = allgather_with_row_counts(_as_byte_array(data), name, process_set)
    ends = np.cumsum(rows)
    return [
        whole[end - count : end].reshape(-1).data for end, count in zip(ends, rows, strict=True)
    ]


def _as_byte_array(data: bytes) -> Array:
    # A bytearray, since a view of bytes could not be written to.
    return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(_BYTES_SHAPE)

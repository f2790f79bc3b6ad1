# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Barrier and join: waiting for all ranks, at a point or at the end of the data."""

from __future__ import annotations

from farandole._native import engine
from farandole.common.handles import process_set_number, reset_numbers_after_join
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.torch._handles import synchronize, table


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every member has called `barrier`.

    Args:
        process_set: The ranks that wait for each other; this one must be a member.

    Raises:
        ValueError: When this rank is no member.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    number = process_set_number(process_set)
    synchronize(
        table.submit_operation(
            None,
            lambda _: None,
            engine.barrier,
            table.operation_name("barrier", None, process_set),
            number,
        )
    )


def join(device: int = -1, allow_gather: bool = False) -> int:
    """Joins: this rank has no more data. Returns when all ranks have joined.

    Until then this rank takes part in the others' allreduces without touching their results: with
    zeros in sums, with the neutral element in `Min`, `Max` and `Product` (Horovod: zeros
    throughout). `Average` still divides by the number of all ranks.

    Args:
        device: Not needed; accepted for compatibility with Horovod.
        allow_gather: Takes part also in allgathers, with no rows, and in broadcasts from other
            ranks. Without it these fail on the ranks that have not joined.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    del device
    return reset_numbers_after_join(
        synchronize(
            table.submit_operation(None, lambda outcomes: outcomes[0], engine.join, allow_gather)
        )
    )

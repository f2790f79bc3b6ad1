# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations without an array: barrier and join."""

from __future__ import annotations

from farandole._native import engine
from farandole.common.handles import process_set_number, reset_numbers_after_join
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.numpy._arrays import synchronize, table


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every member has called it.

    Args:
        process_set: The ranks that take part; this one must be a member.

    Raises:
        ValueError: When the set is not registered, or this rank is not a member.
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


def join(allow_gather: bool = False) -> int:
    """Declares that this rank has no more data. It takes part in the operations of the others until
    all have joined.

    Meanwhile it contributes nothing to reductions: their neutral element.

    Args:
        allow_gather: Whether others may still gather and broadcast; this rank gives no rows. An
            error otherwise.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return reset_numbers_after_join(
        synchronize(
            table.submit_operation(None, lambda outcomes: outcomes[0], engine.join, allow_gather)
        )
    )

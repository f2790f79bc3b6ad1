# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Barrier: nobody leaves before everybody came."""

from __future__ import annotations

from farandole._native import engine
from farandole.common.process_sets import ProcessSet, global_process_set, require_global
from farandole.torch._handles import operation_name, synchronize, track


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it.

    Args:
        process_set: The global one.

    Raises:
        ValueError: When `process_set` is not the global one.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    require_global(process_set)
    synchronize(track(engine.barrier(operation_name("barrier", None), 0), None, lambda _: None))

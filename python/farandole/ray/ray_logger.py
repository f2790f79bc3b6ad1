# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Records that a worker sends to the callbacks of `RayExecutor.run` while it trains."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from farandole.spark import task

_lock = threading.Lock()
_queue: Any = None
warning_raised = False
"""Whether the warning about a missing queue has been given."""


def configure(queue: Any) -> None:
    """Lets `log` send records to a queue.

    Args:
        queue: A `ray.util.queue.Queue`, or `None` to stop sending.
    """
    global _queue  # noqa: PLW0603 - one queue a process, as there is one rank a process
    with _lock:
        _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends a record to every callback of the `run` in progress, usually on rank 0.

    Args:
        info_dict: The record; in an elastic job its values must be valid in JSON, else picklable.
    """
    global warning_raised  # noqa: PLW0603 - as above
    with _lock:
        queue = _queue
    if queue is not None:
        queue.put(info_dict)
    elif task.report(info_dict):
        return
    elif not warning_raised:
        warning_raised = True
        warnings.warn("`ray_logger.log` called but logging is not configured.", stacklevel=2)

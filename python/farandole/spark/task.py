# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What a training function can ask for and tell while it runs in a worker."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

RESOURCES: Final = "FARANDOLE_TASK_RESOURCES"
"""Variable that hands a task's resource addresses to its worker, as JSON."""


def get_available_devices() -> list[str]:
    """Addresses of the GPUs that Spark assigned to this worker's task.

    Returns:
        The addresses of resource `gpu`, such as `["0"]`; empty when Spark assigned none, or outside Spark.
        `CUDA_VISIBLE_DEVICES` is left as it is.
    """
    told = os.environ.get(RESOURCES)
    if told is not None:
        return [str(address) for address in json.loads(told).get("gpu", [])]
    return resources().get("gpu", [])


def resources() -> dict[str, list[str]]:
    """Addresses by resource name of the Spark task this process runs; empty when it runs none."""
    pyspark = sys.modules.get("pyspark")
    context = pyspark.TaskContext.get() if pyspark is not None else None
    if context is None:
        return {}
    return {name: list(resource.addresses) for name, resource in context.resources().items()}


def report(record: Mapping[str, Any]) -> bool:
    """Sends a record to the driver, where the callback `on_progress` of `Backend.run` gets it.

    It never blocks training: when the connection is slow the oldest waiting records are dropped.

    Args:
        record: Anything `json` can write, at most 1 MiB.

    Returns:
        Whether there is a driver to report to.
    """
    from farandole._native import launcher  # noqa: PLC0415 - only workers need it
    from farandole.spark.gang import PROGRESS  # noqa: PLC0415 - as above

    return launcher.report(PROGRESS, json.dumps(record).encode())

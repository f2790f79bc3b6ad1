# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Executors that Spark decommissions: their workers leave first.

A Python driver gets no event when an executor is decommissioned, so the driver asks the scheduler.
The task finds the number of its executor in the command line of the executor's process, and the
worker reports it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables

if TYPE_CHECKING:
    from farandole.runner.agent import WorkerSpec
    from farandole.spark.job.session_adapter import SparkSessionAdapter

EXECUTOR_VARIABLE: Final = variables.SPARK_EXECUTOR
"""Number of the Spark executor that a worker is in."""

_EXECUTOR_ID_OPTION = "--executor-id"
_SCHEDULER_POLL_INTERVAL = 1.0
_MAX_ANCESTORS = 6


def with_executor_id(work: WorkerSpec) -> WorkerSpec:
    """Returns the same work, whose worker gets its executor's id, if it can be found out."""
    executor = own_executor_id()
    return (
        work if executor is None else replace(work, env={**work.env, EXECUTOR_VARIABLE: executor})
    )


def own_executor_id(process: int | None = None, proc: Path = Path("/proc")) -> str | None:
    """Returns the number of the executor that is an ancestor of this process; `None` outside of
    one.
    """
    process = os.getppid() if process is None else process
    for _ in range(_MAX_ANCESTORS):
        try:
            command = (
                (proc / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            )
            stat = (proc / str(process) / "stat").read_text()
        except OSError:
            return None
        if _EXECUTOR_ID_OPTION in command[:-1]:
            return command[command.index(_EXECUTOR_ID_OPTION) + 1]
        # The name in parentheses may hold anything; state and parent follow it.
        process = int(stat.rpartition(")")[2].split()[1])
    return None


class ExecutorDecommissions:
    """Workers whose executors are being decommissioned; clients of Spark Connect cannot ask."""

    def __init__(self, cluster: SparkSessionAdapter) -> None:
        self._scheduler = None
        if cluster.context is not None:
            self._scheduler = cluster.context._jsc.sc().taskScheduler()  # noqa: SLF001 - pyspark has no API for it
        self._executors: dict[int, str] = {}
        self._next_poll = 0.0

    def record_location(self, task: int, where: str) -> None:
        """Takes note of where a worker is."""
        self._executors[task] = where

    def poll_departures(self) -> list[tuple[int, str]]:
        """Workers whose executors have begun to be decommissioned since the last call, and why
        they leave.
        """
        now = time.monotonic()
        if self._scheduler is None or now < self._next_poll:
            return []
        self._next_poll = now + _SCHEDULER_POLL_INTERVAL
        leaving = {
            executor
            for executor in set(self._executors.values())
            if self._is_decommissioning(executor)
        }
        gone = [
            (task, executor) for task, executor in self._executors.items() if executor in leaving
        ]
        for task, _ in gone:
            del self._executors[task]
        return [(task, f"Spark decommissions executor {executor}") for task, executor in gone]

    def _is_decommissioning(self, executor: str) -> bool:
        try:
            return bool(self._scheduler.getExecutorDecommissionState(executor).isDefined())  # pyright: ignore[reportOptionalMemberAccess]
        except Exception:  # noqa: BLE001 - a JVM that does not show it
            self._scheduler = None
            return False

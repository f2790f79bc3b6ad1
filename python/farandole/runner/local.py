# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Agents in threads of this process: workers without Spark and without a JVM."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from farandole.runner.agent import run_worker
from farandole.runner.elastic.agent_pool import ThreadedAgentPool
from farandole.runner.gang import GangAgents

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farandole.runner.agent import WorkerSpec
    from farandole.runner.worker_task_outcome import TaskOutcome


class LocalAgents(GangAgents):
    """One thread per worker; each waits in native code, without the interpreter's lock."""

    def __init__(self, work: WorkerSpec, tasks: Iterable[int]) -> None:
        self._work = work
        self._endings: dict[int, TaskOutcome] = {}
        self._threads = [
            threading.Thread(
                target=self._run_agent, args=(task,), name=f"farandole-agent-{task}", daemon=True
            )
            for task in tasks
        ]

    def start_agents(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def all_ended(self) -> bool:
        """Returns whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def cancel_agents(self) -> None:
        """Does nothing: agents in this process end when the registrar aborts the job."""

    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns how each task ended."""
        return [self._endings[task] for task in sorted(self._endings)]

    def _run_agent(self, task: int) -> None:
        self._endings[task] = run_worker(self._work, task, owner=os.getpid())


class LocalAgentPool(ThreadedAgentPool):
    """Workers of an elastic job; their agents end with the registrar."""

    def __init__(self, work: WorkerSpec, max_workers: int) -> None:
        super().__init__(
            max_workers, lambda run, name: threading.Thread(target=run, name=name, daemon=True)
        )
        self._work = work

    def _run_worker(self, task: int) -> str | None:
        outcome = run_worker(self._work, task, owner=os.getpid())
        if outcome.refused is not None:
            return outcome.refused
        self.endings[task] = outcome
        return None

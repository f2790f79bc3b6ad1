# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Agents in threads of this process: workers without Spark and without a JVM."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from farandole.runner.agent import serve
from farandole.runner.elastic.crew import Crew
from farandole.runner.gang import Agents

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farandole.runner.agent import Work
    from farandole.runner.outcome import Ending


class LocalAgents(Agents):
    """One thread per worker; each waits in native code, without the interpreter's lock."""

    def __init__(self, work: Work, tasks: Iterable[int]) -> None:
        self._work = work
        self._endings: dict[int, Ending] = {}
        self._threads = [
            threading.Thread(
                target=self._serve, args=(task,), name=f"farandole-agent-{task}", daemon=True
            )
            for task in tasks
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def done(self) -> bool:
        """Returns whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def cancel(self) -> None:
        """Does nothing: agents in this process end when the registrar aborts the job."""

    def endings(self) -> list[Ending]:
        """Returns how each task ended."""
        return [self._endings[task] for task in sorted(self._endings)]

    def _serve(self, task: int) -> None:
        self._endings[task] = serve(self._work, task, owner=os.getpid())


class LocalCrew(Crew):
    """Workers of an elastic job; their agents end with the registrar."""

    def __init__(self, work: Work, most: int) -> None:
        super().__init__(
            most, lambda run, name: threading.Thread(target=run, name=name, daemon=True)
        )
        self._work = work

    def _one(self, task: int) -> str | None:
        ending = serve(self._work, task, owner=os.getpid())
        if ending.refused is not None:
            return ending.refused
        self.endings[task] = ending
        return None

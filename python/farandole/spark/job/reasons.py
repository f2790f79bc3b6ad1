# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Spark's own reasons for the loss of a gang's executors, from the Spark plugin."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.runner.errors import FarandoleJobError
    from farandole.runner.gang import Output
    from farandole.runner.show.training import Training
    from farandole.spark.shim import Shim

_EVERY = 0.25
_WITHIN = 3.0
"""Seconds that Spark may take to say why an executor is gone whose worker has just been lost."""
_LOOK = 0.05


class Word:
    """Spark's messages about the executors of one job.

    Args:
        shim: The plugin; `None` where there is none, and then nothing is ever said.
        tag: Of the job's Spark jobs.
        told: Gets what happens.
        output: Tells the user.
    """

    def __init__(self, shim: Shim | None, tag: str, told: Training, output: Output) -> None:
        self._shim = shim
        self._tag = tag
        self._told = told
        self._output = output
        self._next = 0.0
        self._stage: str | None = None
        self._reasons: dict[str, str] = {}
        if shim is not None:
            shim.news()  # what was said of jobs before

    def look(self) -> None:
        """Asks for news, four times a second at most."""
        now = time.monotonic()
        if self._shim is not None and now >= self._next:
            self._next = now + _EVERY
            for one in self._shim.news():
                self._take(one)

    def _take(self, one: dict[str, str]) -> None:
        executor, reason = one.get("executor", ""), one.get("reason", "")
        match one["kind"]:
            case "started" if one["tag"] == self._tag:
                # Ranks are in the first stage. The next one collects their rows by a task that may
                # be elsewhere.
                if self._stage is None:
                    self._stage = one.get("stage", "")
                if one.get("stage", "") == self._stage:
                    self._told.located(int(one["task"]), executor)
            case "removed" if self._told.holds(executor):
                self._reasons[executor] = reason
                self._say(f"Spark has removed executor {executor}", reason)
            case "decommissioning" if self._told.holds(executor):
                self._say(f"Spark decommissions executor {executor}", None)
            case "failed" if one["tag"] == self._tag:
                self._told.event(f"task {one['task']} failed", reason)
            case "stage" if one["tag"] == self._tag:
                self._told.event("stage failed", reason)

    def _say(self, what: str, reason: str | None) -> None:
        self._output.say(f"{what}: {reason}" if reason else what)
        self._told.event(what, reason)

    def explain(self, error: FarandoleJobError) -> None:
        """Adds to a worker's death why Spark has removed its executor, if it has.

        An exception of the worker's own needs no other reason. If Spark has ended the job and no
        rank is known, the removal of an executor still becomes an event.

        Args:
            error: Of the job.
        """
        if self._shim is None or error.exception_type is not None:
            return
        executor = self._told.executor_of(error.rank)
        # If a worker has ended by itself, its executor most likely continues.
        deadline = time.monotonic() + (_WITHIN if error.exit_code is None else 0.0)
        while True:
            self._next = 0.0
            self.look()
            known = self._reasons if executor is None else executor in self._reasons
            if known or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK)
        reason = self._reasons.get(executor) if executor is not None else None
        if reason and reason not in error.reason:
            error.add_reason(f"Spark has removed executor {executor}, which it was in: {reason}")

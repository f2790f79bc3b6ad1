# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The steps and checkpoints of this process, which its thread of reports sends to the driver.

An optimizer measures its steps only if the driver shows them and no estimator measures them.
"""

from __future__ import annotations

import time
from typing import Any, Final

from farandole._native import metrics


class ReductionTimer:
    """Measures the time inside its context. Each step enters it, so it is no generator.

    Attributes:
        seconds: Sum over the contexts. A context within another one adds nothing.
    """

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        """Begins to measure."""
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Adds the time since the begin."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


class RankProgress:
    """Sums over the steps since the last report, and the time of the last checkpoint.

    One thread trains and another one reports. A step that ends in the moment of a report counts in
    one of two reports.

    Attributes:
        measures_steps: Whether optimizers call `end_step`.
    """

    def __init__(self) -> None:
        self.measures_steps = False
        self._steps = 0
        self._step_seconds = self._reduce_seconds = 0.0
        self._reduction_timer = ReductionTimer()
        self._last_step_end: float | None = None
        self._step_at: float | None = None
        self._checkpoint_at: float | None = None
        self._reported = (0, 0.0, 0.0)

    def measure_reduction(self) -> ReductionTimer:
        """Returns a context in which the thread that trains waits for the reduction of gradients.
        The wait belongs to the step that ends next, also if a script waits before it calls the
        optimizer's step, to clip gradients for example.
        """
        return self._reduction_timer

    def end_step(self) -> None:
        """Counts a step from the end of the one before, if optimizers measure the steps."""
        if not self.measures_steps:
            return
        now = time.perf_counter()
        if self._last_step_end is not None:
            self._step_seconds += now - self._last_step_end
            self._reduce_seconds += self._reduction_timer.seconds
            self._steps += 1
        self._reduction_timer.seconds = 0.0
        self._last_step_end = now
        self.note_step()

    def note_step(self) -> None:
        """Takes note that a step has ended, which the optimizer or an estimator has measured."""
        self._step_at = time.time()

    def note_checkpoint(self) -> None:
        """Takes note that a checkpoint or commit was written to a store."""
        self._checkpoint_at = time.time()

    def take_report(self) -> dict[str, Any]:
        """Returns the means over the steps since the last call, in seconds, the counters of this
        process, and the times of the report, of the last step and of the last checkpoint in seconds
        since 1970.
        """
        report: dict[str, Any] = {
            "reported_at": time.time(),
            "counters": metrics.process_counters(),
        }
        before, now = self._reported, (self._steps, self._step_seconds, self._reduce_seconds)
        self._reported = now
        if (steps := now[0] - before[0]) > 0:
            report["step_seconds"] = (now[1] - before[1]) / steps
            report["reduce_seconds"] = (now[2] - before[2]) / steps
        if self._step_at is not None:
            report["step_at"] = self._step_at
        if self._checkpoint_at is not None:
            report["checkpoint_at"] = self._checkpoint_at
        return report


OWN_PROGRESS: Final = RankProgress()
"""The progress of this process."""

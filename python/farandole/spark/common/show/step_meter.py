# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The time of each part of a rank's step: for Spark's Training tab, the run viewer, and the rank's
timeline.

Nothing is measured unless requested.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from farandole._native import timeline
from farandole.common.rank_progress import OWN_PROGRESS
from farandole.common.timeline import phase
from farandole.spark import task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REPORT_INTERVAL_SECONDS = 2.0
_NULL_CONTEXT = contextlib.nullcontext()


class StepMeter:
    """Means over the steps of the last two seconds: time of a step, wait for data, and wait for the
    reduction.

    A time that is not measured is left out, because 0 would mean that a step does not wait. The
    wait for the reduction is measured inside `measure_reduction`.

    In a timeline, each step is a span `step` with the spans `data` and `compute`. The spans of
    `trace_phase` and `measure_reduction` are inside `compute`.

    Attributes:
        on: Whether the means are requested.
        traced: Whether a timeline is written.

    Args:
        on: Whether the means are requested; default: whether this worker's driver shows them.
        say: Receives the measured values.
        clock: In seconds.
        sees_data: Whether `mark_rows_read` is called after the rows of a step are read, instead of
            before.
    """

    def __init__(
        self,
        on: bool | None = None,
        say: Callable[[dict[str, float]], object] = task.report_rank_state,
        clock: Callable[[], float] = time.monotonic,
        *,
        sees_data: bool = True,
    ) -> None:
        self.on = task.has_rank_display() if on is None else on
        # Optimizers would report the same steps.
        OWN_PROGRESS.measures_steps = False
        self.traced = False
        self._say = say
        self._clock = clock
        self._sees_data = sees_data
        self._sees_reduction = False
        self._last_report = self._last_step_end = clock()
        self._rows = 0
        self._in_step = False
        self._reduced: dict[str, int] = {}
        self._reset_sums()

    @property
    def needs_reduction_timing(self) -> bool:
        """Whether reductions must be measured apart from steps of the optimizer."""
        return self.on or self.traced

    def _reset_sums(self) -> None:
        self._steps, self._step_seconds, self._data_seconds, self._reduce_seconds = 0, 0.0, 0.0, 0.0

    def begin_epoch(self) -> None:
        """Starts the epoch's first step. Earlier time, such as the time of validation, belongs to
        no step.
        """
        self._last_step_end = self._clock()
        self._close_step_span()
        self.traced = timeline.has_timeline()
        self._open_step_span()

    def mark_rows_read(self) -> None:
        """Notes that the rows of a step are read."""
        if not self._sees_data:
            return
        if self.on:
            self._data_seconds += self._clock() - self._last_step_end
        if self._in_step:
            timeline.leave_step_phase()
            timeline.enter_step_phase("compute")

    def trace_phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Shows a part of a step in the timeline.

        Args:
            name: Name of the part of a step, such as `forward`.
        """
        return phase(name) if self.traced else _NULL_CONTEXT

    @property
    def has_gradient_sizes(self) -> bool:
        """Whether `set_gradient_sizes` was called."""
        return bool(self._reduced)

    def set_gradient_sizes(self, tensors: int, size: int) -> None:
        """Sets the number and size of the gradients of a step, for `farandole explain`.

        Args:
            tensors: Number of gradients.
            size: Bytes of all of them, before compression.
        """
        self._reduced = {"reduced_tensors": tensors, "reduced_bytes": size}

    @contextlib.contextmanager
    def measure_reduction(self) -> Iterator[None]:
        """Measures a wait for the reduction of gradients."""
        self._sees_reduction = True
        started = self._clock()
        try:
            with self.trace_phase("reduce"):
                yield
        finally:
            self._reduce_seconds += self._clock() - started

    def end_batch(self, rows: int = 0) -> None:
        """Ends a step.

        Args:
            rows: Rows of the step.
        """
        self._close_step_span()
        self._open_step_span()
        if not self.on:
            return
        now = self._clock()
        self._step_seconds += now - self._last_step_end
        self._steps += 1
        self._rows += rows
        self._last_step_end = now
        OWN_PROGRESS.note_step()
        if now - self._last_report >= _REPORT_INTERVAL_SECONDS:
            self._report_means()

    def report_remaining_means(self) -> None:
        """Reports the values measured since the last report; no step is in progress."""
        self._close_step_span()
        self._report_means()

    def _report_means(self) -> None:
        if not self.on or not self._steps:
            return
        mean = {"step_seconds": self._step_seconds}
        if self._sees_data:
            mean["data_seconds"] = self._data_seconds
        if self._sees_reduction:
            mean["reduce_seconds"] = self._reduce_seconds
        record = {name: value / self._steps for name, value in mean.items()}
        reduced = self._reduced if self._sees_reduction else {}
        self._say(record | reduced | ({"rows": self._rows} if self._rows else {}))
        self._last_report = self._clock()
        self._reset_sums()

    def _open_step_span(self) -> None:
        """Begins a step in the timeline, with its wait for data."""
        if self.traced:
            self._in_step = True
            timeline.enter_step_phase("step")
            if self._sees_data:
                timeline.enter_step_phase("data")

    def _close_step_span(self) -> None:
        """Ends the step in the timeline, and the spans within it."""
        if self._in_step:
            self._in_step = False
            if self._sees_data:
                timeline.leave_step_phase()
            timeline.leave_step_phase()

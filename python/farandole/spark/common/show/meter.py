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
from farandole.common.timeline import phase
from farandole.spark import task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY = 2.0
_NOTHING = contextlib.nullcontext()


class Meter:
    """Means over the steps of the last two seconds: all of a step, what it waits for data, and for
    the reduction.

    A time that is not measured is left out, because 0 would mean that a step does not wait. The
    wait for the reduction is measured where `reducing` is used.

    In a timeline, each step is a span `step` with the spans `data` and `compute`, and in `compute`
    what `phase` and `reducing` measure.

    Attributes:
        on: Whether the means are requested.
        traced: Whether a timeline is written.

    Args:
        on: Whether the means are requested; default: whether this worker's driver shows them.
        say: Receives the measured values.
        clock: In seconds.
        sees_data: Whether `batch_begins` is called when the rows of a step are there, and not
            before they are read.
    """

    def __init__(
        self,
        on: bool | None = None,
        say: Callable[[dict[str, float]], object] = task.say,
        clock: Callable[[], float] = time.monotonic,
        *,
        sees_data: bool = True,
    ) -> None:
        self.on = task.is_told() if on is None else on
        self.traced = False
        self._say = say
        self._clock = clock
        self._sees_data = sees_data
        self._sees_reduction = False
        self._told = self._last = clock()
        self._rows = 0
        self._in_step = False
        self._reduced: dict[str, int] = {}
        self._forget()

    @property
    def watches(self) -> bool:
        """Whether reductions must be measured apart from steps of the optimizer."""
        return self.on or self.traced

    def _forget(self) -> None:
        self._steps, self._all, self._data, self._reduce = 0, 0.0, 0.0, 0.0

    def epoch_begins(self) -> None:
        """Starts the epoch's first step: time before it, such as that of validation, belongs to
        no step.
        """
        self._last = self._clock()
        self._close()
        self.traced = timeline.has_timeline()
        self._open()

    def batch_begins(self) -> None:
        """The rows of a step are there."""
        if not self._sees_data:
            return
        if self.on:
            self._data += self._clock() - self._last
        if self._in_step:
            timeline.leave_phase()
            timeline.enter_phase("compute")

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Shows a part of a step in the timeline.

        Args:
            name: Such as `forward`.
        """
        return phase(name) if self.traced else _NOTHING

    @property
    def knows_gradients(self) -> bool:
        """Whether `reduces` was called."""
        return bool(self._reduced)

    def reduces(self, tensors: int, size: int) -> None:
        """Sets what each step reduces, for `farandole explain`.

        Args:
            tensors: Number of gradients.
            size: Bytes of all of them, before compression.
        """
        self._reduced = {"reduced_tensors": tensors, "reduced_bytes": size}

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Measures a wait for the reduction of gradients."""
        self._sees_reduction = True
        started = self._clock()
        try:
            with self.phase("reduce"):
                yield
        finally:
            self._reduce += self._clock() - started

    def batch_ends(self, rows: int = 0) -> None:
        """A step is done.

        Args:
            rows: That it had.
        """
        self._close()
        self._open()
        if not self.on:
            return
        now = self._clock()
        self._all += now - self._last
        self._steps += 1
        self._rows += rows
        self._last = now
        if now - self._told >= _EVERY:
            self._tell()

    def tell(self) -> None:
        """Reports the values measured since the last report; no step is in progress."""
        self._close()
        self._tell()

    def _tell(self) -> None:
        if not self.on or not self._steps:
            return
        mean = {"step_seconds": self._all}
        if self._sees_data:
            mean["data_seconds"] = self._data
        if self._sees_reduction:
            mean["reduce_seconds"] = self._reduce
        record = {name: value / self._steps for name, value in mean.items()}
        reduced = self._reduced if self._sees_reduction else {}
        self._say(record | reduced | ({"rows": self._rows} if self._rows else {}))
        self._told = self._clock()
        self._forget()

    def _open(self) -> None:
        """A step begins in the timeline, with its wait for data."""
        if self.traced:
            self._in_step = True
            timeline.enter_phase("step")
            if self._sees_data:
                timeline.enter_phase("data")

    def _close(self) -> None:
        """The step ends in the timeline, and what it was in."""
        if self._in_step:
            self._in_step = False
            if self._sees_data:
                timeline.leave_phase()
            timeline.leave_phase()

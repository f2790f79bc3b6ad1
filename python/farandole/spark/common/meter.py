# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where the time of one rank's steps goes, for Spark's Training tab. Without the Spark plugin nothing is measured."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from farandole.spark import task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY = 2.0


class Meter:
    """Means over the steps of the last two seconds: all of a step, what it waits for data, and for the reduction.

    Attributes:
        on: Whether somebody wants to know.

    Args:
        on: Whether somebody wants to know; default: whether this worker's driver has the plugin.
        say: Gets what was measured.
        clock: In seconds.
    """

    def __init__(
        self,
        on: bool | None = None,
        say: Callable[[dict[str, float]], object] = task.say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on = task.is_told() if on is None else on
        self._say = say
        self._clock = clock
        self._told = self._last = clock()
        self._rows = 0
        self._forget()

    def _forget(self) -> None:
        self._steps, self._all, self._data, self._reduce = 0, 0.0, 0.0, 0.0

    def epoch_begins(self) -> None:
        """What came before, as a validation, belongs to no step."""
        self._last = self._clock()

    def batch_begins(self) -> None:
        """The rows of a step are there."""
        if self.on:
            self._data += self._clock() - self._last

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Measures a wait for the reduction of gradients."""
        started = self._clock()
        try:
            yield
        finally:
            self._reduce += self._clock() - started

    def batch_ends(self, rows: int = 0) -> None:
        """A step is done.

        Args:
            rows: That it had.
        """
        if not self.on:
            return
        now = self._clock()
        self._all += now - self._last
        self._steps += 1
        self._rows += rows
        self._last = now
        if now - self._told >= _EVERY:
            self.tell()

    def tell(self) -> None:
        """Says what was measured since the last time."""
        if not self.on or not self._steps:
            return
        mean = {"step_seconds": self._all, "data_seconds": self._data, "reduce_seconds": self._reduce}
        record = {name: value / self._steps for name, value in mean.items()}
        self._say(record | ({"rows": self._rows} if self._rows else {}))
        self._told = self._clock()
        self._forget()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rule for learning rates: an optimizer trains with its rate times the number of processes.

Files contain the rate of one process, so resumed and new runs are scaled in the same way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import keras

from farandole._keras.value_collectives import to_numpy_array

if TYPE_CHECKING:
    from collections.abc import Iterator


class _ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule, or a function that gives the rate, times a factor."""

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__()
        self.schedule = schedule
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        is_schedule = isinstance(self.schedule, keras.optimizers.schedules.LearningRateSchedule)
        # Keras takes a function of no argument, too.
        return (self.schedule(step) if is_schedule else self.schedule()) * self.factor

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "factor": self.factor}


class ScaledLearningRate:
    """The learning rate of one optimizer.

    Args:
        optimizer: of the model, distributed or not.
        size: processes.
    """

    def __init__(self, optimizer: Any, size: int) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._size = size
        rate = self._own_rate
        self._schedule = None if isinstance(rate, keras.Variable) else rate

    @property
    def _own_rate(self) -> Any:
        return self._optimizer._learning_rate  # noqa: SLF001 - `learning_rate` gives no schedule

    def initial_rate(self) -> float | None:
        """Returns the rate as it is now; `None` for a schedule."""
        return None if self._schedule is not None else float(to_numpy_array(self._own_rate))

    def rescale_for_world(self, before: int, size: int) -> None:
        """Takes the rate from one number of processes to another.

        Args:
            before: the number that the optimizer's rate is multiplied by; a schedule's factor is
                set again.
            size: the number of processes now.
        """
        self._size = size
        if self._schedule is None:
            if before != size:
                self.multiply_rate(size / before)
        else:
            self._optimizer._learning_rate = (  # noqa: SLF001
                _ScaledSchedule(self._schedule, float(size)) if size > 1 else self._schedule
            )

    def multiply_rate(self, factor: float) -> None:
        """Multiplies a rate that is no schedule.

        Args:
            factor: of the rate.
        """
        if self._schedule is None:
            self._own_rate.assign(to_numpy_array(self._own_rate) * factor)

    @contextlib.contextmanager
    def single_process_rate(self) -> Iterator[None]:
        """Sets the learning rate of one process inside the context, for saving."""
        size = self._size
        if size == 1:
            yield
            return
        exact_rate = None if self._schedule is not None else to_numpy_array(self._own_rate)
        self.rescale_for_world(size, 1)
        try:
            yield
        finally:
            self.rescale_for_world(1, size)
            if exact_rate is not None:
                self._own_rate.assign(exact_rate)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learning rates over a run by the name of a schedule, with a warm-up.

The factors equal the factors of transformers, such as of `get_cosine_schedule_with_warmup`. They
depend on the share of the run that is done. So a schedule needs no number of steps, which changes
with the number of processes of an elastic run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

RATE_SCHEDULES: Final = ("constant", "linear", "cosine")
"""Names that `lr_scheduler` takes."""


@dataclass(frozen=True)
class RateSchedule:
    """Makes the scheduler of an optimizer.

    Attributes:
        name: one of `RATE_SCHEDULES`.
        warmup_share: share of the run in which rates rise from 0.
    """

    name: str
    warmup_share: float = 0.0

    def __call__(self, optimizer: Any) -> RateScheduler:
        """Returns the scheduler.

        Args:
            optimizer: has the full rates.
        """
        return RateScheduler(optimizer, self)

    def rate_factor(self, run_share: float) -> float:
        """Returns the factor of the rates.

        Args:
            run_share: share of the run that is done, 0 to 1.
        """
        if run_share < self.warmup_share:
            return run_share / self.warmup_share
        if self.name == "constant":
            return 1.0
        rest = min((run_share - self.warmup_share) / (1.0 - self.warmup_share), 1.0)
        return 1.0 - rest if self.name == "linear" else (1.0 + math.cos(math.pi * rest)) / 2.0


class RateScheduler:
    """Sets the rates of an optimizer.

    Args:
        optimizer: has the full rates, of one process.
        schedule: gives the factors.
    """

    def __init__(self, optimizer: Any, schedule: RateSchedule) -> None:
        self.optimizer = optimizer
        self._schedule = schedule
        self._full_rates = [group["lr"] for group in optimizer.param_groups]
        self.set_rates(0.0)

    def set_rates(self, run_share: float) -> None:
        """Sets the rates.

        Args:
            run_share: share of the run that is done, 0 to 1.
        """
        factor = self._schedule.rate_factor(run_share)
        for group, rate in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = rate * factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the full rates."""
        return {"full_rates": list(self._full_rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the full rates.

        Args:
            state: a result of `state_dict`.
        """
        self._full_rates = list(state["full_rates"])


def check_warmup_steps(name: str, value: Any) -> int | float:
    """Returns a number of steps, or the share of the run.

    Args:
        name: name of the parameter.
        value: value of the parameter.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or a share of 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of steps, or a share of the run: {value!r}")
    if not value >= 0 or (isinstance(value, float) and value >= 1):
        raise ValueError(
            f"{name} must be a whole number of steps, or a share of the run from 0 up to, not "
            f"including, 1.0: {value!r}"
        )
    return value


def warmup_share(warmup_steps: float, run_steps: int) -> float:
    """Returns the share of the run in which rates rise.

    Args:
        warmup_steps: value of the parameter.
        run_steps: steps of the optimizer in the run.

    Raises:
        ValueError: the warm-up has as many steps as the run.
    """
    if isinstance(warmup_steps, float):
        return warmup_steps
    if warmup_steps >= run_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} is not below the number of steps of the run: {run_steps}"
        )
    return warmup_steps / run_steps

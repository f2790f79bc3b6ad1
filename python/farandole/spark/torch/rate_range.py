# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The range test of learning rates (Smith 2017, "Cyclical Learning Rates for Training Neural
Networks"): the rate rises from step to step in a short run, and the loss shows which rates train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from farandole.spark.torch.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole.spark.torch.callbacks import TrainingState

_HISTORY_KEY: Final = "range_losses"
_SMOOTHED_POINTS: Final = 5
_DIVERGED_RATIO: Final = 4.0
"""A loss that is so many times the smallest one ends the curve."""
_CHART_LINES, _CHART_COLUMNS = 24, 40
_MIN_STEPS: Final = 10

CLEARED_PARAMS: Final[dict[str, Any]] = {
    "lr_scheduler_interval": "step",
    "warmup_steps": None,
    "early_stopping": None,
    "best_checkpoint": None,
    "checkpoint_every": None,
    "ema_decay": None,
    "max_time": None,
    "run_id": None,
    "mlflow": False,
    "wandb": False,
    "tensorboard": False,
    "terminate_on_nan": False,
}
"""Parameters of the estimator in the run of a test."""


@dataclass(frozen=True)
class LearningRateCurve:
    """Losses of a run whose learning rate rises from step to step. Printed, it is a chart.

    Attributes:
        rates: learning rates of one process, rising.
        losses: loss of rank 0 with each rate, before the step with this rate. They end where they
            diverge.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed_losses(self) -> tuple[float, ...]:
        """Means of five neighbouring losses."""
        half_window = _SMOOTHED_POINTS // 2
        windows = (
            self.losses[max(0, index - half_window) : index + half_window + 1]
            for index in range(len(self.losses))
        )
        return tuple(sum(window) / len(window) for window in windows)

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate with the smallest smoothed loss; `None` if the loss never falls."""
        smoothed = self.smoothed_losses
        lowest = smoothed.index(min(smoothed))
        return None if lowest == 0 else max(self.rates[lowest] / 10, self.rates[0])

    def __str__(self) -> str:
        """Returns a chart, one line for each of some rates."""
        return "\n".join(self._chart_lines())

    def _chart_lines(self) -> Iterator[str]:
        smoothed, suggestion = self.smoothed_losses, self.suggestion
        low, high = min(smoothed), max(smoothed)
        count = min(_CHART_LINES, len(smoothed))
        shown = {round(index * (len(smoothed) - 1) / max(count - 1, 1)) for index in range(count)}
        suggested = None
        if suggestion is not None:
            suggested = min(range(len(smoothed)), key=lambda at: abs(self.rates[at] - suggestion))
            shown.add(suggested)
        for index in sorted(shown):
            share = (smoothed[index] - low) / max(high - low, 1e-12)
            bar = "#" * (1 + round(share * (_CHART_COLUMNS - 1)))
            pointer = "  <- suggestion" if index == suggested else ""
            yield f"{self.rates[index]:9.2e} {smoothed[index]:10.4g} {bar}{pointer}"


class RangeLossRecorder(Callback):
    """Writes the loss of each step into the history of the run."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._sum = 0.0

    def on_batch_end(self, state: TrainingState) -> None:
        """Takes the loss of the batch out of the mean of the epoch.

        Args:
            state: the state of the run.
        """
        if state.step == 1:
            self._losses, self._sum = [], 0.0
        total = state.loss * state.step
        self._losses.append(total - self._sum)
        self._sum = total

    def on_epoch_end(self, state: TrainingState) -> None:
        """Writes the losses of the epoch.

        Args:
            state: the state of the run.
        """
        state.history[-1][_HISTORY_KEY] = list(self._losses)


def rising_rates(min_lr: float, max_lr: float, steps: int) -> list[float]:
    """Returns the rate of each step, each larger than the one before by the same factor.

    Args:
        min_lr: the first.
        max_lr: the last.
        steps: number of steps.

    Raises:
        ValueError: there is no such range, or it has too few steps.
    """
    if not 0 < min_lr < max_lr:
        raise ValueError(f"min_lr={min_lr} must be above 0 and below max_lr={max_lr}")
    if steps < _MIN_STEPS:
        raise ValueError(f"steps={steps} must be at least {_MIN_STEPS}")
    return [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]


def create_range_scheduler(
    rates: Sequence[float], optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """Returns a scheduler in which the largest rate of the groups is the rate of the step, and the
    others keep their ratio to it.

    Args:
        rates: rate of each step.
        optimizer: has the groups.

    Raises:
        ValueError: all rates are 0.
    """
    # `initial_lr` is the rate before an earlier scheduler changed it.
    largest = max(group.get("initial_lr", group["lr"]) for group in optimizer.param_groups)
    if not largest > 0:
        raise ValueError("the optimizer has learning rates of 0: the test needs their ratios")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_range_factor, rates, largest))


def _range_factor(rates: Sequence[float], largest: float, step: int) -> float:
    return rates[min(step, len(rates) - 1)] / largest


def curve_of_history(
    history: Sequence[dict[str, Any]], rates: Sequence[float]
) -> LearningRateCurve:
    """Returns the curve of a run.

    Args:
        history: entries of the epochs.
        rates: rate of each step.

    Raises:
        ValueError: losses diverge or are not finite from the beginning.
    """
    found: list[float] = []
    for loss in (loss for entry in history for loss in entry[_HISTORY_KEY]):
        if not math.isfinite(loss) or (found and loss > _DIVERGED_RATIO * max(min(found), 1e-12)):
            break
        found.append(loss)
    if len(found) < _SMOOTHED_POINTS:
        raise ValueError(
            f"the loss diverges after {len(found)} steps, at a rate of {rates[len(found)]:.2g}: "
            "use a smaller min_lr"
        )
    return LearningRateCurve(tuple(rates[: len(found)]), tuple(found))

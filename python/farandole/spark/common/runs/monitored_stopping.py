# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Monitors of metrics: early stopping, and the selection of the best epoch.

A watched number is named as in `history_frame()`: `loss`, `val_loss`, a metric, or a metric with
`val_` before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from farandole.runner.show.history import entry_scores, flatten_history_entry

if TYPE_CHECKING:
    from farandole.runner.show.history import Entry

_SMALLER_IS_BETTER_SUFFIXES = ("loss", "error", "mse", "mae", "rmse")


@dataclass(frozen=True)
class MonitoredMetric:
    """A number of the history and which way is better.

    Args:
        monitor: its name; `None` takes `val_loss`, or `loss` where nothing is validated.
        mode: `min` or `max`; `None` goes by the name: losses and errors become smaller, the rest
            larger.
        min_delta: by how much a number must be better to count.
    """

    monitor: str | None = None
    mode: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        """Refuses a mode that is none."""
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max': {self.mode!r}")
        if self.min_delta < 0:
            raise ValueError(f"min_delta must not be negative: {self.min_delta}")

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Returns a monitor, the name of one, or a dict of its fields.

        Raises:
            TypeError: something else, or a field that there is not.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(monitor=value)
        if isinstance(value, dict):
            return cls(**value)
        raise TypeError(
            "not the name of a number of the history, nor a dict of "
            f"{', '.join(cls.__annotations__)}: {value!r}"
        )

    def entry_value(self, entry: Entry) -> float:
        """Returns the number in an epoch's entry.

        Raises:
            ValueError: the history has no such number; the message names those it has.
        """
        row = flatten_history_entry(entry)
        name = self.monitor or ("val_loss" if "val_loss" in row else "loss")
        if name not in row:
            known = ", ".join(entry_scores(entry))
            raise ValueError(f"there is no {name!r} in the history, there is: {known}")
        return row[name]

    def is_better(self, new: float, old: float | None) -> bool:
        """Returns whether a number is better than the best so far; one that is no number never
        is.
        """
        if math.isnan(new):
            return False
        if old is None:
            return True
        smaller = (
            self.mode == "min"
            if self.mode
            else (self.monitor or "loss").endswith(_SMALLER_IS_BETTER_SUFFIXES)
        )
        return new < old - self.min_delta if smaller else new > old + self.min_delta

    def best_index(self, history: list[Entry]) -> int | None:
        """Returns the index of the best entry; `None` if no entry has a number."""
        found: int | None = None
        value: float | None = None
        for index, entry in enumerate(history):
            new = self.entry_value(entry)
            if self.is_better(new, value):
                found, value = index, new
        return found


@dataclass(frozen=True)
class EarlyStopping(MonitoredMetric):
    """A stopping rule that ends a run when its monitored score has not improved for some epochs.

    Args:
        patience: epochs without an improvement after which the run ends.
    """

    patience: int = 3

    def __post_init__(self) -> None:
        """Raises an error if the patience is below 1."""
        super().__post_init__()
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1: {self.patience}")

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Like `MonitoredMetric.from_value`; a number alone is the patience."""
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(patience=value)
        return super().from_value(value)

    def is_patience_exhausted(self, history: list[Entry]) -> bool:
        """Returns whether the run has become no better for `patience` epochs."""
        best = self.best_index(history)
        return len(history) - 1 - (-1 if best is None else best) >= self.patience

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a run, and how it continues in another world of an elastic job.

After a world fails, the remaining processes go back to the last commit: model, optimizer, schedule,
position in the data and sums of the epoch belong to one step, so each row of an epoch counts once.
New processes get them from rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import farandole.torch as hvd
from farandole.common.notices import is_elastic
from farandole.spark.common.data.source import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

EVERY = 10
"""Steps from one commit to the next, at least; commits are also made at the ends of epochs."""


@dataclass(frozen=True)
class Reached:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh one, or that of a checkpoint.
        first_epoch: with which this job began.
        history: entries of complete epochs.
        place: in the data of the epoch in progress.
        totals: sums of its scores; `None` before its first step.
        scores: those of its training, once that is over.
        seconds: that it has taken.
        taken: steps of the optimizer in all.
        taken_before: steps of the optimizer before this epoch.
        stepper: state of schedule and precision, with the world's size that learning rates are
            multiplied by.
        best: the best checkpoint so far, where that is kept.
    """

    begun: bool = False
    first_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    totals: list[float] | None = None
    scores: dict[str, Any] | None = None
    seconds: float = 0.0
    taken: int = 0
    taken_before: int = 0
    stepper: dict[str, Any] = field(default_factory=dict)
    best: bytes | None = None


class Course:
    """Takes a run through the worlds of its job; in a job of fixed size there is one.

    Args:
        model: on its device.
        optimizer: distributed.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.reached = Reached()
        self.moves = is_elastic()
        """Whether the world may change."""
        self._state = (
            hvd.elastic.TorchState(model, optimizer, reached=self.reached) if self.moves else None
        )

    def through(self, train: Callable[[], None]) -> None:
        """Calls a function that trains from the last commit to the end, in each world until one has
        finished.

        Args:
            train: the function; it begins with a collective look at the progress so far.
        """
        if self._state is None:
            train()
            return

        def go_on(state: Any) -> None:
            self.reached = state.reached
            train()

        hvd.elastic.run(go_on)(self._state)

    def reaches(self, **changes: Any) -> None:
        """Notes how far the run has come, and where the world may change commits to it; a
        collective call.

        Args:
            **changes: of `Reached`.
        """
        self.reached = replace(self.reached, **changes)
        if self._state is not None:
            self._state.reached = self.reached
            self._state.commit()

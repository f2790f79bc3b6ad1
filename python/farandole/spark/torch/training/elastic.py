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
from farandole.spark.common.data.source import EpochPosition

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

COMMIT_INTERVAL_STEPS = 10
"""Steps from one commit to the next, at least; commits are also made at the ends of epochs."""


@dataclass(frozen=True)
class TorchRunProgress:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh state, or the state of a checkpoint.
        first_epoch: epoch with which this job began.
        history: entries of complete epochs.
        place: position in the data of the epoch in progress.
        totals: sums of the scores of this epoch; `None` before its first step.
        scores: training scores of this epoch, after its last step.
        seconds: duration of this epoch so far.
        taken: steps of the optimizer in all.
        taken_before: steps of the optimizer before this epoch.
        stepper: state of schedule and precision, with the factor of the learning rates.
        best: the best checkpoint so far, if the best checkpoint is kept.
        rate_rows: rows of a step on one process for which checkpoints contain the learning rate.
    """

    begun: bool = False
    first_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    place: EpochPosition = field(default_factory=EpochPosition)
    totals: list[float] | None = None
    scores: dict[str, Any] | None = None
    seconds: float = 0.0
    taken: int = 0
    taken_before: int = 0
    stepper: dict[str, Any] = field(default_factory=dict)
    best: bytes | None = None
    rate_rows: int = 0


class TorchElasticRun:
    """A run that continues through the worlds of its job; a job of fixed size has one world.

    Args:
        model: on its device.
        optimizer: distributed.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.reached = TorchRunProgress()
        self.moves = is_elastic()
        """Whether the world may change."""
        self._state = (
            hvd.elastic.TorchState(model, optimizer, reached=self.reached) if self.moves else None
        )

    def run_in_each_world(self, train: Callable[[], None]) -> None:
        """Calls a function that trains from the last commit to the end, in each world until one has
        finished.

        Args:
            train: the function; it begins with a collective call that reads the progress so far.
        """
        if self._state is None:
            train()
            return

        def train_in_world(state: Any) -> None:
            self.reached = state.reached
            train()

        hvd.elastic.run(train_in_world)(self._state)

    def commit_progress(self, **changes: Any) -> None:
        """Updates the progress of the run, and commits it if the world may change; a collective
        call.

        Args:
            **changes: new values of fields of `TorchRunProgress`.
        """
        self.reached = replace(self.reached, **changes)
        if self._state is not None:
            self._state.reached = self.reached
            self._state.commit()

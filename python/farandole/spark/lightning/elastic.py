# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a Lightning run, and how it continues in another world of an elastic job."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from farandole.lightning.elastic import LightningState
from farandole.spark.common.data.batch_source import EpochPosition
from farandole.spark.common.runs.elastic_run import COMMIT_INTERVAL_STEPS

if TYPE_CHECKING:
    import torch

    from farandole.spark.lightning.lightning_loader import LightningLoader
    from farandole.spark.lightning.run_recorder import LightningRunRecorder


@dataclass(frozen=True)
class LightningRunProgress:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh state, or the state of a checkpoint.
        history: entries of complete epochs.
        place: position in the data of the epoch in progress.
        total: sum of the losses of this epoch over its rows.
        best: the best weights so far, if best weights are kept.
    """

    begun: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    place: EpochPosition = field(default_factory=EpochPosition)
    total: float = 0.0
    best: dict[str, torch.Tensor] | None = None


class LightningRunState(LightningState):
    """State of a run: Lightning's state and the progress of the run.

    Args:
        reached: progress of the run.
    """

    reached: LightningRunProgress
    _loader: LightningLoader | None
    _watch: LightningRunRecorder | None

    def __init__(self, reached: LightningRunProgress) -> None:
        vars(self).update(_loader=None, _watch=None)
        super().__init__(every=COMMIT_INTERVAL_STEPS, reached=reached)

    def begin_world(self, loader: LightningLoader | None, watch: LightningRunRecorder) -> None:
        """Begins to train in a world.

        Args:
            loader: training loader; `None` if a data module manages its own position.
            watch: recorder of the run.
        """
        self._loader, self._watch = loader, watch

    def note_finished_batch(self, trainer: Any, batches: int) -> None:
        """Takes note of a batch: where a commit follows, of its place."""
        super().note_finished_batch(trainer, batches)
        if self._loader is not None and self.is_commit_due(trainer, batches):
            total = self._required_recorder.global_loss_total()
            self.reached = replace(
                self.reached,
                place=self._loader.position_after_steps(trainer.current_epoch, batches),
                total=total,
            )

    def is_commit_due(self, trainer: Any, batches: int) -> bool:
        """Returns whether to commit now; never if an epoch cannot be continued in the middle."""
        return self._loader is not None and super().is_commit_due(trainer, batches)

    def note_finished_epoch(self, trainer: Any) -> None:
        """Takes note of an epoch, whose entry is in the history."""
        super().note_finished_epoch(trainer)
        if self._loader is not None:
            self._loader.rewind_to_start()
        watch = self._required_recorder
        self.reached = LightningRunProgress(True, copy.deepcopy(watch.history), best=watch.best)

    @property
    def _required_recorder(self) -> LightningRunRecorder:
        assert self._watch is not None  # noqa: S101 - set by `begin_world`
        return self._watch

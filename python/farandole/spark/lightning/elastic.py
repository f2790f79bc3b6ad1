# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a Lightning run, and how it continues in another world of an elastic job."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from farandole.lightning.elastic import LightningState
from farandole.spark.common.data.source import Place

if TYPE_CHECKING:
    import torch

    from farandole.spark.lightning.loader import Loader
    from farandole.spark.lightning.watch import Watch

EVERY = 10
"""Steps from one commit to the next."""


@dataclass(frozen=True)
class Reached:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh one, or that of a checkpoint.
        history: entries of complete epochs.
        place: in the data of the epoch in progress.
        total: sum of its losses over rows.
        best: the best weights so far, where those are kept.
    """

    begun: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    total: float = 0.0
    best: dict[str, torch.Tensor] | None = None


class RunState(LightningState):
    """State of a run: Lightning's, and how far it has come.

    Args:
        reached: how far.
    """

    reached: Reached
    _loader: Loader | None
    _watch: Watch | None

    def __init__(self, reached: Reached) -> None:
        vars(self).update(_loader=None, _watch=None)
        super().__init__(every=EVERY, reached=reached)

    def begin(self, loader: Loader | None, watch: Watch) -> None:
        """Begins in a world.

        Args:
            loader: of the training; `None` where a data module keeps its place for itself.
            watch: of the run.
        """
        self._loader, self._watch = loader, watch

    def has_done(self, trainer: Any, batches: int) -> None:
        """Takes note of a batch: where a commit follows, of its place."""
        super().has_done(trainer, batches)
        if self._loader is not None and self.is_due(trainer, batches):
            total = self._watched.total_everywhere()
            self.reached = replace(
                self.reached,
                place=self._loader.place_after(trainer.current_epoch, batches),
                total=total,
            )

    def is_due(self, trainer: Any, batches: int) -> bool:
        """Returns whether to commit now; never if an epoch cannot be continued in the middle."""
        return self._loader is not None and super().is_due(trainer, batches)

    def has_ended(self, trainer: Any) -> None:
        """Takes note of an epoch, whose entry is in the history."""
        super().has_ended(trainer)
        if self._loader is not None:
            self._loader.ends()
        watch = self._watched
        self.reached = Reached(True, copy.deepcopy(watch.history), best=watch.best)

    @property
    def _watched(self) -> Watch:
        assert self._watch is not None  # noqa: S101 - set by `begin`
        return self._watch

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes the loss of a batch its part of a step's loss, before DDP averages gradients over ranks.

Lightning divides the loss of a batch by `accumulate_grad_batches`, and DDP averages gradients over
ranks, so every batch would weigh the same. Here each batch weighs by its rows, and a batch of
padding weighs 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from farandole.spark.lightning.loader import LightningLoader


class StepLossScaler:
    """Scales the losses of one rank.

    Args:
        loader: training loader; `None` if a data module reads the rows, which are then unknown.
        reduction: reduction of the module's loss over a batch: `"mean"`, `"sum"` or `"per_batch"`.
        size: ranks.

    Attributes:
        index: number of the batch in progress.
    """

    def __init__(self, loader: LightningLoader | None, reduction: str, size: int) -> None:
        self._loader = loader
        self._reduction = reduction
        self._size = size
        self.index = 0

    def scale_loss(self, loss: torch.Tensor, trainer: Any) -> torch.Tensor:
        """Returns the part of the batch in progress in the step's loss.

        Args:
            loss: loss of the batch, divided by `accumulate_grad_batches` if Lightning steps the
                optimizer.
            trainer: Lightning's.
        """
        module = trainer.lightning_module
        passes = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        own = getattr(module, "take_step_loss", None)
        prepared = None if own is None else own()
        if prepared is not None:
            return prepared
        if self._loader is None:
            return loss
        rows = self._loader.read_batch(self.index).valid
        if self._reduction == "sum":
            return loss * float(passes * self._size if rows else 0)
        first = self.index - self.index % passes
        last = min(first + passes, int(trainer.num_training_batches))
        if self._reduction == "per_batch":
            batches = self._loader.filled_batches(first, last)
            return loss * (passes * self._size / batches if rows else 0.0)
        return loss * (rows * passes * self._size / self._loader.global_rows(first, last))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Losses of labels as sums over rows, and the counts that divide the sums.

A step's loss is the sum over the rows of all processes, divided by the count of all these rows, so
two processes with a batch of 32 step like one process with a batch of 64. Sums and counts of each
label stay apart until the counts of all processes are known. Padding is in neither of them.

A loss has one of three reductions. The count of a `mean` is the number of rows, or the sum of the
weights of the labels: class weights and ignored labels change it. A `sum` is not divided. With
`per_batch`, the loss is a number of a batch as a whole, and the count is the number of batches that
have rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farandole.torch import loss_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.torch.job import TorchLabel

LOSS_REDUCTIONS = ("mean", "sum", "per_batch")
"""Values of the parameter `loss_reduction`."""


@dataclass(frozen=True)
class LossTerm:
    """The loss of one label in one batch of one process.

    Attributes:
        value: a number with gradients, multiplied by the label's loss weight.
        scale: factor of `value` that makes it the sum over the rows of the batch.
        count: divisor of the sum in a mean over the rows of the batch.
        divides: whether the step's loss divides the sum by the count of all processes.
    """

    value: torch.Tensor
    scale: float
    count: float
    divides: bool = True

    def mean(self) -> torch.Tensor:
        """Returns the mean over the batch; 0 if nothing counts."""
        return self.value * (self.scale / self.count if self.count else 0.0)

    def step_loss_part(self, total: float, size: int) -> torch.Tensor:
        """Returns the part of the step's loss, before gradients are averaged over processes.

        Args:
            total: count of all processes in all batches whose gradients make the step.
            size: processes.
        """
        if not self.divides:
            return self.value * (self.scale * size)
        return self.value * (self.scale * size / total if total else 0.0)


def mean_batch_loss(terms: Sequence[LossTerm]) -> torch.Tensor:
    """Returns the loss of one batch of this process, a mean over its rows."""
    return torch.stack([one.mean() for one in terms]).sum()


class LabelLoss:
    """The loss of one label.

    Args:
        loss: a loss of torch, or the user's function or module.
        label: the label.
        reduction: the user's word for the loss, one of `LOSS_REDUCTIONS`; `None` takes the
            reduction of a loss of torch, and `"mean"` for other losses.
        share: the label's loss weight.
        weighted: whether rows have weights.

    Attributes:
        reduction: one of `LOSS_REDUCTIONS`.
        counts_more_than_rows: whether the count of a batch is more than the number of its rows.

    Raises:
        ValueError: the reduction contradicts the loss, or weights are wanted for a loss that cannot
            be had row by row.
    """

    def __init__(
        self,
        loss: Any,
        label: TorchLabel,
        reduction: str | None = None,
        share: float = 1.0,
        *,
        weighted: bool = False,
    ) -> None:
        known = loss_sums.known_reduction(loss)
        self.reduction = find_loss_reduction(loss, reduction)
        self._loss = loss
        self._share = share
        self._is_batch_mean = known == "batchmean"
        self._rows = loss_sums.loss_with_reduction(loss, "none") if weighted else None
        is_mean = self.reduction == "mean"
        self._sum = (
            loss_sums.loss_with_reduction(loss, "sum")
            if is_mean and known is not None and _divides_by_labels(loss, label)
            else None
        )
        self._own_count = getattr(loss, "label_count", None) if is_mean and known is None else None
        self._count_label = f"label_count of the loss {loss_sums.loss_name(loss)}"
        self.counts_more_than_rows = (
            self.reduction == "per_batch" or self._sum is not None or self._own_count is not None
        )

    def loss_divisor(self, label: torch.Tensor, rows: int) -> float:
        """Returns the count of a batch.

        Args:
            label: labels of the rows that count, in the shape of their column.
            rows: number of rows.

        Raises:
            ValueError: the loss's own method returns more than one number.
        """
        if self.reduction == "per_batch":
            return 1.0 if rows else 0.0
        if rows and self._sum is not None:
            return float(loss_sums.label_count(self._loss, label))
        if rows and self._own_count is not None:
            found = self._own_count(label)
            if isinstance(found, torch.Tensor) and found.numel() != 1:
                raise ValueError(
                    f"{self._count_label} must return one number, what the loss divides by, and "
                    f"not a tensor of shape {tuple(found.shape)}"
                )
            return float(found)
        return float(rows)

    def batch_loss_term(
        self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None, count: float
    ) -> LossTerm:
        """Returns the loss of a batch.

        Args:
            output: output of the model, one row per row that counts.
            label: in the shape that the loss expects.
            weights: one per row, or `None`.
            count: the result of `loss_divisor` for this batch.
        """
        # A mean of nothing is NaN, and so are its gradients. A sum may still have a part of labels
        # of weight 0, by label smoothing.
        if count == 0 and self._sum is None:
            return LossTerm(output.sum() * 0.0, 1.0, 0.0, self.reduction != "sum")
        if weights is not None and self._rows is not None:
            return self._weighted_term(self._rows(output, label), weights, count)
        if self.reduction == "sum":
            return LossTerm(self._loss(output, label) * self._share, 1.0, count, divides=False)
        if self._sum is not None:
            return LossTerm(self._sum(output, label) * self._share, 1.0, count)
        return LossTerm(self._loss(output, label) * self._share, count, count)

    def _weighted_term(self, losses: torch.Tensor, weights: torch.Tensor, count: float) -> LossTerm:
        """Returns the loss of rows with weights. Weights of 1 give the loss without weights."""
        total = (losses.reshape(len(weights), -1).sum(dim=1) * weights).sum() * self._share
        if self.reduction == "sum":
            return LossTerm(total, 1.0, count, divides=False)
        if self._sum is not None or self._own_count is not None:
            return LossTerm(total, 1.0, count)
        divisor = len(weights) if self._is_batch_mean else losses.numel()
        return LossTerm(total / divisor, count, count)


def _divides_by_labels(loss: Any, label: TorchLabel) -> bool:
    """Returns whether the count of a loss's mean differs between batches of equally many rows."""
    if not (loss_sums.divides_by_labels(loss) and label.dtype == "int64"):
        return False
    if loss_sums.class_weights(loss) is not None or label.value_range is None:
        return True
    low, high = label.value_range
    return low <= loss_sums.ignored_label(loss) <= high


def find_loss_reduction(loss: Any, wanted: str | None) -> str:
    """Returns the reduction of a loss, one of `LOSS_REDUCTIONS`.

    Args:
        loss: any loss.
        wanted: the user's word for it, or `None`.

    Raises:
        ValueError: the user's word contradicts a loss of torch.
    """
    known = loss_sums.known_reduction(loss)
    found = "mean" if known == "batchmean" else known
    if wanted is not None and found not in (None, wanted) and wanted != "per_batch":
        raise ValueError(
            f"loss_reduction={wanted!r} contradicts the loss {loss_sums.loss_name(loss)}, whose "
            f"reduction is {known!r}: leave loss_reduction out, or change the loss"
        )
    return wanted or found or "mean"


def check_weighable(loss: Any) -> None:
    """Refuses a loss that cannot be had row by row.

    Args:
        loss: loss of one label, in a fit with sample weights.

    Raises:
        ValueError: it has no reduction.
    """
    loss_sums.loss_with_reduction(loss, "none")

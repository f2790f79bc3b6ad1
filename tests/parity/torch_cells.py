# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Losses and options of fits with PyTorch. One line adds a loss, or a value of an option."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 3
IGNORED_LABEL = -100
CLASS_WEIGHTS = (1.0, 10.0, 0.1)


@dataclass(frozen=True)
class LossCase:
    """A loss, and the data that it takes.

    Attributes:
        make: makes the loss.
        label: kind of label: `number`, `vector`, `sign`, `bit`, `share`, `shares`, `class`,
            `class_as_float`, `class_or_ignored`, `classes`.
        activation: what the model ends with.
        width: outputs of the model.
        reduction: `loss_reduction` of the fit.
        own: whether the loss has no `reduction`, so sample weights do not go with it.
    """

    make: Callable[[], Any]
    label: str = "number"
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None
    width: int = 1
    reduction: str | None = None
    own: bool = False


def _weights() -> torch.Tensor:
    return torch.tensor(CLASS_WEIGHTS)


def _log_softmax(output: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(output, dim=1)


def _two_tags(output: torch.Tensor) -> torch.Tensor:
    return output.reshape(-1, CLASSES, 2)


class MaskedError(nn.Module):
    """A mean over the labels that are not negative, which says what it divides by."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        mask = (label >= 0).float()
        return ((output - label) ** 2 * mask).sum() / mask.sum()

    def label_count(self, label: torch.Tensor) -> torch.Tensor:
        return (label >= 0).sum()


class MaskedSquares(nn.Module):
    """The same with a reduction, so that rows can have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        errors = (output - label) ** 2 * (label >= 0)
        if self.reduction == "none":
            return errors
        return errors.sum() / (self.label_count(label) if self.reduction == "mean" else 1)

    def label_count(self, label: torch.Tensor) -> torch.Tensor:
        return (label >= 0).sum()


class TagLoss(nn.Module):
    """The cross entropy of several labels per row, some of which are ignored."""

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, label)

    def label_count(self, label: torch.Tensor) -> torch.Tensor:
        return (label != IGNORED_LABEL).sum()


def margin_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return functional.multilabel_margin_loss(output, label.long())


def gaussian_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    spread = functional.softplus(output[:, 1:])
    return functional.gaussian_nll_loss(output[:, :1], label.reshape(-1, 1), spread)


def triplet_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return functional.triplet_margin_loss(output[:, :2], output[:, 1:], label)


def connectionist_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    steps = functional.log_softmax(output.reshape(len(output), 2, CLASSES), dim=2).transpose(0, 1)
    lengths = torch.full((len(output),), 2)
    return functional.ctc_loss(steps, label.long()[:, :1] + 1, lengths, lengths // 2)


def squared_error_total(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


CE = nn.CrossEntropyLoss
LOSSES = {
    "mse": LossCase(nn.MSELoss),
    "mse sum": LossCase(lambda: nn.MSELoss(reduction="sum")),
    "mse of vectors": LossCase(nn.MSELoss, "vector", width=CLASSES),
    "l1 function": LossCase(lambda: functional.l1_loss),
    "l1 sum partial": LossCase(lambda: functools.partial(functional.l1_loss, reduction="sum")),
    "smooth l1": LossCase(lambda: nn.SmoothL1Loss(beta=0.5)),
    "huber sum": LossCase(lambda: nn.HuberLoss(reduction="sum")),
    "poisson": LossCase(nn.PoissonNLLLoss, "share"),
    "hinge embedding": LossCase(nn.HingeEmbeddingLoss, "sign"),
    "soft margin": LossCase(nn.SoftMarginLoss, "sign"),
    "bce": LossCase(nn.BCELoss, "bit", torch.sigmoid),
    "bce logits": LossCase(lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), "bit"),
    "kl mean": LossCase(nn.KLDivLoss, "shares", _log_softmax, CLASSES),
    "kl batchmean": LossCase(
        lambda: nn.KLDivLoss(reduction="batchmean"), "shares", _log_softmax, CLASSES
    ),
    "kl sum": LossCase(lambda: nn.KLDivLoss(reduction="sum"), "shares", _log_softmax, CLASSES),
    "ce": LossCase(CE, "class", width=CLASSES),
    "ce weight": LossCase(lambda: CE(weight=_weights()), "class", width=CLASSES),
    "ce smoothed": LossCase(lambda: CE(label_smoothing=0.1), "class", width=CLASSES),
    "ce weight smoothed": LossCase(
        lambda: CE(weight=_weights(), label_smoothing=0.1), "class", width=CLASSES
    ),
    "ce ignored": LossCase(CE, "class_or_ignored", width=CLASSES),
    "ce weight ignored smoothed": LossCase(
        lambda: CE(weight=_weights(), label_smoothing=0.2), "class_or_ignored", width=CLASSES
    ),
    "ce ignores a class": LossCase(lambda: CE(ignore_index=1), "class", width=CLASSES),
    "ce sum weight": LossCase(
        lambda: CE(weight=_weights(), reduction="sum"), "class", width=CLASSES
    ),
    "ce of shares": LossCase(lambda: CE(weight=_weights()), "shares", width=CLASSES),
    "ce partial": LossCase(
        lambda: functools.partial(functional.cross_entropy, weight=_weights()),
        "class_or_ignored",
        width=CLASSES,
    ),
    "ce partial of floats": LossCase(
        lambda: functools.partial(functional.cross_entropy, ignore_index=1),
        "class_as_float",
        width=CLASSES,
    ),
    "ce weight of zero smoothed": LossCase(
        lambda: CE(weight=torch.tensor([1.0, 0.0, 2.0]), label_smoothing=0.2),
        "class",
        width=CLASSES,
    ),
    "ce of lists": LossCase(CE, "tags", _two_tags, 2 * CLASSES),
    "ce weight smoothed of lists": LossCase(
        lambda: CE(weight=_weights(), label_smoothing=0.1), "tags", _two_tags, 2 * CLASSES
    ),
    "ce sum of lists": LossCase(lambda: CE(reduction="sum"), "tags", _two_tags, 2 * CLASSES),
    "nll": LossCase(nn.NLLLoss, "class", _log_softmax, CLASSES),
    "nll weight ignored": LossCase(
        lambda: nn.NLLLoss(weight=_weights()), "class_or_ignored", _log_softmax, CLASSES
    ),
    "multi margin": LossCase(lambda: nn.MultiMarginLoss(weight=_weights()), "class", width=CLASSES),
    "multi-label margin": LossCase(nn.MultiLabelMarginLoss, "targets", width=CLASSES),
    "multi-label soft margin": LossCase(nn.MultiLabelSoftMarginLoss, "bits", width=CLASSES),
    "own masked": LossCase(MaskedError, own=True),
    "own masked with reduction": LossCase(MaskedSquares),
    "own tags": LossCase(TagLoss, "tags", _two_tags, 2 * CLASSES, own=True),
    "own multi-label margin": LossCase(lambda: margin_loss, "targets", width=CLASSES, own=True),
    "own gaussian": LossCase(lambda: gaussian_loss, width=2, own=True),
    "own triplet": LossCase(lambda: triplet_loss, "vector2", width=CLASSES, own=True),
    "own ctc": LossCase(lambda: connectionist_loss, "shorts", width=2 * CLASSES, own=True),
    "own sum": LossCase(lambda: squared_error_total, reduction="sum", own=True),
    "own mean": LossCase(lambda: lambda output, label: ((output - label) ** 2).mean(), own=True),
}

SPREADS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (1, 3))
"""Processes and backward passes per step; a global batch has the same rows in all of them."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "loss": tuple(LOSSES),
    "second": (None, "mse", "ce weight", "mse sum", "ce ignored"),
    "spread": SPREADS,
    "rows": (24, 25, 29, 35),
    "weights": (None, "ones", "random"),
    "optimizer": ("sgd", "adam", "momentum"),
    "clip": (None, 0.5),
    "validation": (False, True),
    "scheduler": (None, "epoch", "step"),
    "shape": ("whole", "minibatch"),
    "before": (None, *SPREADS),
}
GLOBAL_BATCH_ROWS = 12


def is_valid_cell(cell: dict[str, Any]) -> bool:
    """Returns whether a fit takes these options together."""
    losses = [LOSSES[cell["loss"]], *([LOSSES[cell["second"]]] if cell["second"] else [])]
    if cell["weights"] is not None and any(one.own for one in losses):
        return False
    return not any(one.reduction for one in losses) or len(losses) == 1
